"""Decides by rules which checkpoints are kept, and which manifests they need; does no I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from recpoint.catalog.run.pins import pinned_text
from recpoint.catalog.run.representations import Representations, RunFacts, StoredManifest
from recpoint.errors import NothingValidated, RetentionRefused, SettingsError
from recpoint.format.naming import GENERATION_KEY, ManifestName, is_label

__all__ = [
    "BestBy",
    "Decision",
    "RetentionPlan",
    "RetentionPolicy",
    "deletion_order",
    "needed_manifests",
    "plan",
]


# Applies the rules of a retention: which checkpoints are worth keeping (format §6.6, plan; §6.7).


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
        within = self.keep_within_seconds
        if not math.isfinite(within) or within < 0:
            _refuse("keep_within_seconds", str(within), "0 or more seconds")
        for rule in self.best_by:
            named = is_label(rule.metric) and rule.direction in ("max", "min")
            if not named or not 1 <= rule.count <= _MOST:
                _refuse("best_by", f"{rule}", "the name of a metric, max or min, and 1 or more")
        if not any(counts.values()) and not within and not self.best_by:
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
    seen: set[int] = set()
    for name, ms in past:
        at = period(ms)
        if at in seen:
            continue
        if len(seen) == count:
            return
        seen.add(at)
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
        when = datetime.fromtimestamp(ms / 1000, tz=UTC)
    except (ValueError, OverflowError, OSError):
        return 12 * 10_000 + ms // (31 * _DAY_MS)  # after the year 9999
    return 12 * when.year + when.month


# Plans which checkpoints are kept, and which manifests they need, without I/O (format §6.6).


class Decision(NamedTuple):
    """Whether one manifest is kept or dropped, and why."""

    manifest: StoredManifest
    action: Literal["keep", "drop"]
    reason: str


@dataclass(frozen=True, kw_only=True)
class RetentionPlan:
    """The manifests to keep and to drop, newest first.

    Attributes:
        policy: the rules.
        decisions: one for each manifest.
        kept: the checkpoints worth keeping, with the reasons; checkpoints that only their chains
            need are not in it.
    """

    policy: RetentionPolicy
    decisions: tuple[Decision, ...]
    kept: Mapping[ManifestName, str]

    @property
    def dropped(self) -> tuple[Decision, ...]:
        """Manifests that nothing needs, newest first, in the order in which to delete them."""
        return tuple(decision for decision in self.decisions if decision.action == "drop")

    @property
    def dropped_bytes(self) -> int:
        """Bytes of the chunks of the dropped manifests."""
        return sum(decision.manifest.stored_bytes for decision in self.dropped)


def plan(facts: RunFacts, policy: RetentionPolicy) -> RetentionPlan:
    """Decide for every manifest; reads nothing, writes nothing, and asks no clock.

    Raises:
        RetentionRefused: a manifest cannot be read; or something would be dropped, but no
            checkpoint would be kept that restores, or a rule's metric was recorded for no
            checkpoint of the live line.
        NothingValidated: something would be dropped, but no validated checkpoint would be kept,
            and the policy requires one.
    """
    if facts.unreadable:
        raise RetentionRefused(
            facts.unreadable[0],
            found=f"a manifest that cannot be read ({len(facts.unreadable)} in all)",
            expected="all manifests readable, because it is not known what this one needs",
            next_step="recpoint check URL; put it back from a backup, or remove it by hand",
        )
    there = Representations(facts.manifests, facts.verdicts)
    forced = _forced(facts, there)
    reasons = {name: [reason] for name, reason in forced.items()}
    for name, reason in apply_rules(facts, policy, there):
        reasons.setdefault(name, []).append(reason)
    kept = {name: ", ".join(dict.fromkeys(given)) for name, given in reasons.items()}
    needed = _needed(there, kept, _in_all_forms(facts))
    _refuse_to_keep_nothing(facts, policy, there, kept, needed)
    live = frozenset(facts.live)
    decisions = []
    for manifest in sorted(facts.manifests, key=deletion_order(there)):
        why = needed.get(manifest.key)
        if why is None:
            decisions.append(Decision(manifest, "drop", _why_dropped(manifest, live, kept, there)))
        else:
            decisions.append(Decision(manifest, "keep", why))
    return RetentionPlan(policy=policy, decisions=tuple(decisions), kept=kept)


def needed_manifests(facts: RunFacts, doomed: frozenset[str]) -> dict[str, str]:
    """Return which of the manifests `doomed` (keys) are still needed, each with the reason.

    This is the second look of a retention (format §6.6, look again).

    It applies no rule. A manifest is needed by every manifest that is not doomed, by pins and
    leases, and by the newest checkpoint of the live line.
    """
    there = Representations(facts.manifests, facts.verdicts)
    own = [manifest for manifest in facts.manifests if manifest.key not in doomed]
    wanted = {manifest.name: f"{manifest.key} is there" for manifest in own}
    wanted |= _forced(facts, there)
    needed = _needed(there, wanted, _in_all_forms(facts))
    for manifest in own:
        # Marks this manifest's own chain, too, not only that of the form that a reader prefers.
        for name in there.before(manifest):
            there.mark_chain(name, f"{manifest.key} needs it", needed)
    return {key: reason for key, reason in needed.items() if key in doomed}


def _forced(facts: RunFacts, there: Representations) -> dict[ManifestName, str]:
    """Return the checkpoints that are kept regardless of the rules, with the reasons."""
    forced: dict[ManifestName, list[str]] = {}

    def keep(name: ManifestName | None, reason: str) -> None:
        if name is not None and there.of(name):
            forced.setdefault(name, []).append(reason)

    good = [name for name in facts.live if there.is_trusted(name)]
    keep(facts.live[0] if facts.live else None, "newest")
    keep(next(iter(good), None), "newest that restores")
    validated = (name for name in good if there.is_validated(name))
    keep(next(validated, None), "newest validated")
    for name, pins in facts.pins.items():
        keep(name, pinned_text(pins))
    for name, who in facts.leased.items():
        keep(name, f"leased ({who})")
    for times_ms in facts.times_ms():
        for name, ms in times_ms.items():
            if ms > facts.now_ms:
                keep(name, "its time is in the future")
    for manifest in facts.manifests:
        if manifest.name.generation in facts.lost:
            # It may look superseded only because the record is lost; a person has to decide.
            keep(manifest.name, f"{GENERATION_KEY.of(manifest.name.generation)} is lost")
    return {name: ", ".join(dict.fromkeys(reasons)) for name, reasons in forced.items()}


def _in_all_forms(facts: RunFacts) -> set[ManifestName]:
    """Return the checkpoints of which every manifest is needed.

    A staged increment refers to the form of the newest checkpoint that its trainer knows; and it is
    not known which form the holder of a lease reads.
    """
    return {*facts.live[:1], *facts.leased}


def _needed(
    there: Representations, kept: Mapping[ManifestName, str], in_all_forms: set[ManifestName]
) -> dict[str, str]:
    """Return the keys of the manifests that `kept` needs, each with the reason."""
    needed: dict[str, str] = {}
    for name in sorted(kept, reverse=True):
        for manifest in there.of(name) if name in in_all_forms else there.needed_forms(name):
            needed[manifest.key] = kept[name]
    for name in sorted(kept, reverse=True):
        for manifest in there.of(name) if name in in_all_forms else there.needed_forms(name):
            for before in there.before(manifest):
                there.mark_chain(before, f"the chain of {name} needs it", needed)
    return needed


def _refuse_to_keep_nothing(
    facts: RunFacts,
    policy: RetentionPolicy,
    there: Representations,
    kept: Mapping[ManifestName, str],
    needed: Mapping[str, str],
) -> None:
    if all(manifest.key in needed for manifest in facts.manifests):
        return
    good = [name for name in facts.live if name in kept and there.is_trusted(name)]
    if not good:
        raise RetentionRefused(
            "retention",
            found="no checkpoint of the live line that restores, among those it would keep",
            expected="at least one before anything is deleted",
            next_step="wait for the trainer's next checkpoint; recpoint check URL",
        )
    if policy.require_validated and not any(there.is_validated(name) for name in good):
        raise NothingValidated(
            "retention",
            found="no validated checkpoint among those it would keep",
            expected="at least one before anything is deleted",
            next_step="recpoint validate URL; or let it delete without: --no-require-validated, "
            "require_validated: false",
        )
    for rule in policy.best_by:
        if facts.metrics.get(rule.metric, {}).keys().isdisjoint(facts.live):
            # The name is probably wrong, and the checkpoints of the right metric would be dropped.
            raise RetentionRefused(
                "retention",
                found=f"no checkpoint of the live line with a metric called {rule.metric!r}",
                expected="at least one; without it the rule keeps nothing",
                next_step=f"correct the name; recpoint metric URL STEP {rule.metric}=VALUE; "
                "or leave the rule out",
            )


def _why_dropped(
    manifest: StoredManifest,
    live: frozenset[ManifestName],
    kept: Mapping[ManifestName, str],
    there: Representations,
) -> str:
    if manifest.name in kept:
        best = there.best(manifest.name)
        return f"{best.key if best else 'nothing'} restores the same checkpoint"
    if manifest.name not in live:
        return "superseded, and no rule keeps it"
    return "no rule keeps it, no kept chain needs it"


def deletion_order(
    there: Representations,
) -> Callable[[StoredManifest], tuple[int, int, bool, str]]:
    """Return a sort key for deletions: newest first; of one checkpoint the outlasting form last.

    In this order, if the deletion is killed, the remaining manifests of a checkpoint restore it.
    """

    def order(manifest: StoredManifest) -> tuple[int, int, bool, str]:
        step, generation = manifest.name
        return -step, -generation, manifest == there.outlasting(manifest.name), manifest.key

    return order
