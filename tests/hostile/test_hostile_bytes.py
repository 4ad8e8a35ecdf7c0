"""Bytes an adversary may put into a store: refused by name, before they cost memory (format §9)."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recpoint.errors import DigestMismatch, FormatError, MalformedObject, UnsupportedVersion
from recpoint.format import naming
from recpoint.format.chunk import Chunk, Section, build_chunk, parse_chunk
from recpoint.format.dtypes import array_bytes, item_bytes
from recpoint.format.job import Cancel, Job
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.records import (
    EndRecord,
    GenerationRecord,
    Record,
    RunRecord,
    pack_record,
    unpack_record,
)
from recpoint.format.rejections import Rejections
from recpoint.format.retention_records import Deletion, Lease, Mark, Metric, Pin, Plan, Publication
from recpoint.format.untrusted_json import parse_json
from recpoint.format.validation import ValidationRecord

V1 = Path(__file__).parents[1] / "golden" / "v1"
MANIFEST = "manifests/000000000120-00000002.json"
CONSOLIDATED = "consolidated/000000000120-00000002-full.json"
MIB = 1 << 20
PIN = naming.pin_key(100, 1, "release-7")
METRIC = naming.metric_key(100, 1, "auc")
PUBLISHED = naming.publication_key(7)
PLAN = naming.PLAN_KEY
REJECTIONS = naming.rejections_key(3)
MARK = naming.expired_key(naming.manifest_key(100, 1))
DELETION = naming.DELETION_KEY
LEASE = naming.lease_key("5f" * 16)


@cache
def body_text(path: str = MANIFEST) -> str:
    return json.dumps(json.loads((V1 / path).read_bytes())["body"])


def body(path: str = MANIFEST) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(body_text(path))
    return parsed


def envelope(fields: object) -> bytes:
    """The fields with a digest that is right, as an adversary would write it."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    data = text.encode(errors="surrogatepass")
    return b'{"body":%b,"crc32c":%d}' % (data, crc32c.crc32c(data))


def unpack(data: bytes) -> Manifest:
    return unpack_record(Manifest, data, name=MANIFEST, next_step="recpoint check URL")


def cost(refused: Callable[[], object]) -> tuple[int, float, FormatError]:
    """(peak bytes allocated, seconds, error) of a call that must be refused."""
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(FormatError) as caught:
            refused()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return peak_bytes, time.perf_counter() - started, caught.value


@pytest.mark.parametrize(
    "key",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "chunks/../../etc/passwd",
        "chunks/000000000120-00000002-" + "1b" * 16 + "/../../run.json",
        "chunks/000000000120-00000002-" + "1b" * 16 + "/r00000-t00000-000000.safetensors\n",
        "chunks/000000000120-00000002-" + "1b" * 16 + "/r00000-t00000-000000.safetensors/x",
        "chunks/000000000120-00000002-" + "1B" * 16 + "/r00000-t00000-000000.safetensors",
        "chunks/00000000012٠-00000002-" + "1b" * 16 + "/r00000-t00000-000000.safetensors",
        "s3://other/chunks/x.safetensors",
        "file:///etc/passwd",
        "chunks\\x",
        "",
        "run.json",
        "x" * 10_000,
        "\x00",
        "chunks/000000000120-00000002-" + "1b" * 16 + "/r00000-t00001-000000.safetensors",
        "chunks/000000000120-00000002-" + "1b" * 16 + "/r00001-t00000-000000.safetensors",
        "chunks/000000000120-00000002-" + "1b" * 16 + "/r00000-state-000009.safetensors",
    ],
)
def test_a_key_that_is_not_that_chunks(key: str) -> None:
    fields = body()
    fields["chunks"][0]["key"] = key
    with pytest.raises(MalformedObject) as caught:
        unpack(envelope(fields))
    assert caught.value.subject == MANIFEST and len(str(caught.value)) < 600


def changed(path: str, value: object, of: str = MANIFEST) -> dict[str, Any]:
    """The manifest with the field at `path`, for instance `chunks.0.bytes`, replaced."""
    fields = body(of)
    *above, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target: Any = fields
    for part in above:
        target = target[part]
    target[last] = value
    return fields


