"""Restoring into files of safetensors with an index, a file at a time and in any order.

Every file is made beside its place and appears whole, once: what is there is never replaced. So a
restore that was killed goes on where it was, two that write the same do no harm, and two that write
different things into one place cannot mix. The index appears last; without it nothing counts. Files
of a checkpoint that turns out to be damaged are removed only while there is no index, and once
another checkpoint was found for their place; a second writer that still needs them is told so.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.restoring.reshard import PartsTarget, TablePart
from recpoint.catalog.restoring.restore import RestoreReport, restore
from recpoint.catalog.restoring.restore_target import StateWanted
from recpoint.catalog.restoring.selection import NEWEST, Selection
from recpoint.catalog.restoring.shard_place import (
    check_place,
    finish_shards,
    refuse_beside_index,
    remove_unfinished,
    shard_is_there,
    take_back,
)
from recpoint.catalog.restoring.shard_plan import DEFAULT_SHARD_BYTES, Shard, ShardPlan, plan_shards
from recpoint.catalog.restoring.state_tensors import state_tensors
from recpoint.catalog.runs.chain import DAMAGE
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores import durable
from recpoint.catalog.stores.run_url import naming_run
from recpoint.catalog.stores.store_contract import Store
from recpoint.catalog.stores.store_errors import for_os_error
from recpoint.errors import ObjectExists, RecpointError, StoreUnavailable, UnsupportedVersion
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName

__all__ = ["damaged_checkpoint", "restore_shards", "summary", "write_shard"]


def restore_shards(
    run: Run,
    into: Store,
    selection: Selection = NEWEST,
    *,
    leased: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> RestoreReport:
    """Restore a checkpoint into files, one after another.

    Memory: as `catalog.restoring.restore.restore` says, and the state of all ranks. Tables go
    through mapped files, which the system writes back and takes from memory as it needs to. A store
    that is no local directory needs room for the largest file in the directory for temporary files.

    Args:
        run: the run.
        into: where the files go; others there are left alone.
        selection, leased: as for `catalog.restoring.restore.restore`.
        shard_bytes: as for `plan_shards`.
        on_progress: called with bytes written so far and bytes to write.

    Raises:
        SettingsError: another checkpoint, or part of one, is there already.
        RestoreError: the index is there, and a file is missing that damage keeps from being made
            again; or another writer has removed files meanwhile. What is there was left alone.
        RecpointError: as for `catalog.restoring.restore.restore`; no index has been written. Files
            that were finished stay for the next try.
    """
    damaged: dict[ManifestName, str] = {}
    instead_of: ShardPlan | None = None
    while True:
        plan = plan_shards(run, selection, damaged=damaged, leased=leased, shard_bytes=shard_bytes)
        if instead_of is not None:
            take_back(into, instead_of)
        reports: list[RestoreReport] = []
        there = check_place(into, plan)
        remove_unfinished(into, plan)
        if not there:
            done_bytes = 0
            try:
                for shard in plan.shards:
                    report = write_shard(run, into, plan, shard)
                    reports += [report] if report else []
                    done_bytes += shard.size_bytes
                    on_progress(done_bytes, plan.size_bytes)
            except DAMAGE as error:
                damaged |= damaged_checkpoint(
                    into, plan, error, run_url=run.url, named=selection.named
                )
                instead_of = plan  # its files are progress until there is another one
                continue
            finish_shards(into, plan)
        return summary(plan, reports)


def damaged_checkpoint(
    into: Store, plan: ShardPlan, error: RecpointError, *, run_url: str, named: bool
) -> dict[ManifestName, str]:
    """For `plan_shards`, which is to choose another one.

    Raises:
        RestoreError: the index is there. What is there counts, and no other checkpoint takes its
            place.
        RecpointError: the error itself, where there is no choice: as for `restore`.
    """
    refuse_beside_index(into, plan, error, run_url=run_url)
    if named or isinstance(error, UnsupportedVersion):
        raise error
    return {plan.name: naming_run(f"{type(error).__name__}: {error}", run_url)}


def summary(plan: ShardPlan, reports: Sequence[RestoreReport]) -> RestoreReport:
    """What the whole restore did, from what it took to write each file."""
    every = (plan.report, *reports)
    return replace(
        plan.report,
        passed_over=tuple(dict.fromkeys(one for report in every for one in report.passed_over)),
        chain_length=max(report.chain_length for report in every),
        chunks_read=sum(report.chunks_read for report in every),
        bytes_read=sum(report.bytes_read for report in every),
        seconds=sum(report.seconds for report in every),
    )


# --- one file ------------------------------------------------------------------------------------


def write_shard(
    run: Run,
    into: Store,
    plan: ShardPlan,
    shard: Shard,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> RestoreReport | None:
    """Restore one file of a plan; None: it was there.

    Raises:
        SettingsError: another file is in its place.
        FormatError, ChainError, ObjectNotFound: the checkpoint is damaged.
        StoreError: one of the two stores cannot be used, or there is no room.
    """
    if shard_is_there(into, plan, shard):
        return None
    header = shard.header(plan.metadata)
    with _mapped(into, shard.file, len(header) + shard.size_bytes) as (path, mapped):
        mapped[: len(header)] = np.frombuffer(header, np.uint8)
        target = _ShardTarget(shard, torch.from_numpy(mapped[len(header) :]))
        report = restore(run, target, Selection.of(plan.name), on_progress=on_progress)
        with _translated(path):
            mapped.flush()
            durable.fsync_file(path)
        try:
            into.create_from_file(shard.file, path)
        except ObjectExists:
            shard_is_there(into, plan, shard)  # another writer's, or ours after a lost answer
    return report


class _ShardTarget(PartsTarget):
    """Restores the tensors of one file into the bytes that follow its header."""

    def __init__(self, shard: Shard, body: Tensor) -> None:
        self._of_no_table: dict[str, Tensor] = {}
        values: dict[str, Tensor] = {}
        row_states: dict[str, dict[str, Tensor]] = {}
        for tensor, part in zip(
            shard.tensors, body.split([tensor.size_bytes for tensor in shard.tensors]), strict=True
        ):
            view = part.view(torch_dtype(tensor.dtype)).view(tensor.shape)
            if tensor.table is None:
                self._of_no_table[tensor.name] = view
            elif tensor.state is None:
                values[tensor.table] = view
            else:
                row_states.setdefault(tensor.table, {})[tensor.state] = view
        super().__init__(
            [
                TablePart(table=table, values=into, row_states=row_states.get(table, {}))
                for table, into in values.items()
            ]
        )

    def state_wanted(self, manifest: Manifest, known: Mapping[int, object]) -> StateWanted:
        """See `StateChoosingTarget.state_wanted`: all of it, or nothing."""
        return StateWanted(whole=range(manifest.ranks) if self._of_no_table else ())

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `RestoreTarget.finish`."""
        found = state_tensors(state) if self._of_no_table else {}
        for name, into in self._of_no_table.items():
            into.copy_(found[name])
        super().finish(manifest, state)


@contextmanager
def _mapped(into: Store, file: str, size_bytes: int) -> Iterator[tuple[Path, Any]]:
    """A temporary file of so many bytes, and these, u8; removed at the end."""
    directory = into.scratch_directory()
    path = directory / f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(16)}-{file}"
    try:
        with _translated(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(path, flags, into.scratch_mode), "wb") as made:
                # All of it now: a disk that is full is an error here, and the end of the process
                # where mapped bytes are written.
                os.posix_fallocate(made.fileno(), 0, size_bytes)
            mapped = np.memmap(path, np.uint8, mode="r+")
        yield path, mapped
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Raises what the system says of a file that is being written as errors of a store."""
    try:
        yield
    except FileNotFoundError as error:
        raise StoreUnavailable(
            str(path),
            found="no such file any more (while writing)",
            expected="the file that is being written, until it is in its place",
            next_step="run the same restore again, which writes what is missing",
        ) from error
    except OSError as error:
        raise for_os_error(error, str(path), doing="writing", writing=True) from error
