"""Decides which checkpoints are kept, and which manifests those need: a pure plan from rules."""

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


# Rules of retention: which checkpoints are worth keeping (format §6.6, plan; §6.7).


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
    """What to keep; a checkpoint is kept if any rule keeps it. Pinned ones always are.

    Only checkpoints of the live line are counted; `keep_within_seconds` also keeps superseded
    ones. Hours, days, weeks (from Monday) and months are those of UTC. Times are those that
    trainers stamped, and those that the store gave the manifests: what a rule keeps by either of
    the two is kept, so that one wrong clock never deletes. So a rule of time may keep twice as
    many: what is taken in one hour and stored in the next is of another hour on each clock.

    Args:
        keep_last: the newest so many.
        keep_within_seconds: those taken at most so long before the newest of the live line.
        keep_hourly: the newest one of each of the newest so many hours that have any.
        keep_daily: the same for days.
        keep_weekly: the same for weeks.
        keep_monthly: the same for months.
        best_by: the best by metrics that were recorded.
        require_validated: drop nothing unless a validated checkpoint is kept. False: it is enough
            that one is kept which restores as far as its chunks tell.

    Raises:
        SettingsError: no rule at all, or one that cannot be.
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
            _refuse("retention policy", "no rule", "at least one: else all but one would go")


def _refuse(setting: str, found: str, expected: str) -> None:
    raise SettingsError(
        setting, found=found, expected=expected, next_step="give it, for instance keep_last=10"
    )


def apply_rules(
    facts: RunFacts, policy: RetentionPolicy, there: Representations
) -> Iterator[tuple[ManifestName, str]]:
    """Every checkpoint that a rule keeps, with the rule; some come several times.

    The rules are applied to what restores, so that damage does not use up what was to be kept; and
    to everything, so that what may be repaired is not dropped before its time.

    Both by the times that trainers stamped, and again by those that the store gave the manifests;
    the two are never mixed. A stamp that is wrong may take another checkpoint's place among the
    hours or days, or move what "within" is measured from, and no rule that goes by stamps alone
    could tell: ten days back looks like ten days before. But it moves nothing in the store's
    times, so that, however many stamps are wrong and whichever way, what those keep is kept. In
    the same way nothing is lost to a store that gives all objects a new time, as one does that a
    run was copied to, or tells when an old checkpoint was consolidated, as long as the stamps are
    right. Nobody can tell if both are wrong: on a disk of the trainer's own host both are of one
    clock.

    What is from the future by either of the two takes no place by that one; it is kept anyway.
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
    """What counts and times keep of `past`: checkpoints and their times, newest first."""
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
        # Stable: of two with one value the newer one comes first.
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
    """What is not much older than the newest of the live line: not than the latest time there is.

    That may be a stamp that was ahead when it was made, of a checkpoint that has long been followed
    by others, or of a superseded one.
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


# Which checkpoints are kept, and which manifests those need: a pure plan (format §6.6).


class Decision(NamedTuple):
    """What becomes of one manifest, and why."""

    manifest: StoredManifest
    action: Literal["keep", "drop"]
    reason: str


@dataclass(frozen=True, kw_only=True)
class RetentionPlan:
    """What is kept and what is not, newest first.

    Attributes:
        policy: the rules.
        decisions: one for each manifest.
        kept: the checkpoints worth keeping, with the reasons; what only their chains need is
            not in it.
    """

    policy: RetentionPolicy
    decisions: tuple[Decision, ...]
    kept: Mapping[ManifestName, str]

    @property
    def dropped(self) -> tuple[Decision, ...]:
        """Manifests that nothing needs, newest first: the order in which they may go."""
        return tuple(decision for decision in self.decisions if decision.action == "drop")

    @property
    def dropped_bytes(self) -> int:
        """Bytes of the chunks of what is dropped."""
        return sum(decision.manifest.stored_bytes for decision in self.dropped)


def plan(facts: RunFacts, policy: RetentionPolicy) -> RetentionPlan:
    """Decide for every manifest; reads nothing, writes nothing, and asks no clock.

    Raises:
        RetentionRefused: a manifest cannot be read; or something would be dropped although nothing
            validated (if that is enough for the policy: nothing that restores) would be kept, or
            although a rule goes by a metric that was recorded of no checkpoint of the live line.
    """
    if facts.unreadable:
        raise RetentionRefused(
            facts.unreadable[0],
            found=f"a manifest that cannot be read ({len(facts.unreadable)} in all)",
            expected="all manifests readable: what this one needs is not known",
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
    """Which of `doomed`, keys of manifests, something else still needs, and what.

    This is the second look of a retention (format §6.6, look again).

    No rule is asked: what counts is every manifest that is not doomed, pins, leases and the
    newest checkpoint of the live line.
    """
    there = Representations(facts.manifests, facts.verdicts)
    own = [manifest for manifest in facts.manifests if manifest.key not in doomed]
    wanted = {manifest.name: f"{manifest.key} is there" for manifest in own}
    wanted |= _forced(facts, there)
    needed = _needed(there, wanted, _in_all_forms(facts))
    for manifest in own:
        # Its own chain too, and not only that of the form that a reader prefers.
        for name in there.before(manifest):
            there.mark_chain(name, f"{manifest.key} needs it", needed)
    return {key: reason for key, reason in needed.items() if key in doomed}


def _forced(facts: RunFacts, there: Representations) -> dict[ManifestName, str]:
    """What is kept whatever the rules say."""
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
            # What has made them superseded may be the loss alone: a person decides.
            keep(manifest.name, f"{GENERATION_KEY.of(manifest.name.generation)} is lost")
    return {name: ", ".join(dict.fromkeys(reasons)) for name, reasons in forced.items()}


def _in_all_forms(facts: RunFacts) -> set[ManifestName]:
    """Checkpoints of which every manifest is needed.

    A staged increment names the newest checkpoint, or one of its chain, by the form that its
    trainer knows; and nobody knows which form the holder of a lease reads.
    """
    return {*facts.live[:1], *facts.leased}


def _needed(
    there: Representations, kept: Mapping[ManifestName, str], in_all_forms: set[ManifestName]
) -> dict[str, str]:
    """Keys of manifests that `kept` needs, each with the reason."""
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
            # Most likely another name was meant, and what that one would keep is to go.
            raise RetentionRefused(
                "retention",
                found=f"no checkpoint of the live line with a metric called {rule.metric!r}",
                expected="one at least: the rule keeps nothing as it is",
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
    """Sorts manifests as they may go: newest first, of one checkpoint the outlasting form last.

    So whatever is left of a checkpoint, when deleting is killed, restores it as all of it did.
    """

    def order(manifest: StoredManifest) -> tuple[int, int, bool, str]:
        step, generation = manifest.name
        return -step, -generation, manifest == there.outlasting(manifest.name), manifest.key

    return order