INTEGERS = [
    "step",
    "generation",
    "chain_length",
    "ranks",
    "snapshot_ms",
    "stall_us",
    "dirty_rows",
    "parent.step",
    "tables.0.rows",
    "tables.0.dim",
    "tables.0.row_states.0.shape.0",
    "tables.0.row_states.0.optimizer",
    "chunks.0.bytes",
    "chunks.0.crc32c",
    "chunks.0.rank",
    "chunks.0.table",
    "chunks.0.row_count",
    "chunks.0.first_row",
    "chunks.0.last_row",
    "chunks.0.bits",
    "history.trained_ms",
    "history.lossy_restores",
    "history.precision.bits",
    "quantizers.0.table",
    "quantizers.0.rank",
    "quantizers.0.bins",
    "quantizers.0.ratio_permille",
    "quantizers.0.refits",
    "quantizers.0.sample_rows",
    "quantizers.0.seed",
]


@pytest.mark.parametrize("path", INTEGERS)
@pytest.mark.parametrize(
    "value", [-1, 2**63, 2**64, 10**400, True, "1", None, [], {}], ids=lambda v: str(v)[:12]
)
def test_numbers_outside_their_bounds_or_of_another_type(path: str, value: object) -> None:
    with pytest.raises(MalformedObject) as caught:
        unpack(envelope(changed(path, value)))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("kind", "partial"),
        ("kind", "full"),
        ("base", None),
        ("parent.step", 120),
        ("parent.step", 99),
        ("run", "5EED" * 8),
        ("attempt", "1b" * 16 + "\n"),
        ("tables.0.name", ""),
        ("tables.0.name", "x" * 1025),
        ("tables.0.name", "\ud800"),
        ("tables.0.dtype", "I64"),
        ("tables.0.rows", 3),
        ("chunks", []),
        ("tables.0.columns", {"first": 0, "of": 5}),
        ("tables.0.columns", {"first": 3, "of": 7}),
        ("tables.0.columns", {"first": 0, "of": 6}),
        ("tables.0.columns", {"first": 0, "of": 2**20 + 1}),
        ("tables.0.columns", {"first": -1, "of": 6}),
        ("tables.0.columns", {}),
        ("chunks.0.first_row", 1),
        ("chunks.0.last_row", 2),
        ("chunks.0.last_row", 40),
        ("chunks.5.first_row", 0),
        ("chunks.0.scheme", "exact"),
        ("chunks.0.scheme", None),
        ("chunks.0.bits", 5),
        ("chunks.4.bits", 64),
        ("chunks.0.content", "state"),
        ("chunks.5.bits", 8),
        ("quantizers.0.table", 1),
        ("quantizers.0.rank", 1),
        ("quantizers.0.method", ""),
        ("quantizers.0.method", "x" * 33),
        ("quantizers.0.method", "Greedy"),
        ("quantizers.0.method", "greedy\n"),
        ("quantizers.0.method", "[red]"),
        ("quantizers.0.bins", 2**31),
        ("quantizers.0.sample_rows", 0),
        ("quantizers", {}),
        ("quantizers", [None]),
        ("quantized_by", "x" * 256),
        ("quantized_by", None),
        ("policy", ""),
        ("policy", "x" * 33),
        ("policy", "one shot"),
        ("policy", "One_shot"),
        ("policy", "one_shot\n"),
        ("policy", "[red]"),
        ("policy", None),
        ("state_bits", 8),
        ("state_bits", True),
        ("state_bits", "16"),
        ("writer", "x" * 256),
        ("history", None),
        ("history", []),
        ("history.trained_ms", 2**53),
        ("history.due_ms", 2**53),
        ("history.due_ms", 60_000),  # beside due_batches
        ("history.due_batches", "20"),
        ("history.due_batches", -1),
        ("history.precision", "8"),
        ("history.precision", {}),
        ("history.precision.bits", 5),
        ("history.precision.bits", 32),
        ("history.precision.expected_milli", -1),
        ("history.precision.expected_milli", 2**53),
        ("history.precision.expected_milli", True),
        ("history.precision.fallen_back", 1),
        ("history.precision.fallen_back", True),
        ("history.precision.expected_milli", None),
        ("history.precision.fallen_back", None),
        ("history.precision.reason", "x" * 501),
        ("history.precision.reason", None),
        ("history.precision.reason", "\ud800"),
    ],
)
def test_fields_that_contradict_each_other_or_the_format(path: str, value: object) -> None:
    with pytest.raises(MalformedObject):
        unpack(envelope(changed(path, value)))


