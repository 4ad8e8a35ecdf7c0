"""Files written by recpoint 0.1 parse to the values that were written, for ever (format §8)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import safetensors.torch
import torch

from recpoint.format import naming
from recpoint.format.chunk import Chunk, parse_chunk, section_tensor
from recpoint.format.job import Job, Outcome
from recpoint.format.manifest import Manifest
from recpoint.format.records import GenerationRecord, Record, RunRecord, pack_record, unpack_record
from recpoint.format.state_tree import flatten, unflatten
from recpoint.kernels import quantize, row_set

RecordT = TypeVar("RecordT", bound=Record)

V1 = Path(__file__).parent / "v1"
RUN = "5eed" * 8
NAMES = {"full": (100, 1), "increment": (120, 2), "wide": (140, 3)}


def read(kind: type[RecordT], path: str) -> RecordT:
    return unpack_record(kind, (V1 / path).read_bytes(), name=path, next_step="")


def manifest(name: str) -> Manifest:
    return read(Manifest, naming.manifest_key(*NAMES[name]))


def chunk(manifest: Manifest, key: str) -> Chunk:
    entry = next(entry for entry in manifest.chunks if entry.key == key)
    return parse_chunk((V1 / key).read_bytes(), key=key, entry=entry, manifest=manifest)


def row_keys() -> list[tuple[str, str]]:
    return [
        (name, key)
        for name in NAMES
        for key in json.loads((V1 / f"expected-{name}.json").read_text())
    ]


def test_the_run_and_its_generations() -> None:
    run = read(RunRecord, "run.json")
    assert (run.run, run.created_ms) == (RUN, 1_750_000_000_000)
    first, second = (read(GenerationRecord, naming.generation_key(number)) for number in (1, 2))
    assert (first.generation, first.restored, first.token) == (1, None, f"{1:032x}")
    assert second.restored is not None
    assert (second.restored.step, second.restored.generation) == (100, 1)
    assert second.restored.attempt == "0a" * 16
    assert (second.host, second.pid) == ("trainer-0", 4242)


def test_the_manifests() -> None:
    full, increment = manifest("full"), manifest("increment")
    assert (full.kind, full.base, full.parent, full.chain_length) == ("full", None, None, 1)
    assert (increment.kind, increment.chain_length) == ("increment", 2)
    assert increment.base == increment.parent == full.ref
    assert full.tables == increment.tables
    (items,) = full.tables
    assert (items.name, items.rows, items.dim, items.dtype) == ("items.weight", 40, 5, "F32")
    assert [(s.name, s.dtype, s.shape) for s in items.row_states] == [
        ("sum", "F32", (5,)),
        ("step", "I64", ()),
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
    assert (quantizer.table, quantizer.method, quantizer.bins) == (0, "greedy", 25)
    assert (quantizer.ratio_permille, quantizer.refits) == (400, 0)
    assert (quantizer.sample_rows, quantizer.seed) == (14, 120)
    assert increment.quantized_by == "numba 0.68.1, 2 threads, avx2"
    assert (full.state_bits, increment.state_bits) == (None, 16)
    assert [quantizer.sample_rows for quantizer in full.quantizers] == [0]
    assert (manifest("wide").quantizers, manifest("wide").quantized_by) == ((), "")


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
    (table,) = job.tables
    assert (table.bits, table.quantizer, table.state_bits) == (16, "auto", 16)
    assert [(s.name, s.dtype, s.shape, s.offset) for s in job.segments] == [
        ("t0.ids", "I64", (2,), 0),
        ("t0.values", "BF16", (2, 3), 64),
        ("tree", "U8", (4,), 128),
    ]
    outcome = read(Outcome, "staging/outcome.json")
    assert (outcome.result, outcome.error_type) == ("rejected", "StaleWriter")
    assert (outcome.step, outcome.attempt) == (120, "1b" * 16)


@pytest.mark.parametrize("kind", [RunRecord, GenerationRecord, Manifest, Job, Outcome])
def test_records_are_still_written_as_they_were(kind: type[Record]) -> None:
    path = {
        RunRecord: "run.json",
        GenerationRecord: naming.generation_key(2),
        Manifest: naming.manifest_key(120, 2),
        Job: "staging/job.json",
        Outcome: "staging/outcome.json",
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
