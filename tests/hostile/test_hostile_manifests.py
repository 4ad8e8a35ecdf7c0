"""Manifests that lie: refused by name, before they cost memory (format §9)."""

from __future__ import annotations

from typing import Any

import pytest

from recpoint.errors import MalformedObject
from recpoint.format.records import pack_record
from tests.hostile.forged import CONSOLIDATED, MANIFEST, body, changed, envelope, unpack


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


#: What a manifest may say of rows that were copied before the stall.
LOSS = {
    "increase": (1e-4).hex(),
    "price": (2.0**-30).hex(),
    "low": None,
    "high": (5e-5).hex(),
    "predicted": None,
    "batches": 2**63 - 1,
}
COPIED = {"rows_before": 1, "bytes_before": 1, "rows_in_stall": 0, "bytes_in_stall": 2**63 - 1}

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
        ("loss", None),
        ("loss", {}),
        ("loss", LOSS | {"increase": 1e-4}),
        ("loss", LOSS | {"increase": "0.0001"}),
        ("loss", LOSS | {"high": "inf"}),
        ("loss", LOSS | {"batches": -1}),
        ("loss", LOSS | {"more": 1}),
        ("copied_ahead", None),
        ("copied_ahead", {}),
        ("copied_ahead", [1, 1, 1, 1]),
        ("copied_ahead", COPIED | {"rows_before": 0}),
        ("copied_ahead", COPIED | {"bytes_before": 0}),
        ("copied_ahead", COPIED | {"rows_before": 2**63}),
        ("copied_ahead", COPIED | {"rows_in_stall": -1}),
        ("copied_ahead", COPIED | {"bytes_in_stall": True}),
        ("copied_ahead", COPIED | {"bytes_in_stall": None}),
        ("copied_ahead", COPIED | {"why_plain": None}),
        ("copied_ahead", {**COPIED, "rows_before": "3"}),
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
        ("chunks.0.bits", 7),
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
        ("state_bits", 4),
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


def test_rows_copied_ahead_are_of_one_part_only() -> None:
    fields = changed("copied_ahead", COPIED)
    found = unpack(envelope(fields)).copied_ahead
    assert found is not None and found.model_dump() == COPIED
    assert b"copied_ahead" not in pack_record(unpack(envelope(body())))
    assert unpack(envelope(body() | {"ranks": 2})).ranks == 2
    for several in ({"ranks": 2}, {"servers": 1}):
        with pytest.raises(MalformedObject, match="2 parts"):
            unpack(envelope(fields | several))


def test_a_measured_loss_is_optional() -> None:
    measured_loss = unpack(envelope(changed("loss", LOSS))).loss
    assert measured_loss is not None and measured_loss.model_dump() == LOSS
    assert b'"loss"' not in pack_record(unpack(envelope(body())))


def test_how_many_parts_there_are() -> None:
    assert unpack(envelope(body())).parts == 1
    assert b"servers" not in pack_record(unpack(envelope(body())))
    manifest = unpack(envelope(body() | {"servers": 3}))
    assert (manifest.ranks, manifest.servers, manifest.parts) == (1, 3, 4)
    assert unpack(envelope(body() | {"servers": 99_999})).parts == 100_000
    with pytest.raises(MalformedObject, match="at most 100000"):
        unpack(envelope(body() | {"servers": 100_000}))


@pytest.mark.parametrize("value", [None, 0, -1, 100_001, True, "3", 1.0, []])
def test_a_number_of_servers_that_cannot_be(value: object) -> None:
    with pytest.raises(MalformedObject):
        unpack(envelope(body() | {"servers": value}))


@pytest.mark.parametrize(
    ("content", "rank", "good"),
    [("state", 0, True), ("state", 1, False), ("rows", 2, True), ("rows", 3, False)],
)
def test_which_chunks_a_server_may_have(content: str, rank: int, good: bool) -> None:
    """Of one rank and two servers: parts 1 and 2 are the servers'."""
    fields = body() | {"servers": 2}
    chunk = next(one for one in fields["chunks"] if one["content"] == content)
    chunk.update(rank=rank, key=chunk["key"].replace("/r00000-", f"/r{rank:05d}-"))
    if good:
        unpack(envelope(fields))
    else:
        with pytest.raises(MalformedObject, match="of 3, of which 1 are of ranks"):
            unpack(envelope(fields))