def link(step: int) -> dict[str, Any]:
    return {"step": step, "generation": 1, "attempt": "0a" * 16}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("stands_for", {}),
        ("stands_for", []),
        ("stands_for", 1),
        ("stands_for.kind", "full"),
        ("stands_for.kind", None),
        ("stands_for.base", None),
        ("stands_for.parent", None),
        ("stands_for.parent.step", 120),
        ("stands_for.parent.step", 99),
        ("stands_for.base.step", 101),
        ("stands_for.chain_length", 1),
        ("stands_for.chain_length", 1_000_001),
        ("stands_for.chain_length", 10**400),
        ("stands_for.chain_length", True),
        ("stands_for.chain_length", "2"),
        ("stands_for.news", 1),
        # Without it the chunks are not the checkpoint's own, but that is for a restore to notice;
        # what a full says of its links is checked here.
        ("chain_length", 2),
        ("base", link(100)),
        # Its chunks are those of one consolidation of this checkpoint, and of no other.
        ("attempt", "3d" * 16),
        ("step", 121),
        ("generation", 3),
        (
            "chunks.0.key",
            "chunks/000000000120-00000002-" + "1b" * 16 + "/r00000-t00000-000000.safetensors",
        ),
        (
            "chunks.1.key",
            "chunks/000000000100-00000001-" + "3d" * 16 + "/r00000-t00000-000000.safetensors",
        ),
        (
            "chunks.6.key",
            "chunks/000000000120-00000002-" + "4e" * 16 + "/r00000-state-000000.safetensors",
        ),
    ],
)
def test_lies_about_what_a_consolidation_stands_for(path: str, value: object) -> None:
    with pytest.raises(MalformedObject) as caught:
        unpack(envelope(changed(path, value, CONSOLIDATED)))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "changes",
    [
        {"parent": link(115)},  # that of what it stands for: no shorter
        {"parent": link(116)},
        {"parent": link(90)},
        {"base": link(101)},
        {"chain_length": 5},
        {"chain_length": 1},
    ],
    ids=str,
)
def test_an_increment_that_is_not_shorter_than_what_it_stands_for(
    changes: dict[str, object],
) -> None:
    taken = {"kind": "increment", "base": link(100), "parent": link(115), "chain_length": 5}
    shorter = {"kind": "increment", "base": link(100), "parent": link(110), "chain_length": 3}
    fields = body(CONSOLIDATED) | {"stands_for": taken} | shorter
    # A full has 40 rows, an increment may.
    assert unpack(envelope(fields)).links.chain_length == 5
    with pytest.raises(MalformedObject):
        unpack(envelope(fields | changes))


def test_one_chunk_or_quantizer_twice_and_two_tables_of_one_name() -> None:
    for field in ("chunks", "tables", "quantizers"):
        fields = body()
        fields[field].append(fields[field][0])
        with pytest.raises(MalformedObject):
            unpack(envelope(fields))


@pytest.mark.parametrize(
    "path",
    [
        "step",
        "version",
        "chunks.0.table",
        "chunks.5.table",
        "base",
        "quantizers",
        "quantizers.0.seed",
        "history",
        "history.due_ms",
        "history.precision",
        "history.precision.expected_milli",
    ],
)
def test_a_field_missing(path: str) -> None:
    fields = body()
    *above, last = path.split(".")
    target: Any = fields
    for part in above:
        target = target[int(part) if part.isdigit() else part]
    del target[last]
    with pytest.raises(MalformedObject):
        unpack(envelope(fields))


