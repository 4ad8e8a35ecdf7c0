"""Applies the rules of a retention: which checkpoints are worth keeping (format §6.6, §6.7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from recpoint.catalog.run.representations import Representations, RunFacts
from recpoint.errors import SettingsError
from recpoint.format.naming import ManifestName, is_label

__all__ = [
    "BestBy",
    "RetentionPolicy",
    "apply_rules",
]


_MOST = 10**9
_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS


@dataclass(frozen=True)
class BestBy:
    """Keep the `count` checkpoints with the greatest (`max`) or least (`min`) metric."""

    metric: str
    direction: Literal["max", "min"]
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """The rules of a retention; a checkpoint is kept if any rule keeps it, or if it is pinned.

    Only checkpoints of the live line are counted; `keep_within_seconds` also keeps superseded
    ones. Hours, days, weeks (from Monday) and months are in UTC. Each rule is applied to two times
    of a checkpoint, the trainer's stamp and the store's time of its manifest, and keeps what either
    selects, so that one wrong clock never deletes a checkpoint. A rule of time may thus keep twice
    as many: a checkpoint that is taken in one hour and stored in the next counts in both hours.

    Args:
        keep_last: keep this many of the newest.
        keep_within_seconds: keep those taken at most this long before the newest of the live line.
        keep_hourly: keep the newest of each hour, for this many of the newest hours that have any.
        keep_daily: the same for days.
        keep_weekly: the same for weeks.
        keep_monthly: the same for months.
        best_by: keep the best by recorded metrics.
        require_validated: drop nothing unless a validated checkpoint is kept. False: it suffices to
            keep one that restores as far as its chunks tell.

    Raises:
        SettingsError: there is no rule, or a rule has an invalid value.
    """

    keep_last: int = 0
    keep_within_seconds: float = 0.0
    keep_hourly: int = 0
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_monthly: int = 0
    best_by: tuple[BestBy, ...] = ()
    require_validated: bool = True

    def __post_init__(self) -> None:
        counts = {
            name: getattr(self, name)
            for name in ("keep_last", "keep_hourly", "keep_daily", "keep_weekly", "keep_monthly")
        }
        for name, count in counts.items():
            if type(count) is not int or not 0 <= count <= _MOST:
                _refuse(name, str(count), f"a whole number from 0 to {_MOST}")
        window_seconds = self.keep_within_seconds
        if not math.isfinite(window_seconds) or window_seconds < 0:
            _refuse("keep_within_seconds", str(window_seconds), "0 or more seconds")
        for rule in self.best_by:
            named = is_label(rule.metric) and rule.direction in ("max", "min")
            if not named or not 1 <= rule.count <= _MOST:
                _refuse("best_by", f"{rule}", "the name of a metric, max or min, and 1 or more")
        if not any(counts.values()) and not window_seconds and not self.best_by:
            _refuse("retention policy", "no rule", "at least one, or all but one would be deleted")


def _refuse(setting: str, found: str, expected: str) -> None:
    raise SettingsError(
        setting,
        found=found,
        expected=expected,
        next_step="correct the rules, for instance keep_last=10",
    )


def apply_rules(
    facts: RunFacts, policy: RetentionPolicy, there: Representations
) -> Iterator[tuple[ManifestName, str]]:
    """Yield every checkpoint that a rule keeps, with the rule; some come several times.

    The rules are applied once to the checkpoints that restore, so that damaged ones do not use up
    the number to keep; and once to all checkpoints, so that a damaged one that may be repaired is
    not dropped before its time.

    Each time the rules are applied once by the trainers' stamps, and once by the store's times of
    the manifests; the two are never mixed. A wrong stamp may take another checkpoint's place among
    the hours or days, or shift the time that "within" is measured from, and stamps alone could not
    show that. But the store's times are not affected, so whatever the rules keep by these is kept.
    Conversely, a store may change the times of objects: a run was copied to it, or an old
    checkpoint was consolidated. Then the stamps, if they are right, protect the checkpoints.
    Nothing helps if both are wrong: on a disk of the trainer's own host both come from one clock.

    A checkpoint with a time in the future takes no place by that time; it is kept in any case.
    """
    times_ms = facts.times_ms()
    live = [name for name in facts.live if name in times_ms[0]]
    good = [name for name in live if there.is_trusted(name)]
    for names in [good, live] if len(good) < len(live) else [live]:
        for at_ms in times_ms:
            past = [(name, at_ms[name]) for name in names if at_ms[name] <= facts.now_ms]
            yield from _kept(past, facts, policy)
            if policy.keep_within_seconds:
                yield from _within(past, at_ms, policy.keep_within_seconds)


def _kept(
    past: Sequence[tuple[ManifestName, int]], facts: RunFacts, policy: RetentionPolicy
) -> Iterator[tuple[ManifestName, str]]:
    """Yield what the rules of counts, periods and metrics keep of `past`.

    `past` has checkpoints with their times in ms, newest first.
    """
    for name, _ in past[: policy.keep_last]:
        yield name, f"one of the last {policy.keep_last}"
    # 1970 began on a Thursday: day -3 was a Monday.
    periods: tuple[tuple[str, int, Callable[[int], int]], ...] = (
        ("hourly", policy.keep_hourly, lambda ms: ms // _HOUR_MS),
        ("daily", policy.keep_daily, lambda ms: ms // _DAY_MS),
        ("weekly", policy.keep_weekly, lambda ms: (ms // _DAY_MS + 3) // 7),
        ("monthly", policy.keep_monthly, _month),
    )
    for word, count, period in periods:
        if count:
            yield from ((name, word) for name in _one_each(past, count, period))
    for rule in policy.best_by:
        values = facts.metrics.get(rule.metric, {})
        sign = 1.0 if rule.direction == "max" else -1.0
        measured = [name for name, _ in past if name in values]
        # The sort is stable: of two with the same value the newer one comes first.
        measured.sort(key=lambda name: -sign * values[name])
        for name in measured[: rule.count]:
            yield name, f"best by {rule.direction} {rule.metric} ({values[name]:g})"


def _one_each(
    past: Sequence[tuple[ManifestName, int]], count: int, period: Callable[[int], int]
) -> Iterator[ManifestName]:
    periods: set[int] = set()
    for name, ms in past:
        period_number = period(ms)
        if period_number in periods:
            continue
        if len(periods) == count:
            return
        periods.add(period_number)
        yield name


def _within(
    past: Sequence[tuple[ManifestName, int]], at_ms: Mapping[ManifestName, int], seconds: float
) -> Iterator[tuple[ManifestName, str]]:
    """Yield the checkpoints at most `seconds` older than the newest of the live line.

    They are not compared with the latest time of all: that may be a stamp that was ahead, of a
    checkpoint that many others have followed, or of a superseded one.
    """
    newest_ms = past[0][1] if past else 0
    for name, ms in at_ms.items():
        if ms >= newest_ms - 1000 * seconds:
            yield name, f"within {seconds:g} s of the newest"


def _month(ms: int) -> int:
    try:
        time = datetime.fromtimestamp(ms / 1000, tz=UTC)
    except (ValueError, OverflowError, OSError):
        return 12 * 10_000 + ms // (31 * _DAY_MS)  # after the year 9999
    return 12 * time.year + time.month
