"""What ranks say to each other before and after a cut: a few integers of a fixed number each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from recpoint.errors import SettingsError, StagingError
from recpoint.format.records import CheckpointRef
from recpoint.trainer_plugin.policy import Link, Tip
from recpoint.trainer_plugin.ranks import Ranks
from recpoint.trainer_plugin.replicas import Sketch, are_alike
from recpoint.trainer_plugin.schedule import Schedule

__all__ = [
    "LOST_AT_ONCE",
    "AgreedSchedule",
    "CutAgreement",
    "Lost",
    "after_cut",
    "agree_on_cut",
    "agree_on_lost",
    "agree_on_settings",
    "incomplete",
    "incomplete_parts",
]

#: Most checkpoints that a rank reports as lost at once; others are reported the next time.
LOST_AT_ONCE: Final = 4


class Lost:
    """Checkpoints that some rank has no part of, so that they can never be whole."""

    def __init__(self, heard: Iterable[int]) -> None:
        self._attempts = frozenset(heard) - {-1}

    def __contains__(self, ref: CheckpointRef) -> bool:
        return _attempt(ref) in self._attempts


@dataclass(frozen=True, kw_only=True)
class CutAgreement:
    """What all ranks do.

    Attributes:
        cut: all of them can cut.
        increment: all want an increment, after the same checkpoint; else a full is cut.
        again: one of them has a checkpoint of this step already.
        number: of the cut, if there is one: another each time, also when a step is cut again.
        lost: those that some rank has lost since the last agreement.
        sketches: of what all have alike, of each rank; where all can cut.
    """

    cut: bool
    increment: bool
    again: bool
    number: int
    lost: Lost
    sketches: tuple[Sketch, ...]

    @property
    def unlike(self) -> bool:
        """Whether what is stored once is not the same on all ranks: no rank cuts then."""
        return not are_alike(self.sketches)


def agree_on_cut(
    ranks: Ranks,
    step: int,
    *,
    link: Link | None,
    tip: Tip | None,
    again: bool,
    cuts: int,
    lost: Sequence[CheckpointRef],
    sketch: Sketch,
) -> CutAgreement:
    """Before a cut. Collective.

    Args:
        ranks: of the job.
        step: batches done.
        link: what this rank would cut; None: it cannot.
        tip: that it would cut after.
        again: it has a checkpoint of this step already.
        cuts: that it has begun since the start.
        lost: those that it has lost and not told of yet, at most `LOST_AT_ONCE`.
        sketch: of what it has as all ranks have it.

    Raises:
        SettingsError: ranks have done different numbers of batches.
        RankLost: one did not answer.
    """
    increment = link is not None and link.kind == "increment"
    name = -1 if tip is None else _attempt(tip.ref)
    heard = ranks.exchange(
        "a checkpoint",
        [link is not None, increment, name, again, cuts, *sketch.integers, *_padded_attempts(lost)],
        batches_done=step,
    )
    cut = all(said[0] for said in heard)
    return CutAgreement(
        cut=cut,
        increment=all(said[1] for said in heard) and len({said[2] for said in heard}) == 1,
        again=any(said[3] for said in heard),
        number=1 + max(said[4] for said in heard),
        lost=Lost(one for said in heard for one in said[7:]),
        sketches=tuple(Sketch.of_integers(said[5], said[6]) for said in heard) if cut else (),
    )


def agree_on_lost(ranks: Ranks, lost: Sequence[CheckpointRef], *, step: int) -> Lost:
    """Before the last cut, as `agree_on_cut` does before each. Collective."""
    heard = ranks.exchange("lost checkpoints", _padded_attempts(lost), batches_done=step)
    return Lost(one for said in heard for one in said)


def _padded_attempts(lost: Sequence[CheckpointRef]) -> list[int]:
    return [*map(_attempt, lost), *(-1,) * LOST_AT_ONCE][:LOST_AT_ONCE]


def _attempt(ref: CheckpointRef) -> int:
    """60 bits of the attempt: checkpoints are the same where they are."""
    return int(ref.attempt[:15], 16)


def agree_on_settings(ranks: Ranks, settings: Mapping[str, Any]) -> None:
    """Whether all ranks were given the same. Collective.

    Args:
        ranks: of the job.
        settings: name -> value, plain ones, of those that may not differ.

    Raises:
        SettingsError: they differ; on every rank.
        RankLost: one did not answer.
    """
    if not ranks.several:
        return
    heard: list[dict[str, Any]] = ranks.gather(dict(settings))
    for name, first in heard[0].items():
        for rank, said in enumerate(heard):
            if said[name] != first:
                raise SettingsError(
                    name,
                    found=f"{said[name]!r:.200} on rank {rank}, {first!r:.200} on rank 0",
                    expected="the same on all ranks",
                    next_step=f"give each rank's Checkpointer the same {name}",
                )


class AgreedSchedule:
    """A schedule that measures time, as rank 0 sees it: clocks differ, and batches must not.

    One exchange for each grant: about nine in an interval, see `schedule.SecondsInterval`.

    Args:
        own: of this rank.
        ranks: of the job.
    """

    def __init__(self, own: Schedule, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    @property
    def due_seconds(self) -> float:
        """Never: a rank that decided by its own clock would be alone."""
        return math.inf

    def restart(self, now_seconds: float, *, in_parts: bool = False) -> int:
        """See `schedule.Schedule`. Collective."""
        return self._first(self._own.restart(now_seconds, in_parts=in_parts))

    def extend(self, now_seconds: float, *, batches: int) -> int:
        """See `schedule.Schedule`. Collective."""
        return self._first(self._own.extend(now_seconds, batches=batches))

    def _first(self, batches: int) -> int:
        return self._ranks.exchange("the interval", [batches])[0][0]


def after_cut(
    ranks: Ranks, *, failed: bool, bound_bytes: int, step: int
) -> tuple[list[int], list[int]]:
    """After a cut: the ranks on which it failed, and the `bound_bytes` of each. Collective."""
    said = ranks.exchange("a cut", [failed, bound_bytes], batches_done=step)
    return [rank for rank, (bad, _) in enumerate(said) if bad], [bound for _, bound in said]


def incomplete_parts(
    by_rank: Sequence[Mapping[tuple[int, int], Mapping[int, int]]],
) -> set[tuple[int, int]]:
    """Generation and step of staged checkpoints that lack the part of some rank.

    Args:
        by_rank: what the host of each rank has, see `StagingArea.parts_here`.
    """
    there: dict[tuple[int, int], dict[int, int]] = {}
    for host in by_rank:
        for name, parts in host.items():
            known = there.setdefault(name, {})
            for rank, ranks in parts.items():
                known[rank] = max(ranks, known.get(rank, 0))
    return {name for name, parts in there.items() if len(parts) < max(parts.values())}


def incomplete(step: int, failed: Sequence[int], count: int) -> StagingError:
    """What is wrong with a checkpoint that other ranks could not cut."""
    return StagingError(
        f"checkpoint of step {step}",
        found=f"no part of rank {', '.join(map(str, failed))}",
        expected=f"a part of each of {count} ranks",
        next_step="see the log of that rank; the next checkpoint holds these rows too",
    )