@pytest.mark.parametrize("version", [2, 0, -1, 10**300])
def test_another_version_is_reported_as_one_whatever_else_is_there(version: int) -> None:
    with pytest.raises(UnsupportedVersion) as caught:
        unpack(envelope({"format": "recpoint/manifest", "version": version, "news": {}}))
    assert "upgrade" in caught.value.next_step


@pytest.mark.parametrize("version", [True, "1", None, [1]])
def test_a_version_that_is_no_number(version: object) -> None:
    with pytest.raises(MalformedObject, match="version"):
        unpack(envelope(body() | {"version": version}))


def test_a_record_of_another_kind() -> None:
    data = (V1 / "run.json").read_bytes()
    with pytest.raises(MalformedObject, match="recpoint/manifest"):
        unpack(data)


def test_digests() -> None:
    data = (V1 / MANIFEST).read_bytes()
    with pytest.raises(DigestMismatch):
        unpack(data.replace(b'"step":120', b'"step":121', 1))
    for digest in (b"true", b"null", b'"1"', b"{}"):
        start = data.index(b'"crc32c":', data.rindex(b'"writer"')) + len(b'"crc32c":')
        with pytest.raises(MalformedObject):
            unpack(data[:start] + digest + b"}")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'{"body":{}}',
        b'{"body":{},"crc32c":0,"more":1}',
        b'{"body":{},"body":{},"crc32c":0}',
        b'{"body":[],"crc32c":0}',
        b'{"body":{"step":1,"step":2},"crc32c":0}',
        b'{"body":{"step":1.0},"crc32c":0}',
        b'{"body":{"step":1e400},"crc32c":0}',
        b'{"body":{"step":NaN},"crc32c":0}',
        b'{"body":{"step":-Infinity},"crc32c":0}',
        b'{"body":{"format":"\\ud800"},"crc32c":0}',
        b'{"body":{"format":"\xff"},"crc32c":0}',
        b'\xef\xbb\xbf{"body":{},"crc32c":0}',
        b'{"body":{"step":' + b"1" * 5000 + b'},"crc32c":0}',
        b'{"body":' + b"[" * 17 + b"]" * 17 + b',"crc32c":0}',
    ],
    ids=range(17),
)
def test_envelopes_that_are_none(data: bytes) -> None:
    with pytest.raises(MalformedObject) as caught:
        unpack(data)
    assert len(str(caught.value)) < 600
    str(caught.value).encode()


def test_brackets_in_strings_are_not_nesting() -> None:
    for text in ("[" * 99, '\\"[' * 99, "\\" * 7 + "[{" * 50, '"' + "]" * 99):
        data = json.dumps({"x": [text, ["y"]]}).encode()
        assert parse_json(data, name="x", next_step="", max_bytes=MIB) == {"x": [text, ["y"]]}


@pytest.mark.parametrize(
    ("bomb", "times"),
    [
        (b"[" * (16 * MIB), 4),
        (b'{"a":' * (3 * MIB), 4),
        (b'"' * (16 * MIB), 4),
        (b'"' + b'\\"' * (8 * MIB), 5),
        (b"\\" * (16 * MIB), 4),
        (b"[" + b"{}," * (9 * MIB) + b"0]", 4),
        (b"[" + b"1," * (9 * MIB) + b"0]", 4),
        (b"1" * (16 * MIB), 4),
        (b"[" * 16 + b"]" * (16 * MIB), 4),
    ],
    ids=["lists", "objects", "quotes", "escapes", "slashes", "empties", "ints", "digits", "closed"],
)
def test_a_bomb_costs_no_more_than_a_few_times_its_bytes(bomb: bytes, times: int) -> None:
    peak_bytes, seconds, _ = cost(lambda: unpack(bomb))
    assert peak_bytes < times * len(bomb) + 64 * MIB
    assert seconds < 20


def test_what_is_too_large_is_not_even_scanned() -> None:
    data = b"[" * ((64 << 20) + 1)
    peak_bytes, _, error = cost(lambda: unpack(data))
    assert peak_bytes < MIB and "at most" in error.expected


