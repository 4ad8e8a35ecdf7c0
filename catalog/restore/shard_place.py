"""Checks the place that safetensors files are restored into, and removes files from it.

A file is recognized by its header and its length. After the index exists, the files are final and
none is removed. Before that, the files of a damaged checkpoint are removed for those of another
checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from recpoint.catalog.restore.shard_plan import (
    DEFAULT_SHARD_BYTES,
    INDEX,
    ORIGIN_BYTES,
    SHARD_NAME,
    Origin,
    ShardFile,
    ShardPlan,
    checkpoint_in,
)
from recpoint.catalog.store.contract import Store, now_ms
from recpoint.catalog.store.run_url import naming_run
from recpoint.errors import ObjectExists, ObjectNotFound, RecpointError, RestoreError, SettingsError

__all__ = [
    "check_place",
    "finish_shards",
    "refuse_beside_index",
    "remove_unfinished",
    "shard_is_there",
    "take_back",
]


# Twice the time that a task of the flow may spend on one file.
_UNFINISHED_SECONDS: Final = 24 * 3600
_MOST_NAMES: Final = 3


def check_place(target: Store, plan: ShardPlan) -> bool:
    """Tell whether all files of the plan and its index exist already.

    Raises:
        SettingsError: the place has other files or another index.
    """
    missing = {shard.file: shard for shard in plan.shards}
    for info in target.list("model"):
        if info.key == INDEX:  # a listing has it after all shards
            return _is_there(target, plan, INDEX, plan.index, len(plan.index)) and not missing
        if SHARD_NAME.match(info.key):
            shard = missing.pop(info.key, None)
            if shard is None:
                raise _taken(target, plan, info.key)
            shard_is_there(target, plan, shard)
    return False


def finish_shards(target: Store, plan: ShardPlan) -> None:
    """Write the index after all files are there.

    Raises:
        RestoreError: a file is gone, because another writer found damage and removed it.
        SettingsError: the place has another file or another index.
    """
    _require_all(target, plan)
    try:
        target.create(INDEX, plan.index)
    except ObjectExists:
        _is_there(target, plan, INDEX, plan.index, len(plan.index))
    # A second check, because a writer that did not yet see the index may have begun to remove files
    # after the first check.
    _require_all(target, plan)


def remove_unfinished(target: Store, plan: ShardPlan) -> None:
    """Remove unfinished files of the plan whose writers were killed more than a day ago.

    Another writer may still need younger ones.
    """
    before_ms = now_ms() - _UNFINISHED_SECONDS * 1000
    for info in list(target.list_unfinished()):
        of_plan = any(shard.file in info.key for shard in plan.shards) and "/" not in info.key
        if of_plan and info.modified_ms < before_ms:
            target.delete_unfinished(info.key)


def refuse_beside_index(
    target: Store, plan: ShardPlan, error: RecpointError, *, run_url: str
) -> None:
    """Refuse to replace the files of a damaged checkpoint if their index exists.

    Args:
        target: the place.
        plan: the files of the damaged checkpoint.
        error: the damage.
        run_url: URL of the run.

    Raises:
        RestoreError: there is an index; the error says which files are there.
    """
    if not _has_index(target):
        return
    missing = _missing(target, plan)
    count = len(plan.shards)
    without = f" without {_names(missing)}," if missing else ""
    raise RestoreError(
        f"restore into {target.url}",
        found=f"{INDEX} and {count - len(missing)} of the {count} files of {plan.name},{without} "
        f"and damage in that checkpoint: {type(error).__name__}, {error.subject}, {error.found}",
        expected="a good checkpoint to write the missing files from; no file was removed",
        next_step=naming_run("recpoint check URL --level full", run_url)
        + "; keep what is there, which may be the last copy, and restore into another place",
    )


def take_back(target: Store, plan: ShardPlan) -> None:
    """Remove the files of a damaged checkpoint, after another checkpoint was found for the place.

    Raises:
        RestoreError: there is an index, because another writer has finished meanwhile.
        SettingsError: a file of the plan's names is not the plan's.
    """
    for shard in plan.shards:
        if not shard_is_there(target, plan, shard):
            continue
        if _has_index(target):
            raise RestoreError(
                f"restore into {target.url}",
                found=f"{INDEX}, which another writer made while {plan.name} was found damaged",
                expected="no index while files are removed for another checkpoint; "
                f"{shard.file} was not removed",
                next_step="run the same restore again: it writes any file that is missing",
            )
        target.delete(shard.file)


def _require_all(target: Store, plan: ShardPlan) -> None:
    missing = _missing(target, plan)
    if missing:
        raise RestoreError(
            f"restore into {target.url}",
            found=f"no {_names(missing)} any more",
            expected=f"all {len(plan.shards)} files of {plan.name} until the index is there; "
            "another restore into the same place removes them if it finds the checkpoint damaged",
            next_step="run the same restore again, and no other one into this place meanwhile",
        )


def _missing(target: Store, plan: ShardPlan) -> list[str]:
    """Return the names of the plan's files that are not there."""
    return [shard.file for shard in plan.shards if not shard_is_there(target, plan, shard)]


