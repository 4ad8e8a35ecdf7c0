"""Wrote `tests/golden/v1` once. Its bytes are kept for ever (format §8): do not run it again.

python -m tests.golden.write_v1 DIRECTORY    refuses a directory that exists
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import crc32c
import numpy as np
import torch
from torch import Tensor

from recpoint.format import naming
from recpoint.format.chunk import ChunkMeta, RowSetCoding, Section, build_chunk, tensor_section
from recpoint.format.dtypes import item_bytes
from recpoint.format.history import ChosenPrecision, History
from recpoint.format.job import Cancel, Job, Outcome, Segment, StagedTable
from recpoint.format.manifest import (
    ChunkEntry,
    Columns,
    Manifest,
    Quantizer,
    RowStateSpec,
    StandsFor,
    TableSpec,
)
from recpoint.format.part import RankPart, Shard
from recpoint.format.records import (
    CheckpointRef,
    EndRecord,
    GenerationRecord,
    Record,
    RunRecord,
    pack_record,
)
from recpoint.format.rejections import Rejection, Rejections
from recpoint.format.retention_records import (
    Deletion,
    Lease,
    Mark,
    Metric,
    Pin,
    Plan,
    PlannedManifest,
    PlannedRules,
    Publication,
    RuleBest,
    Stamp,
)
from recpoint.format.servers import AllServers, ServerFacts, ServersRecord
from recpoint.format.state_tree import flatten
from recpoint.format.validation import TableDigests, ValidationFinding, ValidationRecord
from recpoint.kernels import quantize, row_set

__all__ = ["write"]

RUN = "5eed" * 8
FULL = CheckpointRef(step=100, generation=1, attempt="0a" * 16)
INCREMENT = CheckpointRef(step=120, generation=2, attempt="1b" * 16)
WIDE = CheckpointRef(step=140, generation=3, attempt="2c" * 16)
VALIDATION = naming.ValidationName(100, 1, 3, "full", "failed")
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
            rank=0,
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
            rank=0,
            method="greedy",
            bins=25,
            ratio_permille=400,
            refits=0,
            sample_rows=14,
            seed=120,
        ),
    ),
    "consolidated": (),
    "wide": (),
}
_HISTORIES = {
    "full": History(trained_ms=0, lossy_restores=0, precision=None),
    "increment": History(
        trained_ms=3_600_000,
        lossy_restores=1,
        due_batches=20,
        precision=ChosenPrecision(
            bits=3,
            expected_milli=2500,
            fallen_back=False,
            reason="2.5 restores expected: 1 from quantized rows so far",
        ),
    ),
    "wide": History(
        trained_ms=2**53 - 1,
        lossy_restores=2,
        due_ms=600_000,
        precision=ChosenPrecision(bits=8, expected_milli=None, fallen_back=True, reason=""),
    ),
}
_HISTORIES["consolidated"] = _HISTORIES["increment"]  # of the checkpoint that it is
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
    state = OrderedDict(
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
    increment.state(state)
    increment.commit("increment", FULL, (ITEMS,))

    # What a consolidation makes of the two: their rows as they are stored, in any order.
    merged = _Writer(directory, INCREMENT, attempt="3d" * 16)
    newer: list[int] = []
    for ids, bits, half in (
        ([0, 1, 2, 3], 2, False),
        ([5, 9], 3, True),
        ([10, 12, 20], 4, True),
        ([21, 23, 29], 8, False),
        ([30, 31], None, False),
    ):
        merged.rows(0, ITEMS, torch.tensor(ids), values, bits, half=half)
        newer.extend(ids)
    older = torch.tensor([row for row in range(40) if row not in newer])
    merged.rows(0, ITEMS, older, torch.arange(200, dtype=torch.float32).reshape(40, 5).sin(), 8)
    merged.state(state)
    merged.commit("consolidated", None, (ITEMS,), StandsFor(base=FULL, parent=FULL, chain_length=2))

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
        _record(directory / naming.GENERATION_KEY.of(generation), record)
    end = EndRecord(run=RUN, generation=2, step=130, reason="terminated", ended_ms=TIME_MS + 9)
    _record(directory / naming.END_KEY.of(2), end)
    _record(directory / "staging" / "job.json", _job())
    outcome = Outcome(
        step=INCREMENT.step,
        generation=INCREMENT.generation,
        attempt=INCREMENT.attempt,
        result="rejected",
        error_type="StaleWriter",
        error="generation 3 has taken over",
        stored_bytes=0,
        rank_bytes=0,
        links_to_read=0,
        quantizers=(),
        finished_ms=TIME_MS + 5,
    )
    _record(directory / "staging" / "outcome.json", outcome)
    cancel = Cancel(step=INCREMENT.step, generation=INCREMENT.generation, attempt=INCREMENT.attempt)
    _record(directory / "staging" / "cancel.json", cancel)
    _record(directory / "staging" / "servers.json", servers_record())
    write_part(directory)
    write_retention(directory)
    write_validation(directory)


def servers_record() -> ServersRecord:
    """Three servers: one was never lost, one is rebuilt, one is whole again."""
    first = ServerFacts(
        number=1,
        host="node-1",
        pid=4711,
        address="10.0.0.7:45123",
        state="up",
        rows=3_000,
        known_rows=3_000,
        memory_bytes=98_304,
        disk_bytes=0,
        lost_ms=None,
        whole_ms=None,
    )
    second: dict[str, object] = {
        "number": 2,
        "address": "",
        "state": "recovering",
        "known_rows": 1_230,
        "memory_bytes": None,
        "disk_bytes": None,
        "lost_ms": TIME_MS,
    }
    third: dict[str, object] = {"number": 3, "lost_ms": TIME_MS, "whole_ms": TIME_MS + 9}
    return ServersRecord(
        run_url="s3://bucket/runs/golden",
        generation=2,
        at_ms=TIME_MS + 10,
        servers=AllServers(
            parity=1,
            has_given_up=False,
            each=(first, first.model_copy(update=second), first.model_copy(update=third)),
        ),
    )


def write_part(directory: Path) -> None:
    """The part of rank 1 of 2: half of a table, one of two pieces of another, none of a third."""
    attempt = naming.shared_attempt(f"{3:032x}", 160, cut=1)
    ref = CheckpointRef(step=160, generation=3, attempt=attempt)
    left = TableSpec(
        name="words",
        rows=9,
        dim=2,
        dtype="F16",
        row_states=(),
        columns=Columns(first=0, of=3),
    )
    right = left.model_copy(update={"dim": 1, "columns": Columns(first=2, of=3)})
    about = {"bytes": 256, "crc32c": 2**32 - 1, "rank": 1}
    entries = [ChunkEntry.model_validate(about | {"content": "state", "key": _part_key(ref, None)})]
    for table, first, rows, bits in ((0, 20, 20, 8), (1, 0, 9, 16)):
        fields = {
            "content": "rows",
            "key": _part_key(ref, table),
            "table": table,
            "row_count": rows,
            "first_row": first,
            "last_row": first + rows - 1,
            "bits": bits,
            "scheme": "exact" if bits == 16 else "asymmetric",
        }
        entries.append(ChunkEntry.model_validate(about | fields))
    part = RankPart(
        run=RUN,
        **ref.model_dump(),
        rank=1,
        ranks=2,
        kind="full",
        base=None,
        parent=None,
        chain_length=1,
        policy="one_shot",
        tables=(
            Shard(spec=ITEMS, first_row=20, rows=20),
            Shard(spec=left, first_row=0, rows=9),
            Shard(spec=right, first_row=0, rows=0),
        ),
        chunks=tuple(entries),
        quantizers=tuple(one.model_copy(update={"rank": 1}) for one in _QUANTIZERS["full"]),
        quantized_by="numba 0.68.1, 2 threads, avx2",
        state_bits=None,
        snapshot_ms=TIME_MS,
        staged_ms=TIME_MS + 1,
        written_ms=TIME_MS + 4,
        stall_us=1500,
        dirty_rows=29,
        full_bytes=4000,
        history=_HISTORIES["full"],
        writer="0.1.0",
    )
    key = naming.PART_KEY.of(ref.step, ref.generation, ref.attempt, rank=1)
    _record(directory / key, part)


def _part_key(ref: CheckpointRef, table: int | None) -> str:
    if table is None:
        return naming.state_chunk_key(ref.step, ref.generation, ref.attempt, rank=1, number=0)
    return naming.row_chunk_key(
        ref.step, ref.generation, ref.attempt, rank=1, table=table, number=0
    )


def write_validation(directory: Path) -> None:
    """A sample chunk of the full, which its manifest does not name, and a validation record."""
    values = torch.arange(200, dtype=torch.float32).reshape(40, 5).sin()
    ids = torch.tensor([3, 7, 38])
    rows = values[ids]
    sections = [
        tensor_section("sample.0.ids", ids),
        tensor_section("sample.0.state.1", ids * 10),
        tensor_section("sample.0.digests", torch.tensor([11, -12, 13, 14])),
        tensor_section("sample.0.values", rows),
        tensor_section("sample.0.state.0", rows.abs()),
    ]
    about = {"rank": 0, "content": "sample"}
    meta = ChunkMeta.model_validate({"run": RUN, **FULL.model_dump(), **about})
    path = directory / naming.sample_chunk_key(
        FULL.step, FULL.generation, FULL.attempt, rank=0, number=0
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(build_chunk(meta, sections))
    record = ValidationRecord(
        run=RUN,
        checkpoint=FULL,
        level="full",
        result="failed",
        links_read=1,
        chunks_read=3,
        bytes_read=4096,
        rows_compared=3,
        worst_ppm=1_250_000,
        digests=(TableDigests(table=0, values="00" * 8, row_states=("0f" * 8, "f0" * 8)),),
        findings=(
            ValidationFinding(
                subject="größe", row=7, what="values[2]", found="1", expected="2", bound="0.5"
            ),
            ValidationFinding(
                subject="chunks/x", row=None, what="row chunk", found="", expected="", bound=""
            ),
        ),
        more_findings=9,
        evaluated_by="evaluation:auc",
        started_ms=TIME_MS,
        finished_ms=TIME_MS + 7,
        writer="0.1.0",
    )
    _record(directory / naming.VALIDATION_KEY.of(*VALIDATION), record)


class _Writer:
    def __init__(self, directory: Path, ref: CheckpointRef, attempt: str | None = None) -> None:
        self.directory, self.ref = directory, ref
        self.chunks_of = ref.model_copy(update={"attempt": attempt or ref.attempt})
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
            self.chunks_of.step,
            self.chunks_of.generation,
            self.chunks_of.attempt,
            rank=0,
            table=table,
            number=len(self.entries),
        )
        coding = RowSetCoding.model_validate({"coding": coded.coding, "first": coded.first})
        extra: dict[str, object] = {"dim": spec.dim, "row_set": coding}
        ends = {"first_row": int(ids[0]), "last_row": int(ids[-1])}
        self._chunk(key, sections, "rows", about, extra, ends)
        self.values[key] = {
            "ids": ids.tolist(),
            # The bits of the float32, so that NaN payloads and signs of zeros are compared too.
            "values_bits": decoded.contiguous().view(torch.int32).tolist(),
        }

    def state(self, value: object) -> None:
        tree, tensors = flatten(value)
        sections = [tensor_section(f"tensor.{index}", part) for index, part in enumerate(tensors)]
        sections.append(Section("tree", "U8", (len(tree),), tree))
        ref = self.chunks_of
        key = naming.state_chunk_key(ref.step, ref.generation, ref.attempt, rank=0, number=0)
        self._chunk(key, sections, "state", {}, {})

    def commit(
        self,
        name: str,
        parent: CheckpointRef | None,
        tables: tuple[TableSpec, ...],
        stands_for: StandsFor | None = None,
    ) -> None:
        manifest = Manifest.model_validate(
            {
                "run": RUN,
                **self.ref.model_dump(),
                "kind": "increment" if parent else "full",
                "base": parent,
                "parent": parent,
                "chain_length": 2 if parent else 1,
                "policy": "one_shot",
                "stands_for": stands_for,
                "ranks": 1,
                "tables": tables,
                "chunks": tuple(self.entries),
                "snapshot_ms": TIME_MS,
                "staged_ms": TIME_MS + 1,
                "committed_ms": TIME_MS + 2,
                "stall_us": 1500,
                "quantizers": _QUANTIZERS[name],
                "quantized_by": "numba 0.68.1, 2 threads, avx2" if _QUANTIZERS[name] else "",
                "state_bits": 16 if name in ("increment", "consolidated") else None,
                "dirty_rows": sum(entry.row_count or 0 for entry in self.entries),
                "full_bytes": 4000,
                "history": _HISTORIES[name],
                "writer": "0.1.0",
            }
        )
        key = naming.MANIFEST_KEY.of(self.ref.step, self.ref.generation)
        if stands_for is not None:
            key = naming.CONSOLIDATED_KEY.of(self.ref.step, self.ref.generation, None)
        _record(self.directory / key, manifest)
        path = self.directory / f"expected-{name}.json"
        path.write_text(json.dumps(self.values, indent=1) + "\n")

    def _chunk(
        self,
        key: str,
        sections: list[Section],
        content: str,
        about: dict[str, object],
        extra: dict[str, object],
        ends: Mapping[str, int] | None = None,
    ) -> None:
        fields = {"rank": 0, "content": content, **about}
        ref = self.chunks_of.model_dump()
        meta = ChunkMeta.model_validate({"run": RUN, **ref, **fields, **extra})
        data = build_chunk(meta, sections)
        path = self.directory / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        stored = {"key": key, "bytes": len(data), "crc32c": crc32c.crc32c(data)}
        self.entries.append(ChunkEntry.model_validate(stored | fields | dict(ends or {})))


def write_retention(directory: Path) -> None:
    """The records of format §6.6."""
    stamp = Stamp(written_ms=TIME_MS + 3, boot="b0" * 16, boot_ms=5000)
    full = naming.MANIFEST_KEY.of(FULL.step, FULL.generation)
    merged = "consolidated/000000000120-00000002-full.json"
    pin = Pin(
        run=RUN,
        checkpoint=FULL,
        name="release-7",
        who="ana@trainer-0",
        why="größte AUC",
        created_ms=TIME_MS,
    )
    _record(directory / naming.PIN_KEY.of(FULL.step, FULL.generation, pin.name), pin)
    publication = Publication(
        run=RUN,
        number=7,
        checkpoint=FULL,
        held=True,
        who="ana@trainer-0",
        why="zurück",
        created_ms=TIME_MS,
    )
    _record(directory / naming.PUBLICATION_KEY.of(publication.number), publication)
    plan = Plan(
        run=RUN,
        rules=PlannedRules(
            last=10,
            within_ms=604_800_000,
            hourly=0,
            daily=7,
            weekly=4,
            monthly=0,
            best=(RuleBest(metric="auc", direction="max", count=3),),
            require_validated=True,
        ),
        grace_ms=86_400_000,
        keep=2,
        mark=1,
        wait=0,
        delete=1,
        manifests=(
            PlannedManifest(manifest=merged, action="mark", reason="no rule"),
            PlannedManifest(manifest=full, action="keep", reason="größte AUC"),
        ),
        host="trainer-0",
        pid=4242,
        planned_ms=TIME_MS,
    )
    _record(directory / naming.PLAN_KEY, plan)
    rejections = Rejections(
        run=RUN,
        rank=3,
        count=21,
        newest=(
            Rejection(
                checkpoint=INCREMENT,
                error_type="DigestMismatch",
                error="größe: crc32c 1, expected 2",
                rejected_ms=TIME_MS,
            ),
            Rejection(checkpoint=FULL, error_type="StaleWriter", error="", rejected_ms=TIME_MS - 1),
        ),
        host="trainer-0",
        pid=4242,
    )
    _record(directory / naming.REJECTIONS_KEY.of(rejections.rank), rejections)
    metric = Metric(run=RUN, checkpoint=FULL, name="auc", value=(0.8125).hex(), created_ms=TIME_MS)
    _record(directory / naming.METRIC_KEY.of(FULL.step, FULL.generation, metric.name), metric)
    for key, ref in ((full, FULL), (merged, INCREMENT)):
        mark = Mark(run=RUN, manifest=key, attempt=ref.attempt, reason="no rule", stamp=stamp)
        _record(directory / naming.EXPIRED_KEY.of(key), mark)
    deletion = Deletion(
        run=RUN, token="3d" * 16, host="host-1", pid=77, manifests=(merged, full), stamp=stamp
    )
    _record(directory / naming.DELETION_KEY, deletion)
    for owner, covers in (("4e" * 16, None), ("5f" * 16, (FULL, INCREMENT))):
        lease = Lease(
            run=RUN,
            owner=owner,
            purpose="restore",
            covers=covers,
            ttl_seconds=3600,
            host="host-1",
            pid=77,
            stamp=stamp,
        )
        _record(directory / naming.LEASE_KEY.of(owner), lease)


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
        policy="intermittent",
        rank=0,
        ranks=1,
        tables=(
            StagedTable(
                spec=USERS,
                first_row=0,
                shard_rows=USERS.rows,
                row_count=2,
                all_rows=False,
                bits=16,
                quantizer="auto",
                state_bits=16,
                method=None,
                codes=False,
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
        history=_HISTORIES["increment"],
        quantized_by="",
        interval_batches=20,
    )


def _record(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack_record(record))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
