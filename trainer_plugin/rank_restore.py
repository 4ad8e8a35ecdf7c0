"""Restoring one and the same checkpoint on all ranks: rank 0 chooses, and claims the run.

Rank 0 tells the others what to do, one order after another; they do it and say how it went. Each
candidate is named, so that none of them looks at the store by itself and finds a newer one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol

from recpoint.catalog.records.validations import Doubts
from recpoint.catalog.restoring.restore_order import RestoreOrder
from recpoint.catalog.restoring.selection import Selection, candidates
from recpoint.catalog.runs.run import Run
from recpoint.catalog.runs.superseded import line_to_go_on
from recpoint.errors import (
    ChainError,
    FormatError,
    ObjectNotFound,
    RankLost,
    RetentionRefused,
    UnsupportedVersion,
)
from recpoint.format.naming import ManifestName
from recpoint.format.records import CheckpointRef, GenerationRecord
from recpoint.trainer_plugin.ranks import Ranks

__all__ = ["claim_together", "restore_together"]

_log = logging.getLogger("recpoint")

_GOOD: Final = 0
_DAMAGED: Final = 1
_FAILED: Final = 2


class RestoreOne(Protocol):
    """Restores one checkpoint into this rank."""

    def __call__(self, before: int | None, name: ManifestName) -> CheckpointRef | None:
        """Raises what `catalog.restoring.restore.restore` does of a checkpoint that is named."""


class _Order(NamedTuple):
    """What rank 0 wants done: a checkpoint restored, or nothing more."""

    kind: Literal["restore", "claimed", "failed"]
    name: ManifestName | None = None
    record: GenerationRecord | None = None
    error: str = ""


class _KnownToAll(Exception):
    """A failure of which the other ranks have been told: none of them waits for another order."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__(failure)
        self.failure = failure


def claim_together(ranks: Ranks, claim: Callable[[], GenerationRecord]) -> GenerationRecord:
    """The generation record that rank 0 creates, on all ranks.

    Raises:
        RankLost: it could not; on rank 0 what `claim` raised.
    """
    if not ranks.several:
        return claim()
    if ranks.rank == 0:
        return _leading(ranks, claim)
    return _follow(ranks, None)


def restore_together(
    ranks: Ranks,
    run: Run,
    restore_one: RestoreOne,
    selection: Selection,
    *,
    above: int = 0,
) -> GenerationRecord:
    """Restore on all ranks what rank 0 finds to be the newest that is good on all, and claim.

    Args:
        ranks: of the job, several.
        run: the run.
        restore_one: restores a checkpoint into this rank.
        selection: see `catalog.restoring.restore.restore`.
        above: see `Run.claim`.

    Returns:
        The record of the new generation; with `restored` None nothing was restored.

    Raises:
        NothingToRestore, FormatError, ChainError: on rank 0, as
            `catalog.restoring.restore.restore`.
        RankLost: on the others when another rank could not go on.
    """
    if ranks.rank != 0:
        return _follow(ranks, restore_one)

    def restore_newest(before: int | None) -> CheckpointRef | None:
        doubts: Doubts | None = None
        if selection.named:
            names = candidates(run, selection, before=before)
        else:
            names = line_to_go_on(run, before=before)
            if not names:
                return None
            doubts = Doubts(run, validated_only=selection.validated_only)
        order = RestoreOrder(names, doubts, selection)
        for name in order:
            ranks.first(_Order("restore", name=name))
            found = _restore(ranks, restore_one, name)
            if isinstance(found, CheckpointRef):
                for one, why in order.skipped:
                    _log.warning("not restored on any rank: %s: %s", one, why)
                return found
            order.damaged(name, found)
        raise order.nothing_good(run, good="good on all ranks")

    if selection.named:
        return _leading(ranks, lambda: run.claim(restore_newest(None), above=above))
    return _leading(ranks, lambda: run.claim_from_newest(restore_newest, above=above))


def _leading(ranks: Ranks, claim: Callable[[], GenerationRecord]) -> GenerationRecord:
    try:
        record = claim()
    except RankLost:
        raise  # nobody listens
    except _KnownToAll as known:
        raise known.failure from None
    except BaseException as error:
        ranks.first(_Order("failed", error=f"{type(error).__name__}: {error}"))
        raise
    ranks.first(_Order("claimed", record=record))
    return record


def _follow(ranks: Ranks, restore_one: RestoreOne | None) -> GenerationRecord:
    while True:
        order: _Order = ranks.first()
        if order.kind == "restore":
            assert restore_one is not None and order.name is not None
            try:
                _restore(ranks, restore_one, order.name)
            except _KnownToAll as known:
                raise known.failure from None
        elif order.kind == "claimed":
            assert order.record is not None
            return order.record
        else:
            raise RankLost(
                f"rank 0 of {ranks.count}",
                found=order.error,
                expected="a checkpoint to restore, and the run claimed",
                next_step="see its log",
            )


def _restore(ranks: Ranks, restore_one: RestoreOne, name: ManifestName) -> CheckpointRef | str:
    """Restore a checkpoint on all ranks: which it was, or why not everywhere.

    Raises:
        _KnownToAll: what has nothing to do with damage.
        RankLost: another rank had that.
    """
    restored: CheckpointRef | None = None
    damage = ""
    failure: BaseException | None = None
    try:
        restored = restore_one(None, name)
    except UnsupportedVersion as error:
        failure = error
    except (FormatError, ChainError, ObjectNotFound, RetentionRefused) as error:
        damage = f"{type(error).__name__}: {error}"
    except BaseException as error:
        failure = error
    mine = _FAILED if failure is not None else _GOOD if restored is not None else _DAMAGED
    said = [result for (result,) in ranks.exchange("a checkpoint to restore", [mine])]
    failed = [rank for rank, result in enumerate(said) if result == _FAILED]
    if failure is not None:
        raise _KnownToAll(failure)
    if failed:
        raise RankLost(
            f"rank {', '.join(map(str, failed))} of {ranks.count}",
            found=f"an error while restoring {name}",
            expected=f"{name} restored on all ranks",
            next_step="see the log of that rank",
        )
    damaged = [rank for rank, result in enumerate(said) if result == _DAMAGED]
    if damaged:
        return damage or f"damaged, as rank {', '.join(map(str, damaged))} found"
    assert restored is not None
    return restored
