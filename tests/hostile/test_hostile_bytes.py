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
from recpoint.format.chunk import Chunk, parse_chunk
from recpoint.format.job import Job
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.records import GenerationRecord, RunRecord, pack_record, unpack_record
from recpoint.format.untrusted_json import parse_json

V1 = Path(__file__).parents[1] / "golden" / "v1"
MANIFEST = "manifests/000000000120-00000002.json"
MIB = 1 << 20


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


def changed(path: str, value: object) -> dict[str, Any]:
    """The manifest with the field at `path`, for instance `chunks.0.bytes`, replaced."""
    fields = body()
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
    "chunks.0.bits",
    "quantizers.0.table",
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
        ("chunks.0.scheme", "exact"),
        ("chunks.0.scheme", None),
        ("chunks.0.bits", 5),
        ("chunks.4.bits", 64),
        ("chunks.0.content", "state"),
        ("chunks.5.bits", 8),
        ("quantizers.0.table", 1),
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
        ("state_bits", 8),
        ("state_bits", True),
        ("state_bits", "16"),
        ("writer", "x" * 256),
    ],
)
def test_fields_that_contradict_each_other_or_the_format(path: str, value: object) -> None:
    with pytest.raises(MalformedObject):
        unpack(envelope(changed(path, value)))


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
        (Manifest, MANIFEST),
        (Job, "staging/job.json"),
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


def test_a_manifest_of_a_hundred_thousand_chunks_takes_seconds() -> None:
    fields = body()
    first = dict(fields["chunks"][0])
    fields["tables"][0]["rows"] = 2**40
    fields["chunks"] = [
        first | {"key": naming.row_chunk_key(120, 2, "1b" * 16, rank=0, table=0, number=number)}
        for number in range(100_000)
    ]
    data = envelope(fields)
    started = time.perf_counter()
    manifest = unpack(data)
    assert len(manifest.chunks) == 100_000
    assert time.perf_counter() - started < 30
