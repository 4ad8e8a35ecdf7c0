"""Stages real jobs for tests: slots and job files as a trainer writes them (format §7)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import crc32c
import torch
from torch import Tensor

from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job as staged_job
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import now_ms
from recpoint.format.dtypes import dtype_name, item_bytes
from recpoint.format.history import History
from recpoint.format.job import Job, Segment, StagedTable
from recpoint.format.manifest import CacheUse, ChosenMethod
from recpoint.format.records import CheckpointRef, pack_record
from recpoint.format.state_tree import flatten
from recpoint.kernels import quantize
from recpoint.kernels.row_digest import reference
from tests.catalog_builder import UNTRAINED, Table, tables

__all__ = ["Links", "rewrite", "stage", "stage_chain"]

_ALIGNMENT_BYTES = 64


class Links:
    """The trainer's memory between checkpoints: base, parent and length of its chain."""

    def __init__(self) -> None:
        self.base: CheckpointRef | None = None
        self.parent: CheckpointRef | None = None
        self.length = 0

    def add(self, ref: CheckpointRef) -> None:
        self.base = self.base or ref
        self.parent = ref
        self.length += 1


def stage(
    run: Run,
    staging: Path,
    tables: Sequence[Table],
    *,
    step: int,
    generation: int,
    links: Links | None = None,
    dirty: Sequence[Tensor | None] | None = None,
    state: object = None,
    slot: int = 0,
    run_url: str | None = None,
    history: History = UNTRAINED,
    samples: int = 0,
    method: ChosenMethod | None = None,
    codes: bool = False,
    attempt: str | None = None,
    policy: str = "consecutive",
    rank: int = 0,
    ranks: int = 1,
    shards: Sequence[tuple[int, int]] | None = None,
    servers: int | None = None,
    held: Sequence[Tensor] | None = None,
    cache: CacheUse | None = None,
) -> Path:
    """Stage a snapshot; return the job file.

    Args:
        run: to which the checkpoint will belong.
        staging: the staging area.
        tables: the trainer's tables.
        step: batches trained.
        generation: of the trainer.
        links: the chain so far, to which the job is added; if empty or None, the job is a full.
        dirty: ascending ids int64 for each table; None: all its rows.
        state: the state tree.
        slot: index of the slot.
        run_url: the run URL in the job; None: the store's.
        history: the training time and lossy restores of the state.
        samples: rows of each table to record exactly, with digests of the staged rows.
        method: quantizer of the tables that are to be quantized; None: the agent chooses.
        codes: whether these tables are staged as codes.
        attempt: of the job; None: a new one.
        policy: of the trainer.
        rank, ranks: of the trainer's process that stages the job; of an embedding server `rank` is
            `ranks` or more, and the job has no state.
        shards: first row and number of rows of each table that this rank holds; None: all rows.
            All ids are of rows of the whole table.
        servers: embedding servers that have a part; None: none.
        held: ascending ids of the rows of each table that this embedding server holds.
        cache: what the trainer's cache did.
    """
    url = run_url or run.url
    directory = StagedRun.of(staging, url).path
    staged_run = StagedRun(directory)
    for made in (
        staged_run.slots_directory,
        staged_run.jobs_directory,
        staged_run.outcomes_directory,
    ):
        made.mkdir(parents=True, exist_ok=True)
    slot_file = staged_run.slot_path(rank, slot)
    segments: list[Segment] = []
    end = 0
    staged_tables: list[StagedTable] = []
    arrays: list[tuple[str, Tensor]] = []
    for number, table in enumerate(tables):
        first, rows = (0, table.rows) if shards is None else shards[number]
        ids = dirty[number] if dirty is not None else None
        among = torch.arange(first, first + rows)
        if held is not None:
            among, rows = held[number], len(held[number])
            ids = among if ids is None else ids[torch.isin(ids, among)]
        elif ids is not None:
            ids = ids[(ids >= first) & (ids < first + rows)]
        elif not rows:
            ids = torch.empty(0, dtype=torch.int64)
        if ids is not None and rows:
            arrays.append((f"t{number}.ids", ids - first))
        chosen = slice(first, first + rows) if ids is None else ids
        quantized = method is not None and table.bits is not None
        if not rows:
            pass  # this rank holds no row of the table
        elif codes and quantized:
            assert shards is None
            arrays += _codes(number, table, ids, method)
        else:
            arrays.append((f"t{number}.values", table.values[chosen]))
        for k, row_state in enumerate(table.states if rows else ()):
            arrays.append((f"t{number}.state.{k}", row_state[chosen]))
        staged_tables.append(
            StagedTable(
                spec=table.spec,
                first_row=first,
                shard_rows=rows,
                row_count=rows if ids is None else ids.numel(),
                all_rows=ids is None,
                bits=table.bits or 8 * item_bytes(table.spec.dtype),
                quantizer=table.quantizer,
                state_bits=table.state_bits,
                second_moments=table.second_moments,
                method=method if quantized else None,
                codes=codes and quantized,
                scattered=None if held is None else True,
                allocation=table.allocation,
                first_values=None if links and links.parent else table.first_values,
                residual=True if table.residual and links and links.parent else None,
            )
        )
        if samples and servers and rank < ranks and not rows:
            among = torch.arange(table.rows)  # it has read them from the servers
        if samples and len(among):
            stored = among if ids is None else ids
            order = torch.randperm(len(among), generator=torch.Generator().manual_seed(step))
            arrays.extend(_sample(number, table, stored, among[order[:samples]].sort().values))
    if rank < ranks:
        tree, tensors = flatten(state)
        arrays.append(("tree", torch.frombuffer(bytearray(tree), dtype=torch.uint8)))
        arrays.extend((f"tensor.{index}", tensor) for index, tensor in enumerate(tensors))
    # Without O_TRUNC: a slot is reused, and bytes of an earlier job stay after the end.
    with os.fdopen(os.open(slot_file, os.O_RDWR | os.O_CREAT, 0o600), "wb") as file:
        for name, tensor in arrays:
            flat = tensor.detach().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
            end += -end % _ALIGNMENT_BYTES
            file.seek(end)
            file.write(data)
            segments.append(
                Segment(
                    name=name,
                    dtype=dtype_name(tensor.dtype),
                    shape=tuple(tensor.shape),
                    offset=end,
                    bytes=data.nbytes,
                    crc32c=crc32c.crc32c(data),
                )
            )
            end += data.nbytes
    here_ms = now_ms()
    links = links or Links()
    job = Job(
        run_url=url,
        run=run.id,
        step=step,
        generation=generation,
        attempt=attempt or secrets.token_hex(16),
        kind="increment" if links.parent else "full",
        base=links.base,
        parent=links.parent,
        chain_length=links.length + 1,
        policy=policy,
        rank=rank,
        ranks=ranks,
        servers=servers,
        tables=tuple(staged_tables),
        slot=slot_file.name,
        slot_bytes=end,
        segments=tuple(segments),
        snapshot_ms=here_ms,
        staged_ms=here_ms,
        stall_us=1000,
        cache=cache,
        full_bytes=sum(table.values.nbytes for table in tables),
        quantized_by="the builder" if codes else "",
        interval_batches=10,
        history=history,
    )
    links.add(job.ref)
    path = staged_run.job_path(generation, step, rank)
    durable.write_atomically(path, pack_record(job))
    return path