@pytest.mark.parametrize("field", ["chunks", "tables"])
def test_a_million_bad_entries_are_one_error(field: str) -> None:
    data = envelope(body() | {field: [{}] * 100_000})
    peak_bytes, seconds, error = cost(lambda: unpack(data))
    assert peak_bytes < 64 * MIB and seconds < 20
    assert error.found.startswith(f"{field}.0.")


def test_an_object_of_a_million_keys_one_of_them_twice() -> None:
    data = b"{" + b",".join(b'"%d":1' % number for number in range(300_000)) + b',"7":1}'
    peak_bytes, seconds, _ = cost(lambda: unpack(data))
    assert peak_bytes < 256 * MIB and seconds < 20


# --- records of keeping and deleting -------------------------------------------------------------


VALIDATION = naming.validation_key(naming.ValidationName(100, 1, 3, "full", "failed"))
DIGESTS = {"table": 0, "values": "0" * 16, "row_states": []}

VALIDATION_FIELDS: list[tuple[str, object]] = [
    ("level", "everything"),
    ("result", "good"),
    ("findings", []),
    ("findings", [{}] * 1001),
    ("findings", [{}] * 100_000),
    ("findings.0.row", -1),
    ("findings.0.row", 2**48),
    ("findings.0.subject", "x" * 1001),
    ("findings.0.bound", 0),
    ("digests", [DIGESTS, DIGESTS]),
    ("digests", [{}] * 100_000),
    ("digests.0.values", "0" * 15),
    ("digests.0.values", "0" * 15 + "G"),
    ("digests.0.row_states", ["0" * 16] * 65),
    ("worst_ppm", 2**63),
    ("worst_ppm", 0.5),
    ("links_read", 1_000_001),
    ("checkpoint", None),
    ("evaluated_by", "x" * 1001),
]


@pytest.mark.parametrize(("field", "value"), VALIDATION_FIELDS, ids=lambda value: str(value)[:20])
def test_validation_records(field: str, value: object) -> None:
    fields: Any = body(VALIDATION)
    target = fields
    *above, last = [int(part) if part.isdigit() else part for part in field.split(".")]
    for part in above:
        target = target[part]
    target[last] = value
    data = envelope(fields)
    peak_bytes, seconds, error = cost(
        lambda: unpack_record(ValidationRecord, data, name=VALIDATION, next_step="recpoint check")
    )
    assert isinstance(error, MalformedObject) and len(str(error)) < 800
    assert peak_bytes < 128 * MIB and seconds < 20


