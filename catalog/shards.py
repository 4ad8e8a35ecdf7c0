"""Restoring into files of safetensors with an index, a file at a time and in any order.

Every file is made beside its place and appears whole, once: what is there is never replaced. So a
restore that was killed goes on where it was, two that write the same do no harm, and two that write
different things into one place cannot mix. The index appears last; without it nothing counts.
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

from recpoint.catalog import durable
from recpoint.catalog.chain import DAMAGE
from recpoint.catalog.lineage import ManifestName
from recpoint.catalog.reshard import PartsTarget, TablePart
from recpoint.catalog.restore import RestoreReport, restore
from recpoint.catalog.restore_target import StateWanted
from recpoint.catalog.run import Run
from recpoint.catalog.run_url import naming_run
from recpoint.catalog.shard_plan import (
    DEFAULT_SHARD_BYTES,
    INDEX,
    ORIGIN_BYTES,
    SHARD_NAME,
    Shard,
    ShardPlan,
    checkpoint_in,
    plan_shards,
)
from recpoint.catalog.state_tensors import state_tensors
from recpoint.catalog.store_contract import Store
from recpoint.catalog.store_errors import for_os_error
from recpoint.errors import (
    ObjectExists,
    ObjectNotFound,
    RecpointError,
    SettingsError,
    UnsupportedVersion,
)
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Manifest

__all__ = [
    "check_place",
    "damaged_checkpoint",
    "finish_shards",
    "restore_shards",
    "summary",
    "take_back",
    "write_shard",
]


def restore_shards(
    run: Run,
    into: Store,
    *,
    step: int | None = None,
    generation: int | None = None,
    validated_only: bool = False,
    validated_within: int | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> RestoreReport:
    """Restore a checkpoint into files, one after another.

    Memory: as `catalog.restore.restore` says, and the state of all ranks. Tables go through mapped
    files, which the system writes back and takes from memory as it needs to. A store that is no
    local directory needs room for the largest file in the directory for temporary files.

    Args:
        run: the run.
        into: where the files go; others there are left alone.
        step, generation, validated_only, validated_within: as for `catalog.restore.restore`.
        shard_bytes: as for `plan_shards`.
        on_progress: called with bytes written so far and bytes to write.

    Raises:
        SettingsError: another checkpoint, or part of one, is there already.
        RecpointError: as for `catalog.restore.restore`; no index has been written.
    """
    damaged: dict[ManifestName, str] = {}
    while True:
        plan = plan_shards(
            run,
            step=step,
            generation=generation,
            validated_only=validated_only,
            validated_within=validated_within,
            damaged=damaged,
            shard_bytes=shard_bytes,
        )
        reports: list[RestoreReport] = []
        if not check_place(into, plan):
            done_bytes = 0
            try:
                for shard in plan.shards:
                    report = write_shard(run, into, plan, shard)
                    reports += [report] if report else []
                    done_bytes += shard.size_bytes
                    on_progress(done_bytes, plan.size_bytes)
            except DAMAGE as error:
                damaged |= damaged_checkpoint(plan, error, run_url=run.url, named=step is not None)
                take_back(into, plan)
                continue
            finish_shards(into, plan)
        return summary(plan, reports)


def damaged_checkpoint(
    plan: ShardPlan, error: RecpointError, *, run_url: str, named: bool
) -> dict[ManifestName, str]:
    """For `plan_shards`, which is to choose another one.

    Raises:
        RecpointError: the error itself, where there is no choice: as for `restore`.
    """
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


# --- the place -----------------------------------------------------------------------------------


def check_place(into: Store, plan: ShardPlan) -> bool:
    """Whether all of the plan is there already.

    Raises:
        SettingsError: something else is.
    """
    missing = {shard.file: shard for shard in plan.shards}
    for info in into.list("model"):
        if info.key == INDEX:  # behind all shards in a listing
            return _is_there(into, plan, INDEX, plan.index, len(plan.index)) and not missing
        if SHARD_NAME.match(info.key):
            shard = missing.pop(info.key, None)
            if shard is None:
                raise _taken(into, plan, info.key)
            _shard_is_there(into, plan, shard)
    return False


def finish_shards(into: Store, plan: ShardPlan) -> None:
    """Write the index, once all files are there, and remove what killed writers of them left.

    Raises:
        SettingsError: there is another one.
    """
    try:
        into.create(INDEX, plan.index)
    except ObjectExists:
        _is_there(into, plan, INDEX, plan.index, len(plan.index))
    for info in list(into.list_unfinished()):
        if any(shard.file in info.key for shard in plan.shards) and "/" not in info.key:
            into.delete_unfinished(info.key)


def take_back(into: Store, plan: ShardPlan) -> None:
    """Remove the files of a plan that turned out to be of a damaged checkpoint."""
    for shard in plan.shards:
        if _shard_is_there(into, plan, shard):
            into.delete(shard.file)


def _shard_is_there(into: Store, plan: ShardPlan, shard: Shard) -> bool:
    """Whether the file is: by its header, which says of what it is, and its length."""
    header = shard.header(plan.metadata)
    return _is_there(into, plan, shard.file, header, len(header) + shard.size_bytes)


def _is_there(into: Store, plan: ShardPlan, key: str, start: bytes, size_bytes: int) -> bool:
    """Whether an object is that begins so and is so long.

    Raises:
        SettingsError: another one is.
    """
    try:
        if into.size(key) == size_bytes and into.get_range(key, start=0, end=len(start)) == start:
            return True
    except ObjectNotFound:
        return False
    raise _taken(into, plan, key)


def _taken(into: Store, plan: ShardPlan, key: str) -> SettingsError:
    """Of what is in the way. A trainer may have committed a newer checkpoint since a restore was
    killed, so what that one restored is said, and how to go on with it."""
    found, go_on = "of another checkpoint or of other files", ""
    begun = _checkpoint_of(into, plan, key)
    if begun is not None and begun != plan.name:
        step, generation = begun
        found = f"of another checkpoint, step {step} (generation {generation})"
        go_on = (
            f"go on with that one: --step {step} --generation {generation} "
            f"(step={step}, generation={generation} in Python and of the flow); or "
        )
    return SettingsError(
        f"restore into {into.url}",
        found=f"{key}, {found}",
        expected=f"no {INDEX}, and no shards but those of this very restore, of {plan.name}",
        next_step=f"{go_on}choose another place, or remove what is there",
    )


def _checkpoint_of(into: Store, plan: ShardPlan, key: str) -> ManifestName | None:
    """Which checkpoint of the plan's run a file has; None: of none, or it does not say."""
    try:
        start = into.get_range(key, start=0, end=min(into.size(key), ORIGIN_BYTES))
    except ObjectNotFound:
        return None
    return checkpoint_in(start, plan.run)


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
    if _shard_is_there(into, plan, shard):
        return None
    header = shard.header(plan.metadata)
    with _mapped(into, shard.file, len(header) + shard.size_bytes) as (path, mapped):
        mapped[: len(header)] = np.frombuffer(header, np.uint8)
        target = _ShardTarget(shard, torch.from_numpy(mapped[len(header) :]))
        report = restore(
            run,
            target,
            step=plan.name.step,
            generation=plan.name.generation,
            on_progress=on_progress,
        )
        mapped.flush()
        durable.fsync_file(path)
        try:
            into.create_from_file(shard.file, path)
        except ObjectExists:
            _shard_is_there(into, plan, shard)  # another writer's, or ours after a lost answer
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
        try:
            with path.open("xb") as made:
                # All of it now: a disk that is full is an error here, and the end of the process
                # where mapped bytes are written.
                os.posix_fallocate(made.fileno(), 0, size_bytes)
        except OSError as error:
            raise for_os_error(error, str(path), doing="writing", writing=True) from error
        yield path, np.memmap(path, np.uint8, mode="r+")
    finally:
        path.unlink(missing_ok=True)
