"""Restores the same checkpoint on all ranks, and claims the run.

Rank 0 chooses the checkpoint. It sends orders, one after another; the other ranks carry them out
and report the result. Each order names a checkpoint, so that no rank reads the store by itself and
finds a newer one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol

from recpoint.catalog.restore.order import RestoreOrder, Selection, candidates
from recpoint.catalog.run.line_to_go_on import line_to_go_on
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import Doubts
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
from recpoint.trainer_plugin.ranks.ranks import Ranks

__all__ = ["claim_together", "restore_together"]

_log = logging.getLogger("recpoint")

_GOOD: Final = 0
_DAMAGED: Final = 1
_FAILED: Final = 2


class RestoreOne(Protocol):
    """Restores one checkpoint into this rank."""

    def __call__(self, before: int | None, name: ManifestName) -> CheckpointRef | None:
        """Restore the named checkpoint, and return which it was.

        Args:
            before: leave out this generation and later ones; None: leave out none.
            name: the checkpoint.

        Raises:
            RecpointError: as `catalog.restore.restore.restore` raises for a named checkpoint.
        """


class _RankOrder(NamedTuple):
    """An order of rank 0: restore a checkpoint, or stop.

    Attributes:
        kind: "restore": restore `name`. "claimed": the run is claimed. "failed": rank 0 failed.
        name: the checkpoint to restore.
        record: record of the claimed generation.
        error: error of rank 0.
    """

    kind: Literal["restore", "claimed", "failed"]
    name: ManifestName | None = None
    record: GenerationRecord | None = None
    error: str = ""


class _KnownToAll(Exception):
    """Wraps a failure that the other ranks know, so that none of them waits for another order."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__(failure)
        self.failure = failure


def claim_together(ranks: Ranks, claim: Callable[[], GenerationRecord]) -> GenerationRecord:
    """Have rank 0 claim the run, and return its generation record on all ranks. Collective.

    Raises:
        RankLost: rank 0 could not claim it. Rank 0 itself raises the error of `claim`.
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
    """Restore the newest checkpoint that is good on all ranks, and claim the run. Collective.

    Args:
        ranks: the ranks of the job; more than one.
        run: the run.
        restore_one: restores a checkpoint into this rank.
        selection: see `catalog.restore.restore.restore`.
        above: see `Run.claim`.

    Returns:
        The record of the new generation; `restored` is None if nothing was restored.

    Raises:
        NothingToRestore, FormatError, ChainError: on rank 0, for the reasons of
            `catalog.restore.restore.restore`.
        RankLost: on other ranks, if a rank could not go on.
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
            ranks.first(_RankOrder("restore", name=name))
            restored = _restore(ranks, restore_one, name)
            if isinstance(restored, CheckpointRef):
                for skipped_name, reason in order.skipped:
                    _log.warning("not restored on any rank: %s: %s", skipped_name, reason)
                return restored
            order.damaged(name, restored)
        raise order.nothing_good(run, good="good on all ranks")

    if selection.named:
        return _leading(ranks, lambda: run.claim(restore_newest(None), above=above))
    return _leading(ranks, lambda: run.claim_from_newest(restore_newest, above=above))


def _leading(ranks: Ranks, claim: Callable[[], GenerationRecord]) -> GenerationRecord:
    try:
        record = claim()
    except RankLost:
        raise  # a rank is lost, so no order can be sent
    except _KnownToAll as failed:
        raise failed.failure from None
    except BaseException as error:
        ranks.first(_RankOrder("failed", error=f"{type(error).__name__}: {error}"))
        raise
    ranks.first(_RankOrder("claimed", record=record))
    return record


def _follow(ranks: Ranks, restore_one: RestoreOne | None) -> GenerationRecord:
    while True:
        order: _RankOrder = ranks.first()
        if order.kind == "restore":
            assert restore_one is not None and order.name is not None
            try:
                _restore(ranks, restore_one, order.name)
            except _KnownToAll as failed:
                raise failed.failure from None
        elif order.kind == "claimed":
            assert order.record is not None
            return order.record
        else:
            raise RankLost(
                f"rank 0 of {ranks.count}",
                found=order.error,
                expected="a checkpoint to restore, and the run claimed",
                next_step="see the log of rank 0",
            )


def _restore(ranks: Ranks, restore_one: RestoreOne, name: ManifestName) -> CheckpointRef | str:
    """Restore a checkpoint on all ranks.

    Returns:
        The checkpoint; or the damage that a rank found, as text.

    Raises:
        _KnownToAll: this rank has an error other than damage.
        RankLost: another rank has such an error.
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
    own_result = _FAILED if failure is not None else _GOOD if restored is not None else _DAMAGED
    results = [result for (result,) in ranks.exchange("a checkpoint to restore", [own_result])]
    failed = [rank for rank, result in enumerate(results) if result == _FAILED]
    if failure is not None:
        raise _KnownToAll(failure)
    if failed:
        raise RankLost(
            f"rank {', '.join(map(str, failed))} of {ranks.count}",
            found=f"an error while restoring {name}",
            expected=f"{name} restored on all ranks",
            next_step="see the log of that rank",
        )
    damaged = [rank for rank, result in enumerate(results) if result == _DAMAGED]
    if damaged:
        return damage or f"damaged, as rank {', '.join(map(str, damaged))} found"
    assert restored is not None
    return restored
