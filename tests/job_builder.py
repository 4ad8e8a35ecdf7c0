"""Real staged jobs, for tests: slots and job files as a trainer leaves them (format §7)."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import crc32c
import torch
from torch import Tensor

from recpoint.catalog import durable, staged
from recpoint.catalog.run import Run
from recpoint.format.dtypes import dtype_name, item_bytes
from recpoint.format.job import Job, Segment, StagedTable
from recpoint.format.records import CheckpointRef, pack_record
from recpoint.format.state_tree import flatten
from tests.catalog_builder import Table

__all__ = ["Links", "rewrite", "stage"]

_ALIGNMENT_BYTES = 64


class Links:
    """What a trainer remembers between checkpoints: base, parent and length of its chain."""

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
) -> Path:
    """Stage a snapshot; returns the job file.

    Args:
        run: whose checkpoint it will be.
        staging: the staging area.
        tables: what the trainer has.
        step: batches trained.
        generation: of the trainer.
        links: the chain so far, which the job is added to; a full when it is empty or None.
        dirty: ids int64 ascending for each table; None: all rows of it.
        state: the state tree.
        slot: index of the slot.
        run_url: the run URL in the job, if not the store's.
    """
    url = run_url or run.url
    directory = staged.run_directory(staging, url)
    for sub in (staged.slots_directory, staged.jobs_directory, staged.outcomes_directory):
        sub(directory).mkdir(parents=True, exist_ok=True)
    slot_file = staged.slot_path(directory, 0, slot)
    segments: list[Segment] = []
    end = 0
    staged_tables: list[StagedTable] = []
    arrays: list[tuple[str, Tensor]] = []
    for number, table in enumerate(tables):
        ids = dirty[number] if dirty is not None else None
        if ids is not None:
            arrays.append((f"t{number}.ids", ids))
        chosen = slice(None) if ids is None else ids
        arrays.append((f"t{number}.values", table.values[chosen]))
        for k, row_state in enumerate(table.states):
            arrays.append((f"t{number}.state.{k}", row_state[chosen]))
        staged_tables.append(
            StagedTable(
                spec=table.spec,
                row_count=table.rows if ids is None else ids.numel(),
                all_rows=ids is None,
                bits=table.bits or 8 * item_bytes(table.spec.dtype),
                quantizer=table.quantizer,
                state_bits=table.state_bits,
            )
        )
    tree, tensors = flatten(state)
    arrays.append(("tree", torch.frombuffer(bytearray(tree), dtype=torch.uint8)))
    arrays.extend((f"tensor.{index}", tensor) for index, tensor in enumerate(tensors))
    # Without O_TRUNC: a slot is reused, and what an earlier job left behind the end stays there.
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
    now_ms = time.time_ns() // 1_000_000
    links = links or Links()
    job = Job(
        run_url=url,
        run=run.id,
        step=step,
        generation=generation,
        attempt=secrets.token_hex(16),
        kind="increment" if links.parent else "full",
        base=links.base,
        parent=links.parent,
        chain_length=links.length + 1,
        rank=0,
        ranks=1,
        tables=tuple(staged_tables),
        slot=slot_file.name,
        slot_bytes=end,
        segments=tuple(segments),
        snapshot_ms=now_ms,
        staged_ms=now_ms,
        stall_us=1000,
        full_bytes=sum(table.values.nbytes for table in tables),
        interval_batches=10,
    )
    links.add(job.ref)
    path = staged.job_path(directory, generation, step, 0)
    durable.write_atomically(path, pack_record(job))
    return path


def rewrite(path: Path, **changes: object) -> None:
    """Replace fields of a job file, with a correct digest: what a hostile trainer could write."""
    job = staged.read_job(path)
    fields = {name: getattr(job, name) for name in type(job).model_fields}
    durable.write_atomically(path, pack_record(Job.model_construct(**{**fields, **changes})))