def _sample(number: int, table: Table, stored: Tensor, ids: Tensor) -> list[tuple[str, Tensor]]:
    """Return the arrays of format §3.6 for the rows `ids`, with digests of the rows `stored`."""
    arrays = {"ids": ids, "values": table.values[ids]}
    arrays |= {f"state.{k}": state[ids] for k, state in enumerate(table.states)}
    if len(stored):
        parts = [table.values[stored][:, :0], table.values[stored]]
        parts += [state[stored] for state in table.states]
        digests = [reference.digest(part.contiguous(), stored) for part in parts]
        signed = [value - 2**64 if value >= 2**63 else value for value in digests]
        arrays["digests"] = torch.tensor(signed)
    return [(f"sample.{number}.{part}", array) for part, array in arrays.items()]


def _codes(
    number: int, table: Table, ids: Tensor | None, method: ChosenMethod | None
) -> list[tuple[str, Tensor]]:
    assert method is not None and table.bits is not None
    kernel_method = staged_job.kernel_method(method)
    codes = quantize.quantize_rows(
        table.values, ids, table.bits, kernel_method, half_parameters=True
    )
    exact = quantize.exact_rows(table.values, ids, codes.exact)
    return [
        (f"t{number}.codes", codes.packed),
        (f"t{number}.scale", codes.scale),
        (f"t{number}.offset", codes.offset),
        (f"t{number}.wide", codes.wide),
        (f"t{number}.exact_at", exact.positions),
        (f"t{number}.exact", exact.values),
    ]


def rewrite(path: Path, **changes: object) -> None:
    """Replace fields of a job file and correct its digest, as a hostile trainer could."""
    job = job_files.read_job(path)
    fields = {name: getattr(job, name) for name in type(job).model_fields}
    durable.write_atomically(path, pack_record(Job.model_construct(**{**fields, **changes})))


def stage_chain(run: Run, staging: Path, *, count: int) -> list[Path]:
    """Stage a full and increments on it, steps from 1 on; return the job files."""
    links = Links()
    return [
        stage(
            run,
            staging,
            tables(),
            step=step,
            generation=1,
            links=links,
            dirty=None if step == 1 else [torch.tensor([step]), torch.tensor([0, step])],
            slot=step,
        )
        for step in range(1, count + 1)
    ]