RETENTION_FIELDS: list[tuple[type[Record], str, str, object]] = [
    (EndRecord, "ends/00000002.json", "reason", "killed"),
    (EndRecord, "ends/00000002.json", "step", 10**12),
    (EndRecord, "ends/00000002.json", "generation", 0),
    (EndRecord, "ends/00000002.json", "ended_ms", "now"),
    (Pin, PIN, "name", "../x"),
    (Pin, PIN, "name", "x" * 65),
    (Pin, PIN, "name", "A"),
    (Pin, PIN, "why", "x" * 1025),
    (Pin, PIN, "who", None),
    (Pin, PIN, "checkpoint", None),
    (Pin, PIN, "created_ms", 2**53),
    (Publication, PUBLISHED, "number", 0),
    (Publication, PUBLISHED, "number", 10**8),
    (Publication, PUBLISHED, "number", "7"),
    (Publication, PUBLISHED, "held", 1),
    (Publication, PUBLISHED, "held", None),
    (Publication, PUBLISHED, "checkpoint", {"step": 1}),
    (Publication, PUBLISHED, "why", "x" * 1025),
    (Publication, PUBLISHED, "more", 1),
    (Plan, PLAN, "rules", None),
    (Plan, PLAN, "rules", {"last": 1}),
    (Plan, PLAN, "delete", -1),
    (Plan, PLAN, "keep", True),
    (Plan, PLAN, "manifests", [{"manifest": "../x", "action": "keep", "reason": ""}] * 100_000),
    (Plan, PLAN, "manifests", None),
    (Plan, PLAN, "grace_ms", 0.5),
    (Rejections, REJECTIONS, "newest", []),
    (Rejections, REJECTIONS, "newest", [{"error": "x"}] * 100_000),
    (Rejections, REJECTIONS, "count", 0),
    (Rejections, REJECTIONS, "rank", 10**5),
    (Rejections, REJECTIONS, "host", "x" * 256),
    (Metric, METRIC, "value", "nan"),
    (Metric, METRIC, "value", "inf"),
    (Metric, METRIC, "value", "0.5"),
    (Metric, METRIC, "value", "0x1.0p+99999999999999"),
    (Metric, METRIC, "value", 1),
    (Metric, METRIC, "value", "x" * 41),
    (Mark, MARK, "manifest", "../../etc/passwd"),
    (Mark, MARK, "manifest", "manifests/000000000100-00000001.json\n"),
    (Mark, MARK, "manifest", "chunks/000000000100-00000001.json"),
    (Mark, MARK, "manifest", "manifests/000000000100-00000000.json"),
    (Mark, MARK, "reason", "x" * 1025),
    (Mark, MARK, "stamp", None),
    (Mark, MARK, "stamp", {"written_ms": 1, "boot": "x", "boot_ms": 1}),
    (Deletion, DELETION, "manifests", []),
    (Deletion, DELETION, "manifests", ["run.json"]),
    (Deletion, DELETION, "manifests", ["run.json"] * 100_000),
    (Deletion, DELETION, "token", "x"),
    (Lease, LEASE, "covers", [{}]),
    (Lease, LEASE, "covers", [{}] * 10_000),
    (Lease, LEASE, "covers", [{}] * 100_000),
    (Lease, LEASE, "covers", 1),
    (Lease, LEASE, "ttl_seconds", 0),
    (Lease, LEASE, "ttl_seconds", 604_801),
    (Lease, LEASE, "ttl_seconds", True),
    (Lease, LEASE, "purpose", "Restore"),
    (Lease, LEASE, "owner", "5F" * 16),
]


@pytest.mark.parametrize(
    ("kind", "path", "field", "value"), RETENTION_FIELDS, ids=lambda value: str(value)[:20]
)
def test_pins_metrics_marks_deletions_and_leases(
    kind: type[Record], path: str, field: str, value: object
) -> None:
    data = envelope(body(path) | {field: value})
    peak_bytes, seconds, error = cost(
        lambda: unpack_record(kind, data, name=path, next_step="recpoint check URL")
    )
    assert isinstance(error, MalformedObject) and len(str(error)) < 800
    assert peak_bytes < 128 * MIB and seconds < 20


# --- chunks --------------------------------------------------------------------------------------


@cache
def golden_chunk(index: int = 0) -> tuple[Manifest, ChunkEntry, bytes]:
    manifest = unpack((V1 / MANIFEST).read_bytes())
    entry = manifest.chunks[index]
    return manifest, entry, (V1 / entry.key).read_bytes()


def parse(data: bytes, index: int = 0) -> Chunk:
    """Parse with the length and the digest that an adversary has put into the manifest."""
    manifest, entry, _ = golden_chunk(index)
    entry = entry.model_copy(update={"bytes": len(data), "crc32c": crc32c.crc32c(data)})
    return parse_chunk(data, key=entry.key, entry=entry, manifest=manifest)


def with_header(change: Callable[[dict[str, Any]], object], *, body: bytes | None = None) -> bytes:
    data = golden_chunk()[2]
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + (data[8 + length :] if body is None else body)


