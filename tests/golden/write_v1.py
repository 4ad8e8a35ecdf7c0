"""Wrote `tests/golden/v1` once. Its bytes are kept for ever (format §8): do not run it again.

python -m tests.golden.write_v1 DIRECTORY    refuses a directory that exists
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from pathlib import Path

import crc32c
import numpy as np
import torch
from torch import Tensor

from recpoint.format import naming
from recpoint.format.chunk import ChunkMeta, RowSetCoding, Section, build_chunk, tensor_section
from recpoint.format.dtypes import item_bytes
from recpoint.format.job import Job, Outcome, Segment, StagedTable
from recpoint.format.manifest import ChunkEntry, Manifest, Quantizer, RowStateSpec, TableSpec
from recpoint.format.records import (
    CheckpointRef,
    GenerationRecord,
    Record,
    RunRecord,
    pack_record,
)
from recpoint.format.state_tree import flatten
from recpoint.kernels import quantize, row_set

__all__ = ["write"]

RUN = "5eed" * 8
FULL = CheckpointRef(step=100, generation=1, attempt="0a" * 16)
INCREMENT = CheckpointRef(step=120, generation=2, attempt="1b" * 16)
WIDE = CheckpointRef(step=140, generation=3, attempt="2c" * 16)
TIME_MS = 1_750_000_000_000

ITEMS = TableSpec(
    name="items.weight",
    rows=40,
    dim=5,
    dtype="F32",
    row_states=(
        RowStateSpec(name="sum", dtype="F32", shape=(5,), optimizer=0),
        RowStateSpec(name="step", dtype="I64", shape=(), optimizer=0),
    ),
)
#: By the checkpoint's name. These are not the methods of its chunks: no reader looks at them.
_QUANTIZERS: dict[str, tuple[Quantizer, ...]] = {
    "full": (
        Quantizer(
            table=0,
            method="asymmetric",
            bins=0,
            ratio_permille=0,
            refits=0,
            sample_rows=0,
            seed=0,
        ),
    ),
    "increment": (
        Quantizer(
            table=0,
            method="greedy",
            bins=25,
            ratio_permille=400,
            refits=0,
            sample_rows=14,
            seed=120,
        ),
    ),
    "wide": (),
}
USERS = TableSpec(name="users.weight", rows=2**40, dim=3, dtype="BF16", row_states=())


def write(directory: Path) -> None:
    """Write a run of a full and an increment, a staged job and its outcome, and their values."""
    directory.mkdir(parents=True)
    values = torch.arange(200, dtype=torch.float32).reshape(40, 5).sin()
    full = _Writer(directory, FULL)
    full.rows(0, ITEMS, torch.arange(40), values, 8)
    full.state({"epoch": 3, "loss": 0.125, "weights": torch.arange(6.0).reshape(2, 3)})
    full.commit("full", None, (ITEMS,))

    values = values.cos()
    values[30, 2] = float("nan")
    values[31] = torch.tensor([float("inf"), -0.0, 1e-45, -1e30, 0.0])
    increment = _Writer(directory, INCREMENT)
    increment.rows(0, ITEMS, torch.tensor([0, 1, 2, 3]), values, 2)
    increment.rows(0, ITEMS, torch.tensor([5, 9]), values, 3, half=True)
    increment.rows(0, ITEMS, torch.tensor([10, 12, 20]), values, 4, half=True)
    increment.rows(0, ITEMS, torch.tensor([21, 23, 29]), values, 8)
    increment.rows(0, ITEMS, torch.tensor([30, 31]), values, None)
    increment.state(
        OrderedDict(
            none=None,
            flags=[True, False],
            big=2**127 + 1,
            pair=(1.5, float("-inf")),
            blob=b"\x00\xff",
            counts=np.array([1, 2**32 - 1], dtype=np.uint32),
            scalar=np.float16(0.333),
            half=torch.tensor([1.0, -0.0], dtype=torch.bfloat16),
            empty=torch.empty(0, 4),
            masked=torch.tensor([[True, False]]),
            sparse=torch.sparse_coo_tensor(
                torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True
            ),
            words={"größe": 1, 7: "seven", False: "no"},
        )
    )
    increment.commit("increment", FULL, (ITEMS,))

    # A full of rows this far apart would be large: the chain of these two is not stored here.
    wide = _Writer(directory, WIDE)
    far = torch.tensor([7, 2**33, 2**39])
    wide.rows(0, USERS, far, torch.tensor([[1.5, -2, 0], [0, 0, 0], [3, 4, 5]]), None)
    runs = torch.tensor([8, 9, 10, 2**32, 2**32 + 1, 2**39 + 1])
    wide.rows(0, USERS, runs, torch.arange(18.0).reshape(6, 3), None)
    wide.state(None)
    wide.commit("wide", INCREMENT, (USERS,))

    _record(directory / "run.json", RunRecord(run=RUN, created_ms=TIME_MS))
    for generation, restored in ((1, None), (2, FULL)):
        record = GenerationRecord(
            run=RUN,
            generation=generation,
            token=f"{generation:032x}",
            restored=restored,
            host="trainer-0",
            pid=4242,
            created_ms=TIME_MS,
        )
        _record(directory / naming.generation_key(generation), record)
    _record(directory / "staging" / "job.json", _job())
    outcome = Outcome(
        step=INCREMENT.step,
        generation=INCREMENT.generation,
        attempt=INCREMENT.attempt,
        result="rejected",
        error_type="StaleWriter",
        error="generation 3 has taken over",
        stored_bytes=0,
        finished_ms=TIME_MS + 5,
    )
    _record(directory / "staging" / "outcome.json", outcome)


class _Writer:
    def __init__(self, directory: Path, ref: CheckpointRef) -> None:
        self.directory, self.ref = directory, ref
        self.entries: list[ChunkEntry] = []
        self.values: dict[str, dict[str, object]] = {}

    def rows(
        self,
        table: int,
        spec: TableSpec,
        ids: Tensor,
        values: Tensor,
        bits: int | None,
        *,
        half: bool = False,
    ) -> None:
        rows = values[ids] if spec is ITEMS else values
        coded = row_set.encode(ids)
        sections = []
        if spec is ITEMS:
            sections.append(tensor_section("state.1", ids * 10))
            narrow = torch.bfloat16 if half else torch.float32
            sections.append(tensor_section("state.0", rows.abs().to(narrow)))
        if bits is None:
            stored = rows if spec.dtype == "F32" else rows.to(torch.bfloat16)
            sections.append(tensor_section("values", stored))
            decoded = stored.float()
        else:
            packed = quantize.quantize_packed(rows, bits, half_parameters=half)
            assert not packed.exact.any() and not packed.wide.any()
            parameters = torch.float16 if half else torch.float32
            sections.append(tensor_section("scale", packed.scale.to(parameters)))
            sections.append(tensor_section("offset", packed.offset.to(parameters)))
            sections.append(tensor_section("codes", packed.packed))
            decoded = quantize.dequantize_packed(
                packed.packed, packed.scale, packed.offset, dim=spec.dim, bits=bits
            )
        if coded.payload is not None:
            sections.append(Section("row_set", "U8", (len(coded.payload),), coded.payload))
        about: dict[str, object] = {
            "table": table,
            "row_count": len(ids),
            "bits": bits or 8 * item_bytes(spec.dtype),
            "scheme": "exact" if bits is None else "asymmetric",
        }
        key = naming.row_chunk_key(
            self.ref.step,
            self.ref.generation,
            self.ref.attempt,
            rank=0,
            table=table,
            number=len(self.entries),
        )
        coding = RowSetCoding.model_validate({"coding": coded.coding, "first": coded.first})
        extra: dict[str, object] = {"dim": spec.dim, "row_set": coding}
        self._chunk(key, sections, "rows", about, extra)
        self.values[key] = {
            "ids": ids.tolist(),
            # The bits of the float32, so that NaN payloads and signs of zeros are compared too.
            "values_bits": decoded.contiguous().view(torch.int32).tolist(),
        }

    def state(self, value: object) -> None:
        tree, tensors = flatten(value)
        sections = [tensor_section(f"tensor.{index}", part) for index, part in enumerate(tensors)]
        sections.append(Section("tree", "U8", (len(tree),), tree))
        ref = self.ref
        key = naming.state_chunk_key(ref.step, ref.generation, ref.attempt, rank=0, number=0)
        self._chunk(key, sections, "state", {}, {})

    def commit(
        self, name: str, parent: CheckpointRef | None, tables: tuple[TableSpec, ...]
    ) -> None:
        manifest = Manifest.model_validate(
            {
                "run": RUN,
                **self.ref.model_dump(),
                "kind": "increment" if parent else "full",
                "base": parent,
                "parent": parent,
                "chain_length": 2 if parent else 1,
                "ranks": 1,
                "tables": tables,
                "chunks": tuple(self.entries),
                "snapshot_ms": TIME_MS,
                "staged_ms": TIME_MS + 1,
                "committed_ms": TIME_MS + 2,
                "stall_us": 1500,
                "quantizers": _QUANTIZERS[name],
                "quantized_by": "numba 0.68.1, 2 threads, avx2" if _QUANTIZERS[name] else "",
                "state_bits": 16 if name == "increment" else None,
                "dirty_rows": sum(entry.row_count or 0 for entry in self.entries),
                "full_bytes": 4000,
                "writer": "0.1.0",
            }
        )
        _record(self.directory / naming.manifest_key(self.ref.step, self.ref.generation), manifest)
        path = self.directory / f"expected-{name}.json"
        path.write_text(json.dumps(self.values, indent=1) + "\n")

    def _chunk(
        self,
        key: str,
        sections: list[Section],
        content: str,
        about: dict[str, object],
        extra: dict[str, object],
    ) -> None:
        fields = {"rank": 0, "content": content, **about}
        meta = ChunkMeta.model_validate({"run": RUN, **self.ref.model_dump(), **fields, **extra})
        data = build_chunk(meta, sections)
        path = self.directory / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        stored = {"key": key, "bytes": len(data), "crc32c": crc32c.crc32c(data)}
        self.entries.append(ChunkEntry.model_validate(stored | fields))


def _job() -> Job:
    return Job(
        run_url="s3://bucket/runs/golden",
        run=RUN,
        step=INCREMENT.step,
        generation=INCREMENT.generation,
        attempt=INCREMENT.attempt,
        kind="increment",
        base=FULL,
        parent=FULL,
        chain_length=2,
        rank=0,
        ranks=1,
        tables=(
            StagedTable(
                spec=USERS, row_count=2, all_rows=False, bits=16, quantizer="auto", state_bits=16
            ),
        ),
        slot="r00000-1.bin",
        slot_bytes=4096,
        segments=(
            Segment(name="t0.ids", dtype="I64", shape=(2,), offset=0, bytes=16, crc32c=1),
            Segment(name="t0.values", dtype="BF16", shape=(2, 3), offset=64, bytes=12, crc32c=2),
            Segment(name="tree", dtype="U8", shape=(4,), offset=128, bytes=4, crc32c=3),
        ),
        snapshot_ms=TIME_MS,
        staged_ms=TIME_MS + 1,
        stall_us=1500,
        full_bytes=4000,
        interval_batches=20,
    )


def _record(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack_record(record))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
