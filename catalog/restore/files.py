"""Restores into safetensors files with an index, a file at a time and in any order.

Every file is written under a temporary name and appears whole; an existing file is never replaced.
So a restore that was killed continues where it stopped, two restores of the same files do no harm,
and the files of two different restores into one place cannot mix. The index appears last; without
it the files do not count. Files of a checkpoint that turns out to be damaged are removed only while
there is no index, and only after another checkpoint was found for the place; a second writer that
still needs them gets an error.
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

from recpoint.catalog.restore.order import NEWEST, Selection
from recpoint.catalog.restore.placement import PartsTarget, TablePart
from recpoint.catalog.restore.restore import MemoryTarget, RestoreReport, restore, tied_names
from recpoint.catalog.restore.shard_place import (
    check_place,
    finish_shards,
    refuse_beside_index,
    remove_unfinished,
    shard_is_there,
    take_back,
)
from recpoint.catalog.restore.shard_plan import (
    DEFAULT_SHARD_BYTES,
    ShardFile,
    ShardPlan,
    ShardTensor,
    of_table,
    plan_shards,
    shard_metadata,
    shard_of,
)
from recpoint.catalog.restore.state_tensors import Include, state_tensors
from recpoint.catalog.restore.target import StateWanted
from recpoint.catalog.run.chain import DAMAGE
from recpoint.catalog.run.run import Run
from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import Store, for_os_error
from recpoint.catalog.store.run_url import naming_run
from recpoint.errors import ObjectExists, RecpointError, StoreUnavailable, UnsupportedVersion
from recpoint.format.dtypes import dtype_name, torch_dtype
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName

__all__ = [
    "damaged_checkpoint",
    "restore_shards",
    "summary",
    "write_one_file",
    "write_shard",
]


def restore_shards(
    run: Run,
    target: Store,
    selection: Selection = NEWEST,
    *,
    include: Include = "model",
    leased: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: Callable[[int, int], None] = lambda done_bytes, total: None,
) -> RestoreReport:
    """Restore a checkpoint into files, one after another.

    Memory: as `catalog.restore.restore.restore` says, and the state of all ranks. Tables go
    through mapped files, which the system writes back and evicts from memory as needed. If the
    store is not a local directory, the directory for temporary files needs room for the largest
    file.

    Args:
        run: the run.
        target: where the files go; other files there are left alone.
        selection, leased: as for `catalog.restore.restore.restore`.
        include, shard_bytes: as for `plan_shards`.
        on_progress: called with bytes written so far and bytes to write.

    Raises:
        SettingsError: another checkpoint, or part of one, is there already.
        RestoreError: the index is there, but a file is missing that cannot be written again
            because the checkpoint is damaged; or another writer has removed files meanwhile. No
            file was removed.
        RecpointError: as for `catalog.restore.restore.restore`; no index has been written. Files
            that were finished stay for the next try.
    """
    damaged: dict[ManifestName, str] = {}
    instead_of: ShardPlan | None = None
    while True:
        plan = plan_shards(
            run,
            selection,
            include=include,
            damaged=damaged,
            leased=leased,
            shard_bytes=shard_bytes,
        )
        if instead_of is not None:
            take_back(target, instead_of)
        reports: list[RestoreReport] = []
        complete = check_place(target, plan)
        remove_unfinished(target, plan)
        if not complete:
            done_bytes = 0
            try:
                for shard in plan.shards:
                    report = write_shard(run, target, plan, shard)
                    reports += [report] if report else []
                    done_bytes += shard.size_bytes
                    on_progress(done_bytes, plan.size_bytes)
            except DAMAGE as error:
                damaged |= damaged_checkpoint(
                    target, plan, error, run_url=run.url, named=selection.named
                )
                instead_of = plan  # its files stay until another checkpoint is found
                continue
            finish_shards(target, plan)
        return summary(plan, reports)


def damaged_checkpoint(
    target: Store, plan: ShardPlan, error: RecpointError, *, run_url: str, named: bool
) -> dict[ManifestName, str]:
    """Return the damaged checkpoint and its error, for `plan_shards` to choose another one.

    Raises:
        RestoreError: the index is there, so that no other checkpoint may replace its files.
        RecpointError: `error` itself, if no other checkpoint may be chosen, as for `restore`.
    """
    refuse_beside_index(target, plan, error, run_url=run_url)
    if named or isinstance(error, UnsupportedVersion):
        raise error
    return {plan.name: naming_run(f"{type(error).__name__}: {error}", run_url)}


def summary(plan: ShardPlan, reports: Sequence[RestoreReport]) -> RestoreReport:
    """Return the report of the whole restore from the reports of its files."""
    all_reports = (plan.report, *reports)
    return replace(
        plan.report,
        passed_over=tuple(
            dict.fromkeys(name for report in all_reports for name in report.passed_over)
        ),
        chain_length=max(report.chain_length for report in all_reports),
        chunks_read=sum(report.chunks_read for report in all_reports),
        bytes_read=sum(report.bytes_read for report in all_reports),
        seconds=sum(report.seconds for report in all_reports),
    )


def write_shard(
    run: Run,
    into: Store,
    plan: ShardPlan,
    shard: ShardFile,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> RestoreReport | None:
    """Restore one file of a plan; return None if the file was already there.

    Raises:
        SettingsError: another file has its name.
        FormatError, ChainError, ObjectNotFound: the checkpoint is damaged.
        StoreError: one of the two stores cannot be used, or there is no room.
    """
    if shard_is_there(into, plan, shard):
        return None
    header = shard.header(plan.metadata)
    with _mapped(into, shard.file, len(header) + shard.size_bytes) as (path, mapped):
        mapped[: len(header)] = np.frombuffer(header, np.uint8)
        target = _ShardTarget(shard, torch.from_numpy(mapped[len(header) :]), plan.include)
        report = restore(run, target, Selection.of(plan.name), on_progress=on_progress)
        with _translated(path):
            mapped.flush()
            durable.fsync_file(path)
        try:
            into.create_from_file(shard.file, path)
        except ObjectExists:
            # Another writer's file, or ours if the store's answer was lost; an error if neither.
            shard_is_there(into, plan, shard)
    return report


class _ShardTarget(PartsTarget):
    """Restores the tensors of one file into the bytes that follow its header."""

    def __init__(self, shard: ShardFile, body: Tensor, include: Include) -> None:
        self._include: Include = include
        self._of_no_table: dict[str, Tensor] = {}
        values: dict[str, list[Tensor]] = {}  # one for each name of a table
        row_states: dict[str, dict[str, Tensor]] = {}
        for tensor, part in zip(
            shard.tensors, body.split([tensor.size_bytes for tensor in shard.tensors]), strict=True
        ):
            view = part.view(torch_dtype(tensor.dtype)).view(tensor.shape)
            if tensor.table is None:
                self._of_no_table[tensor.name] = view
            elif tensor.state is None:
                values.setdefault(tensor.table, []).append(view)
            else:
                row_states.setdefault(tensor.table, {})[tensor.state] = view
        super().__init__(
            [
                TablePart(
                    table=table,
                    values=target,
                    row_states=row_states.get(table, {}) if target is targets[0] else {},
                )
                for table, targets in values.items()
                for target in targets
            ]
        )

    def state_wanted(self, manifest: Manifest, known_trees: Mapping[int, object]) -> StateWanted:
        """Ask for the state of all ranks, or of none."""
        return StateWanted(whole=range(manifest.ranks) if self._of_no_table else ())

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """Copy the tensors that are of no table from the state."""
        tensors = state_tensors(state, self._include) if self._of_no_table else {}
        for name, target in self._of_no_table.items():
            target.copy_(tensors[name])
        super().finish(manifest, state)


def write_one_file(path: Path, target: MemoryTarget, include: Include) -> None:
    """Write a checkpoint that was restored into memory to one new safetensors file.

    Raises:
        ValueError: nothing was restored.
        SettingsError: the header would be too long for safetensors; nothing is written.
    """
    if target.manifest is None:
        raise ValueError("nothing was restored")
    named = state_tensors(target.state, include)
    tied = tied_names(target.state)
    for name, table in target.tables.items():
        states = zip(target.specs[name].row_states, table.row_states, strict=True)
        of_state = {state.name: state_target for state, state_target in states}
        for tensor in of_table(target.specs[name], tied, include):
            values = table.values if tensor.state is None else of_state[tensor.state]
            assert values is not None  # the target has row states if `include` is "all"
            named[tensor.name] = values
    shard = shard_of(
        path.name,
        [ShardTensor(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in named.items()],
    )
    header = shard.header(shard_metadata(target.manifest.run, target.manifest.ref, include))
    with open(path, "xb") as file:
        file.write(header)
        for tensor in shard.tensors:
            # One by one, so that only a tensor that is not contiguous is copied.
            flat = named[tensor.name].detach().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)


@contextmanager
def _mapped(target: Store, file: str, size_bytes: int) -> Iterator[tuple[Path, Any]]:
    """Yield a temporary file of `size_bytes` and its mapped bytes as u8; remove it at the end."""
    directory = target.scratch_directory()
    path = directory / f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(16)}-{file}"
    try:
        with _translated(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(path, flags, target.scratch_mode), "wb") as reserved:
                # Allocates the whole file now: a full disk raises an error here, but would kill the
                # process on a write to mapped bytes.
                os.posix_fallocate(reserved.fileno(), 0, size_bytes)
            mapped = np.memmap(path, np.uint8, mode="r+")
        yield path, mapped
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turn an OSError on the file that is being written into a store's error."""
    try:
        yield
    except FileNotFoundError as error:
        raise StoreUnavailable(
            str(path),
            found="no such file any more (while writing)",
            expected="the temporary file that is being written, until it has its final name",
            next_step="run the same restore again, which writes the missing files",
        ) from error
    except OSError as error:
        raise for_os_error(error, str(path), doing="writing", writing=True) from error
