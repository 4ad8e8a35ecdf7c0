"""The place that files of safetensors are restored into: what is there, and what may be removed.

What is there is told by its header and its length. Files count from the moment that the index is
there: nothing is removed then. Until then those of a checkpoint that turned out to be damaged make
room for another one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from recpoint.catalog.restoring.shard_plan import (
    DEFAULT_SHARD_BYTES,
    INDEX,
    ORIGIN_BYTES,
    SHARD_NAME,
    Origin,
    Shard,
    ShardPlan,
    checkpoint_in,
)
from recpoint.catalog.stores.elapsed import now_ms
from recpoint.catalog.stores.run_url import naming_run
from recpoint.catalog.stores.store_contract import Store
from recpoint.errors import (
    ObjectExists,
    ObjectNotFound,
    RecpointError,
    RestoreError,
    SettingsError,
)

__all__ = [
    "check_place",
    "finish_shards",
    "refuse_beside_index",
    "remove_unfinished",
    "shard_is_there",
    "take_back",
]

# Twice as long as a task of the flow may be at a file.
_UNFINISHED_SECONDS: Final = 24 * 3600

_MOST_NAMES: Final = 3


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
            shard_is_there(into, plan, shard)
    return False


def finish_shards(into: Store, plan: ShardPlan) -> None:
    """Write the index, once all files are there.

    Raises:
        RestoreError: a file is gone: another writer has found damage, and taken it back.
        SettingsError: another file or another index is there.
    """
    _require_all(into, plan)
    try:
        into.create(INDEX, plan.index)
    except ObjectExists:
        _is_there(into, plan, INDEX, plan.index, len(plan.index))
    # Again: who took back before it could see the index may have begun after the first look.
    _require_all(into, plan)


def remove_unfinished(into: Store, plan: ShardPlan) -> None:
    """Remove what writers of the plan's files left that were killed more than a day ago.

    What is younger may be another writer's, which still needs it.
    """
    before_ms = now_ms() - _UNFINISHED_SECONDS * 1000
    for info in list(into.list_unfinished()):
        of_plan = any(shard.file in info.key for shard in plan.shards) and "/" not in info.key
        if of_plan and info.modified_ms < before_ms:
            into.delete_unfinished(info.key)


def refuse_beside_index(
    into: Store, plan: ShardPlan, error: RecpointError, *, run_url: str
) -> None:
    """Of a checkpoint that turned out to be damaged: no other one takes its place then.

    Args:
        into: the place.
        plan: the files of the damaged checkpoint.
        error: what is damaged.
        run_url: of the run.

    Raises:
        RestoreError: there is an index; it says which files are there.
    """
    if not _has_index(into):
        return
    missing = _missing(into, plan)
    count = len(plan.shards)
    without = f" without {_names(missing)}," if missing else ""
    raise RestoreError(
        f"restore into {into.url}",
        found=f"{INDEX} and {count - len(missing)} of the {count} files of {plan.name},{without} "
        f"and damage where they come from: {type(error).__name__}, {error.subject}, {error.found}",
        expected="a good checkpoint to make what is missing from; what is there was left alone",
        next_step=naming_run("recpoint check URL --level full", run_url)
        + "; keep what is there, which may be the last copy, and restore into another place",
    )


def take_back(into: Store, plan: ShardPlan) -> None:
    """Remove the files of a damaged checkpoint, once another one is there to take their place.

    Raises:
        RestoreError: there is an index: another writer has finished meanwhile.
        SettingsError: another file is in the place of one.
    """
    for shard in plan.shards:
        if not shard_is_there(into, plan, shard):
            continue
        if _has_index(into):
            raise RestoreError(
                f"restore into {into.url}",
                found=f"{INDEX}, which another writer made while {plan.name} was found damaged",
                expected="no index where files are to make room for another checkpoint; "
                f"{shard.file} was left where it is",
                next_step="run the same restore again: it makes what is missing, if anything is",
            )
        into.delete(shard.file)


def _require_all(into: Store, plan: ShardPlan) -> None:
    missing = _missing(into, plan)
    if missing:
        raise RestoreError(
            f"restore into {into.url}",
            found=f"no {_names(missing)} any more",
            expected=f"all {len(plan.shards)} files of {plan.name} until the index is there; "
            "another restore into the same place removes them where it finds the checkpoint "
            "damaged",
            next_step="run the same restore again, and no other beside it",
        )


def _missing(into: Store, plan: ShardPlan) -> list[str]:
    """Names of the files that are not there."""
    return [shard.file for shard in plan.shards if not shard_is_there(into, plan, shard)]


def _names(files: Sequence[str]) -> str:
    rest = len(files) - _MOST_NAMES
    return ", ".join(files[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _has_index(into: Store) -> bool:
    try:
        into.size(INDEX)
    except ObjectNotFound:
        return False
    return True


def shard_is_there(into: Store, plan: ShardPlan, shard: Shard) -> bool:
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
    begun = _origin_of(into, plan, key)
    if begun is not None and begun.name != plan.name:
        step, generation = begun.name
        found = f"of another checkpoint, {begun.name}"
        go_on = (
            f"go on with that one: --step {step} --generation {generation} "
            f"(step={step}, generation={generation} in Python and of the flow); or "
        )
    elif begun is not None and begun.attempt == plan.report.restored.attempt:
        if _has_header(into, plan, key):
            found = "of this very restore, in another length: it was changed since"
            go_on = f"remove {key}, which is made again; or "
        else:
            found = "of this checkpoint, in files of another size"
            go_on = (
                "give the same shard_bytes as before (in Python and of the flow; the command line "
                f"has {DEFAULT_SHARD_BYTES}); or "
            )
    return SettingsError(
        f"restore into {into.url}",
        found=f"{key}, {found}",
        expected=f"no {INDEX}, and no shards but those of this very restore, of {plan.name}",
        next_step=f"{go_on}choose another place, or remove what is there",
    )


def _origin_of(into: Store, plan: ShardPlan, key: str) -> Origin | None:
    """Which checkpoint of the plan's run a file has; None: of none, or it does not say."""
    return checkpoint_in(_start_of(into, key, ORIGIN_BYTES), plan.run)


def _has_header(into: Store, plan: ShardPlan, key: str) -> bool:
    """Whether a file begins as the plan's of this name does."""
    headers = (shard.header(plan.metadata) for shard in plan.shards if shard.file == key)
    return any(_start_of(into, key, len(header)) == header for header in headers)


def _start_of(into: Store, key: str, size_bytes: int) -> bytes:
    """Its first bytes, or all of it; none where it is gone."""
    try:
        return into.get_range(key, start=0, end=min(into.size(key), size_bytes))
    except ObjectNotFound:
        return b""