def set_array(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["scale"].update(changes)


def test_the_helper_changes_nothing_by_itself() -> None:
    assert parse(with_header(lambda header: None)).meta.bits == 2


@pytest.mark.parametrize(
    "change",
    [
        set_array(shape=[2**62, 2**62]),
        set_array(shape=[10**4000]),
        set_array(shape=[-4]),
        set_array(shape=[True, 4]),
        set_array(shape=[4.0]),
        set_array(shape=["4"]),
        set_array(shape=4),
        set_array(shape=None),
        set_array(shape=[4] + [1] * 100),
        set_array(shape=[0, 2**62, 2**62]),
        set_array(data_offsets=[0, 2**70]),
        set_array(data_offsets=[-16, 0]),
        set_array(data_offsets=[16, 0]),
        set_array(data_offsets=[0, 16]),
        set_array(data_offsets=[0]),
        set_array(data_offsets=[0, 16, 32]),
        set_array(data_offsets=[True, 16]),
        set_array(data_offsets="ab"),
        set_array(dtype="F99"),
        set_array(dtype=["F32"]),
        set_array(dtype="F64"),
        set_array(more=1),
        lambda header: header.pop("scale"),
        lambda header: header.update(scale=[]),
        lambda header: header.update(scale=dict(header["offset"])),
        lambda header: header.update(extra=dict(header["offset"])),
        lambda header: header.update({"../../x": header.pop("scale")}),
        lambda header: header.pop("__metadata__"),
        lambda header: header.update(__metadata__={"recpoint": 1}),
        lambda header: header.update(__metadata__={"recpoint": "{" * 1000}),
        lambda header: header.update(__metadata__=[]),
    ],
    ids=range(31),
)
def test_headers_that_lie(change: Callable[[dict[str, Any]], object]) -> None:
    data = with_header(change)
    peak_bytes, _, error = cost(lambda: parse(data))
    assert isinstance(error, MalformedObject)
    assert error.subject == golden_chunk()[1].key and "recpoint check" in error.next_step
    assert peak_bytes < MIB and len(str(error)) < 1000


@pytest.mark.parametrize("extra", [-1, 1, 1000])
def test_a_body_that_is_too_short_or_too_long(extra: int) -> None:
    data = golden_chunk()[2]
    with pytest.raises(MalformedObject):
        parse(data[:extra] if extra < 0 else data + bytes(extra))


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**20 + 1, 10_000, 1, 0])
def test_a_header_length_that_lies(length: int) -> None:
    data = golden_chunk()[2]
    peak_bytes, _, _ = cost(lambda: parse(length.to_bytes(8, "little") + data[8:]))
    assert peak_bytes < MIB


@pytest.mark.parametrize("data", [b"\x00", b"\x00" * 7, b"\x00" * 8, b"\x02" + b"\x00" * 7 + b"{}"])
def test_files_that_are_hardly_there(data: bytes) -> None:
    with pytest.raises(MalformedObject):
        parse(data)


def test_a_header_of_duplicate_keys() -> None:
    data = golden_chunk()[2]
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip()[:-1] + b',"scale":{}}'
    with pytest.raises(MalformedObject, match="twice"):
        parse(len(header).to_bytes(8, "little") + header + data[8 + length :])


def test_a_header_of_more_than_a_mebibyte() -> None:
    header = b"{" + b" " * MIB + b"}"
    with pytest.raises(MalformedObject, match="at most 1048576 bytes"):
        parse(len(header).to_bytes(8, "little") + header)


# --- mutations -----------------------------------------------------------------------------------


