"""Files written by recpoint 0.1 parse to the values that were written, for ever (format §8).

The program that wrote them is in the history, as `tests/golden/write_v1.py`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

import crc32c
import numpy as np
import pytest
import safetensors.torch
import torch

from recpoint.format import naming
from recpoint.format.chunk import Chunk, parse_chunk, section_tensor
from recpoint.format.job import Cancel, Job, Outcome
from recpoint.format.manifest import ChunkEntry, Columns, Manifest
from recpoint.format.part import RankPart
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
from recpoint.format.servers import ServersRecord
from recpoint.format.state_tree import flatten, unflatten
from recpoint.format.validation import ValidationRecord
from recpoint.kernels import quantize, row_set

RecordT = TypeVar("RecordT", bound=Record)

V1 = Path(__file__).parent / "v1"
RUN = "5eed" * 8
KEYS = {
    "full": naming.MANIFEST_KEY.of(100, 1),
    "increment": naming.MANIFEST_KEY.of(120, 2),
    "consolidated": naming.CONSOLIDATED_KEY.of(120, 2, None),
    "wide": naming.MANIFEST_KEY.of(140, 3),
}


def read(kind: type[RecordT], path: str) -> RecordT:
    return unpack_record(kind, (V1 / path).read_bytes(), name=path, next_step="")


def manifest(name: str) -> Manifest:
    return read(Manifest, KEYS[name])


def chunk(manifest: Manifest, key: str) -> Chunk:
    entry = next(entry for entry in manifest.chunks if entry.key == key)
    return parse_chunk((V1 / key).read_bytes(), key=key, entry=entry, manifest=manifest)


def row_keys() -> list[tuple[str, str]]:
    return [
        (name, key)
        for name in KEYS
        for key in json.loads((V1 / f"expected-{name}.json").read_text())
    ]


def test_the_run_and_its_generations() -> None:
    run = read(RunRecord, "run.json")
    assert (run.run, run.created_ms) == (RUN, 1_750_000_000_000)
    first, second = (read(GenerationRecord, naming.GENERATION_KEY.of(number)) for number in (1, 2))
    assert (first.generation, first.restored, first.token) == (1, None, f"{1:032x}")
    assert second.restored is not None
    assert (second.restored.step, second.restored.generation) == (100, 1)
    assert second.restored.attempt == "0a" * 16
    assert (second.host, second.pid) == ("trainer-0", 4242)
    end = read(EndRecord, naming.END_KEY.of(2))
    assert (end.generation, end.step, end.reason) == (2, 130, "terminated")


def test_the_manifests() -> None:
    full, increment = manifest("full"), manifest("increment")
    assert (full.kind, full.base, full.parent, full.chain_length) == ("full", None, None, 1)
    assert (increment.kind, increment.chain_length) == ("increment", 2)
    assert increment.base == increment.parent == full.ref
    assert increment.policy == "one_shot"
    assert full.tables == increment.tables
    (items,) = full.tables
    assert (items.name, items.rows, items.dim, items.dtype) == ("items.weight", 40, 5, "F32")
    assert [(s.name, s.dtype, s.shape) for s in items.row_states] == [
        ("sum", "F32", (5,)),
        ("step", "I64", ()),
    ]
    assert [(e.first_row, e.last_row) for e in increment.chunks] == [
        *((0, 3), (5, 9), (10, 20), (21, 29), (30, 31)),
        (None, None),
    ]
    assert [(e.bits, e.scheme, e.row_count) for e in increment.chunks] == [
        (2, "asymmetric", 4),
        (3, "asymmetric", 2),
        (4, "asymmetric", 3),
        (8, "asymmetric", 3),
        (32, "exact", 2),
        (None, None, None),
    ]
    assert (increment.snapshot_ms, increment.stall_us) == (1_750_000_000_000, 1500)
    assert (increment.dirty_rows, increment.full_bytes) == (14, 4000)
    (quantizer,) = increment.quantizers
    assert (quantizer.table, quantizer.rank, quantizer.method) == (0, 0, "greedy")
    assert (quantizer.bins, quantizer.ratio_permille, quantizer.refits) == (25, 400, 0)
    assert (quantizer.sample_rows, quantizer.seed) == (14, 120)
    assert increment.quantized_by == "numba 0.68.1, 2 threads, avx2"
    assert (full.state_bits, increment.state_bits) == (None, 16)
    assert (full.history.trained_ms, full.history.precision) == (0, None)
    assert (increment.history.trained_ms, increment.history.lossy_restores) == (3_600_000, 1)
    assert (full.history.due_ms, full.history.due_batches) == (None, None)
    assert (increment.history.due_ms, increment.history.due_batches) == (None, 20)
    assert manifest("wide").history.due_ms == 600_000
    chosen, unknown = increment.history.precision, manifest("wide").history.precision
    assert chosen is not None and unknown is not None
    assert (chosen.bits, chosen.expected_milli, chosen.fallen_back) == (3, 2500, False)
    assert chosen.reason.startswith("2.5 restores expected")
    assert (unknown.bits, unknown.expected_milli, unknown.fallen_back) == (8, None, True)
    assert [quantizer.sample_rows for quantizer in full.quantizers] == [0]
    assert (manifest("wide").quantizers, manifest("wide").quantized_by) == ((), "")


def test_the_consolidated_manifest() -> None:
    increment, consolidated = manifest("increment"), manifest("consolidated")
    assert (increment.stands_for, manifest("full").stands_for) == (None, None)
    assert consolidated.ref == increment.ref and consolidated.tables == increment.tables
    assert (consolidated.kind, consolidated.parent, consolidated.chain_length) == ("full", None, 1)
    assert consolidated.links == increment.links != manifest("full").links
    assert {naming.parse_chunk_key(entry.key) for entry in consolidated.chunks} == {
        (120, 2, "3d" * 16)
    }
    assert [(e.bits, e.scheme, e.row_count) for e in consolidated.chunks[:6]] == [
        *((e.bits, e.scheme, e.row_count) for e in increment.chunks[:5]),
        (8, "asymmetric", 26),
    ]


def test_a_consolidation_has_the_rows_of_its_chain() -> None:
    def rows(name: str) -> dict[int, list[int]]:
        chunks = json.loads((V1 / f"expected-{name}.json").read_text()).values()
        return {
            row: bits
            for chunk in chunks
            for row, bits in zip(chunk["ids"], chunk["values_bits"], strict=True)
        }

    assert rows("consolidated") == rows("full") | rows("increment")
    assert flatten(state("consolidated"))[0] == flatten(state("increment"))[0]


@pytest.mark.parametrize(("name", "key"), row_keys())
def test_the_rows_of_a_chunk(name: str, key: str) -> None:
    checkpoint = manifest(name)
    meta, sections = chunk(checkpoint, key)
    expected = json.loads((V1 / f"expected-{name}.json").read_text())[key]
    assert meta.row_set is not None and meta.table is not None
    assert meta.dim is not None and meta.bits is not None
    payload = sections["row_set"].data if "row_set" in sections else None
    ids = row_set.decode(
        meta.row_set.coding,
        meta.row_set.first,
        None if payload is None else bytes(payload),
        count=len(expected["ids"]),
        rows=checkpoint.tables[meta.table].rows,
    )
    assert ids.tolist() == expected["ids"]
    if meta.scheme == "exact":
        values = section_tensor(sections["values"]).float()
    else:
        scale, offset = (section_tensor(sections[part]).float() for part in ("scale", "offset"))
        values = quantize.dequantize_packed(
            section_tensor(sections["codes"]), scale, offset, dim=meta.dim, bits=meta.bits
        )
    assert values.contiguous().view(torch.int32).tolist() == expected["values_bits"]
    if "state.1" in sections:
        assert section_tensor(sections["state.1"]).tolist() == [10 * row for row in ids.tolist()]
        assert sections["state.0"].shape == (len(ids), 5)
        assert sections["state.0"].dtype == ("BF16" if meta.bits in (3, 4) else "F32")


def test_every_kind_of_row_chunk_is_there() -> None:
    seen, parameters = set(), set()
    for name, key in row_keys():
        meta, sections = chunk(manifest(name), key)
        assert meta.row_set is not None
        seen.add((meta.bits, meta.row_set.coding))
        if meta.scheme == "asymmetric":
            parameters.add((meta.bits, sections["scale"].dtype))
    assert parameters == {(2, "F32"), (3, "F16"), (4, "F16"), (8, "F32")}
    assert {coding for _, coding in seen} == {"range", "bitmap", "runs", "delta"}
    assert {bits for bits, _ in seen} == {2, 3, 4, 8, 16, 32}


def state(name: str) -> Any:
    checkpoint = manifest(name)
    key = checkpoint.chunks[-1].key
    sections = chunk(checkpoint, key).sections
    count = len(sections) - 1
    tensors = [section_tensor(sections[f"tensor.{index}"]) for index in range(count)]
    return unflatten(bytes(sections["tree"].data_view), tensors)


def test_the_state_of_the_full() -> None:
    value = state("full")
    assert value.pop("weights").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert value == {"epoch": 3, "loss": 0.125}


def test_the_state_of_the_increment() -> None:
    value = state("increment")
    counts, scalar, half = value.pop("counts"), value.pop("scalar"), value.pop("half")
    empty, masked, sparse = value.pop("empty"), value.pop("masked"), value.pop("sparse")
    assert value == {
        "none": None,
        "flags": [True, False],
        "big": 2**127 + 1,
        "pair": (1.5, -math.inf),
        "blob": b"\x00\xff",
        "words": {"größe": 1, 7: "seven", False: "no"},
    }
    assert [type(key) for key in value["words"]] == [str, int, bool]
    assert counts.dtype == np.uint32 and counts.tolist() == [1, 2**32 - 1]
    assert type(scalar) is np.float16 and scalar.tobytes() == np.float16(0.333).tobytes()
    assert half.dtype == torch.bfloat16 and half.view(torch.int16).tolist() == [0x3F80, -0x8000]
    assert empty.shape == (0, 4) and empty.dtype == torch.float32
    assert masked.dtype == torch.bool and masked.tolist() == [[True, False]]
    assert not sparse.is_coalesced() and sparse.to_dense().tolist() == [1.0, 0.0, 2.0, 0.0]


def test_the_job_and_its_outcome() -> None:
    job = read(Job, "staging/job.json")
    assert (job.run_url, job.slot) == ("s3://bucket/runs/golden", "r00000-1.bin")
    assert (job.step, job.generation, job.rank, job.chain_length) == (120, 2, 0, 2)
    assert job.history == manifest("increment").history
    (table,) = job.tables
    assert (table.bits, table.quantizer, table.state_bits) == (16, "auto", 16)
    assert (table.first_row, table.shard_rows, table.spec.columns) == (0, 2**40, None)
    assert [(s.name, s.dtype, s.shape, s.offset) for s in job.segments] == [
        ("t0.ids", "I64", (2,), 0),
        ("t0.values", "BF16", (2, 3), 64),
        ("tree", "U8", (4,), 128),
    ]
    outcome = read(Outcome, "staging/outcome.json")
    assert (outcome.result, outcome.error_type) == ("rejected", "StaleWriter")
    assert (outcome.step, outcome.attempt) == (120, "1b" * 16)
    assert (outcome.stored_bytes, outcome.rank_bytes, outcome.links_to_read) == (0, 0, 0)
    assert job.policy == "intermittent"
    cancel = read(Cancel, "staging/cancel.json")
    assert (cancel.step, cancel.generation, cancel.attempt) == (120, 2, "1b" * 16)


def test_what_a_trainer_says_of_its_servers() -> None:
    record = read(ServersRecord, "staging/servers.json")
    assert (record.run_url, record.generation) == ("s3://bucket/runs/golden", 2)
    assert (record.servers.parity, record.servers.has_given_up) == (1, False)
    up, recovering, again = record.servers.each
    assert (up.host, up.pid, up.address, up.state) == ("node-1", 4711, "10.0.0.7:45123", "up")
    assert (up.rows, up.known_rows, up.memory_bytes, up.disk_bytes) == (3_000, 3_000, 98_304, 0)
    assert record.servers.not_whole == (recovering,)
    assert (recovering.state, recovering.known_rows) == ("recovering", 1_230)
    assert recovering.memory_bytes is recovering.disk_bytes is recovering.whole_ms is None
    assert again.lost_ms == recovering.lost_ms and again.whole_ms == record.at_ms - 1


PART_KEY = naming.PART_KEY.of(160, 3, naming.shared_attempt(f"{3:032x}", 160, cut=1), rank=1)


def test_the_part_of_a_rank() -> None:
    assert PART_KEY == "parts/000000000160-00000003-556bc4a11360f58a22b792a57fcf5c6d/r00001.json"
    part = read(RankPart, PART_KEY)
    assert (part.step, part.generation, part.rank, part.ranks, part.kind) == (160, 3, 1, 2, "full")
    items, left, right = part.tables
    assert (items.first_row, items.rows, items.spec) == (20, 20, manifest("full").tables[0])
    assert (left.spec.columns, left.spec.dim, left.rows) == (Columns(first=0, of=3), 2, 9)
    assert (right.spec.columns, right.spec.dim, right.rows) == (Columns(first=2, of=3), 1, 0)
    state, *rows = part.chunks
    assert (state.content, state.rank) == ("state", 1)
    assert [(e.table, e.first_row, e.last_row, e.bits) for e in rows] == [
        (0, 20, 39, 8),
        (1, 0, 8, 16),
    ]
    assert [(one.table, one.rank) for one in part.quantizers] == [(0, 1)]
    assert (part.dirty_rows, part.written_ms) == (29, 1_750_000_000_004)


def test_pins_metrics_marks_deletions_and_leases() -> None:
    pin = read(Pin, naming.PIN_KEY.of(100, 1, "release-7"))
    assert (pin.name, pin.who, pin.why) == ("release-7", "ana@trainer-0", "größte AUC")
    assert (pin.checkpoint.step, pin.checkpoint.attempt) == (100, "0a" * 16)
    metric = read(Metric, naming.METRIC_KEY.of(100, 1, "auc"))
    assert float.fromhex(metric.value) == 0.8125
    merged = "consolidated/000000000120-00000002-full.json"
    mark = read(Mark, naming.EXPIRED_KEY.of(merged))
    assert (mark.manifest, mark.attempt, mark.reason) == (merged, "1b" * 16, "no rule")
    assert (mark.stamp.written_ms, mark.stamp.boot_ms) == (1_750_000_000_003, 5000)
    deletion = read(Deletion, naming.DELETION_KEY)
    assert deletion.manifests == (merged, naming.MANIFEST_KEY.of(100, 1))
    everything, two = (read(Lease, naming.LEASE_KEY.of(owner * 16)) for owner in ("4e", "5f"))
    assert everything.covers is None and two.covers is not None
    assert [ref.step for ref in two.covers] == [100, 120]
    assert (two.purpose, two.ttl_seconds, two.stamp.boot) == ("restore", 3600, "b0" * 16)


def test_the_plan_of_a_retention() -> None:
    plan = read(Plan, naming.PLAN_KEY)
    assert (plan.keep, plan.mark, plan.wait, plan.delete) == (2, 1, 0, 1)
    assert (plan.rules.last, plan.rules.within_ms, plan.rules.daily) == (10, 604_800_000, 7)
    (best,) = plan.rules.best
    assert (best.metric, best.direction, best.count) == ("auc", "max", 3)
    assert plan.rules.require_validated and plan.grace_ms == 86_400_000
    assert [(one.action, one.reason) for one in plan.manifests] == [
        ("mark", "no rule"),
        ("keep", "größte AUC"),
    ]
    assert plan.manifests[1].manifest == naming.MANIFEST_KEY.of(100, 1)


def test_the_rejections_of_a_rank() -> None:
    record = read(Rejections, naming.REJECTIONS_KEY.of(3))
    assert (record.rank, record.count, record.host) == (3, 21, "trainer-0")
    newest, before = record.newest
    assert (newest.checkpoint.step, newest.error_type) == (120, "DigestMismatch")
    assert newest.error.startswith("größe") and newest.rejected_ms == before.rejected_ms + 1
    assert (before.checkpoint.step, before.error) == (100, "")


def test_the_publication() -> None:
    record = read(Publication, naming.PUBLICATION_KEY.of(7))
    assert (record.number, record.held, record.why) == (7, True, "zurück")
    assert (record.checkpoint.step, record.checkpoint.attempt) == (100, "0a" * 16)


def test_the_validation_record() -> None:
    name = naming.ValidationName(100, 1, 3, "full", "failed")
    record = read(ValidationRecord, naming.VALIDATION_KEY.of(*name))
    assert (record.level, record.result, record.checkpoint.attempt) == ("full", "failed", "0a" * 16)
    assert (record.links_read, record.chunks_read, record.rows_compared) == (1, 3, 3)
    assert (record.worst_ppm, record.more_findings) == (1_250_000, 9)
    (digests,) = record.digests
    assert (digests.table, digests.row_states) == (0, ("0f" * 8, "f0" * 8))
    row, whole = record.findings
    assert (row.subject, row.row, row.what, row.bound) == ("größe", 7, "values[2]", "0.5")
    assert whole.row is None and record.evaluated_by == "evaluation:auc"


def test_the_sample_of_the_full() -> None:
    key = naming.sample_chunk_key(100, 1, "0a" * 16, rank=0, number=0)
    data = (V1 / key).read_bytes()
    entry = ChunkEntry(
        key=key, bytes=len(data), crc32c=crc32c.crc32c(data), content="sample", rank=0
    )
    found = parse_chunk(data, key=key, entry=entry, manifest=manifest("full")).sections
    parts = {name: section_tensor(section) for name, section in found.items()}
    ids = parts["sample.0.ids"]
    assert ids.tolist() == [3, 7, 38] and parts["sample.0.state.1"].tolist() == [30, 70, 380]
    values = torch.arange(200, dtype=torch.float32).reshape(40, 5).sin()[ids]
    assert torch.allclose(parts["sample.0.values"], values, rtol=0, atol=1e-6)
    assert torch.equal(parts["sample.0.state.0"], parts["sample.0.values"].abs())
    assert parts["sample.0.digests"].tolist() == [11, -12, 13, 14]


RETENTION = {
    Pin: naming.PIN_KEY.of(100, 1, "release-7"),
    Metric: naming.METRIC_KEY.of(100, 1, "auc"),
    Mark: naming.EXPIRED_KEY.of(naming.MANIFEST_KEY.of(100, 1)),
    Deletion: naming.DELETION_KEY,
    Lease: naming.LEASE_KEY.of("5f" * 16),
    Plan: naming.PLAN_KEY,
    Rejections: naming.REJECTIONS_KEY.of(3),
    Publication: naming.PUBLICATION_KEY.of(7),
    ValidationRecord: naming.VALIDATION_KEY.of(100, 1, 3, "full", "failed"),
}


STAGED: dict[type[Record], str] = {
    Job: "staging/job.json",
    Outcome: "staging/outcome.json",
    Cancel: "staging/cancel.json",
    ServersRecord: "staging/servers.json",
}


@pytest.mark.parametrize(
    "kind",
    [RunRecord, GenerationRecord, EndRecord, Manifest, RankPart, *STAGED, *RETENTION],
)
def test_records_are_still_written_as_they_were(kind: type[Record]) -> None:
    path: str = {
        RunRecord: "run.json",
        GenerationRecord: naming.GENERATION_KEY.of(2),
        EndRecord: naming.END_KEY.of(2),
        Manifest: naming.MANIFEST_KEY.of(120, 2),
        RankPart: PART_KEY,
        **STAGED,
        **RETENTION,
    }[kind]
    assert pack_record(read(kind, path)) == (V1 / path).read_bytes()


def test_trees_are_still_written_as_they_were() -> None:
    checkpoint = manifest("increment")
    sections = chunk(checkpoint, checkpoint.chunks[-1].key).sections
    assert flatten(state("increment"))[0] == bytes(sections["tree"].data_view)


@pytest.mark.parametrize(
    "path", sorted((V1 / "chunks").rglob("*.safetensors")), ids=lambda path: path.stem
)
def test_the_safetensors_library_opens_every_chunk(path: Path) -> None:
    tensors = safetensors.torch.load(path.read_bytes())
    assert tensors