def _names(files: Sequence[str]) -> str:
    hidden_files = len(files) - _MOST_NAMES
    return ", ".join(files[:_MOST_NAMES]) + (
        f" and {hidden_files} more" if hidden_files > 0 else ""
    )


def _has_index(target: Store) -> bool:
    try:
        target.size(INDEX)
    except ObjectNotFound:
        return False
    return True


def shard_is_there(target: Store, plan: ShardPlan, shard: ShardFile) -> bool:
    """Tell whether a file of the plan exists, by its header, which names its origin, and length."""
    header = shard.header(plan.metadata)
    return _is_there(target, plan, shard.file, header, len(header) + shard.size_bytes)


def _is_there(target: Store, plan: ShardPlan, key: str, start: bytes, size_bytes: int) -> bool:
    """Tell whether the object `key` exists, begins with `start` and has `size_bytes` bytes.

    Raises:
        SettingsError: the object exists, but is another one.
    """
    try:
        if (
            target.size(key) == size_bytes
            and target.get_range(key, start=0, end=len(start)) == start
        ):
            return True
    except ObjectNotFound:
        return False
    raise _taken(target, plan, key)


def _taken(target: Store, plan: ShardPlan, key: str) -> SettingsError:
    """Return the error for a file that is in the way.

    It says which checkpoint the file is of and how to continue with that: a trainer may have
    committed a newer checkpoint after an earlier restore was killed.
    """
    origin_text, go_on = "of another checkpoint or of other files", ""
    origin = _origin_of(target, plan, key)
    if origin is not None and origin.name != plan.name:
        step, generation = origin.name
        origin_text = f"of another checkpoint, {origin.name}"
        go_on = (
            f"go on with that one: --step {step} --generation {generation} "
            f"(step={step}, generation={generation} in Python and of the flow); or "
        )
    elif origin is not None and origin.attempt == plan.report.restored.attempt:
        if origin.include != plan.include:
            origin_text = f"of this checkpoint, restored with include={origin.include}"
            go_on = (
                f"give the same as before: --include {origin.include} "
                f'(include="{origin.include}" in Python and of the flow); or '
            )
        elif _has_header(target, plan, key):
            origin_text = "of this very restore, in another length: it was changed since"
            go_on = f"remove {key}, which is made again; or "
        else:
            origin_text = "of this checkpoint, in files of another size"
            go_on = (
                "give the same shard_bytes as before (in Python and of the flow; the command line "
                f"has {DEFAULT_SHARD_BYTES}); or "
            )
    return SettingsError(
        f"restore into {target.url}",
        found=f"{key}, {origin_text}",
        expected=f"no {INDEX}, and no shards except those of this very restore, of {plan.name}",
        next_step=f"{go_on}choose another place, or remove what is there",
    )


def _origin_of(target: Store, plan: ShardPlan, key: str) -> Origin | None:
    """Return the checkpoint of the plan's run that a file is of; None if it names none."""
    return checkpoint_in(_start_of(target, key, ORIGIN_BYTES), plan.run)


def _has_header(target: Store, plan: ShardPlan, key: str) -> bool:
    """Tell whether a file begins with the header of the plan's file of this name."""
    headers = (shard.header(plan.metadata) for shard in plan.shards if shard.file == key)
    return any(_start_of(target, key, len(header)) == header for header in headers)


def _start_of(target: Store, key: str, size_bytes: int) -> bytes:
    """Return the first `size_bytes` of an object, or all of it; b"" if it is gone."""
    try:
        return target.get_range(key, start=0, end=min(target.size(key), size_bytes))
    except ObjectNotFound:
        return b""