@st.composite
def mutations(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with a few bytes replaced, inserted, removed or repeated."""
    mutated = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(mutated)))
        end = min(len(mutated), start + draw(st.integers(0, 12)))
        piece = draw(st.binary(max_size=12) | st.just(bytes(mutated[start:end]) * 2))
        mutated[start:end] = piece
    return bytes(mutated)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (RunRecord, "run.json"),
        (GenerationRecord, "generations/00000002.json"),
        (EndRecord, "ends/00000002.json"),
        (Manifest, MANIFEST),
        (Job, "staging/job.json"),
        (Cancel, "staging/cancel.json"),
    ],
)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_mutated_records(kind: type[Any], path: str, data: st.DataObject) -> None:
    written = (V1 / path).read_bytes()
    original = unpack_record(kind, written, name="", next_step="")
    bad = data.draw(mutations(written))
    try:
        found = unpack_record(kind, bad, name="", next_step="")
    except FormatError:
        return
    assert found == original  # only what JSON does not distinguish, such as a space, may differ


@pytest.mark.parametrize("path", ["run.json", MANIFEST, "staging/job.json"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_mutated_bodies_with_a_right_digest(path: str, data: st.DataObject) -> None:
    kind: type[Any] = {"run.json": RunRecord, MANIFEST: Manifest}.get(path, Job)
    mutated = data.draw(mutations(body_text(path).encode()))
    try:
        bad = envelope(json.loads(mutated))
    except ValueError:
        bad = b'{"body":%b,"crc32c":0}' % mutated
    try:
        record = unpack_record(kind, bad, name="", next_step="")
        assert unpack_record(kind, pack_record(record), name="", next_step="") == record
    except FormatError as error:
        assert len(str(error)) < 1000


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_chunks_with_a_right_digest(data: st.DataObject) -> None:
    index = data.draw(st.integers(0, 5))
    written = golden_chunk(index)[2]
    original = parse(written, index)
    try:
        found = parse(data.draw(mutations(written)), index)
    except FormatError as error:
        assert len(str(error)) < 1000
        return
    # What is in the arrays is the digest's business, which was put right here; their form is not.
    assert (found.meta.run, found.meta.step) == (original.meta.run, original.meta.step)
    if found.meta.content == "rows":
        assert _forms(found) == _forms(original)


def _forms(chunk: Chunk) -> dict[str, object]:
    sections = chunk.sections.values()
    return {s.name: (s.dtype, s.shape) for s in sections if s.name != "row_set"}


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_mutated_chunks_as_the_manifest_knows_them(data: st.DataObject) -> None:
    manifest, entry, written = golden_chunk()
    mutated = data.draw(mutations(written))
    if mutated == written:
        return
    with pytest.raises(DigestMismatch):
        parse_chunk(mutated, key=entry.key, entry=entry, manifest=manifest)


def test_the_time_for_a_manifest_follows_its_chunks() -> None:
    def parsed_s(chunks: int) -> float:
        fields = body()
        first = dict(fields["chunks"][0])
        fields["tables"][0]["rows"] = 2**40
        fields["chunks"] = [
            first | {"key": naming.row_chunk_key(120, 2, "1b" * 16, rank=0, table=0, number=number)}
            for number in range(chunks)
        ]
        data = envelope(fields)
        started = time.process_time()
        assert len(unpack(data).chunks) == chunks
        return time.process_time() - started

    # Ten times as much where each chunk is looked at once, a hundred where each meets each other.
    assert parsed_s(50_000) < 40 * parsed_s(5_000)


# --- sample chunks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"sample.0.ids": ("I64", (0,))},
        {"sample.0.ids": ("I64", (1, 3))},
        {"sample.0.ids": ("I32", (3,))},
        {"sample.0.ids": None},
        {"sample.0.values": None},
        {"sample.0.values": ("F32", (2, 5))},
        {"sample.0.values": ("F16", (3, 5))},
        {"sample.0.state.1": None},
        {"sample.0.state.2": ("I64", (3,))},
        {"sample.0.digests": ("I64", (3,))},
        {"sample.1.ids": ("I64", (3,))},
        {"sample.00.ids": ("I64", (3,))},
        {"tensor.0": ("I64", (3,))},
        {"tree": ("U8", (3,))},
    ],
    ids=lambda change: str(change)[1:40],
)
def test_samples_that_do_not_fit_their_tables(change: dict[str, Any]) -> None:
    key = naming.sample_chunk_key(100, 1, "0a" * 16, rank=0, number=0)
    full = unpack_record(
        Manifest, (V1 / naming.manifest_key(100, 1)).read_bytes(), name="", next_step=""
    )

    def parse(data: bytes) -> Chunk:
        entry = ChunkEntry(
            key=key, bytes=len(data), crc32c=crc32c.crc32c(data), content="sample", rank=0
        )
        return parse_chunk(data, key=key, entry=entry, manifest=full)

    good = parse((V1 / key).read_bytes())
    sections = dict(good.sections)
    for name, form in change.items():
        sections.pop(name, None)
        if form is not None:
            dtype, shape = form
            sections[name] = Section(name, dtype, shape, bytes(array_bytes(dtype, shape)))
    # Wider items first, as a writer puts them: else this would be refused for its alignment.
    ordered = sorted(sections.values(), key=lambda section: -item_bytes(section.dtype))
    with pytest.raises(MalformedObject) as caught:
        parse(build_chunk(good.meta, ordered))
    assert len(str(caught.value)) < 600
