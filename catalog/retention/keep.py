"""Plans which checkpoints are kept, and which manifests they need, without I/O (format §6.6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from recpoint.catalog.retention.rules import RetentionPolicy, apply_rules
from recpoint.catalog.run.pins import pinned_text
from recpoint.catalog.run.representations import Representations, RunFacts, StoredManifest
from recpoint.errors import NothingValidated, RetentionRefused
from recpoint.format.naming import GENERATION_KEY, ManifestName

__all__ = [
    "Decision",
    "RetentionPlan",
    "deletion_order",
    "needed_manifests",
    "plan",
]


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
    stored = Representations(facts.manifests, facts.verdicts)
    forced = _forced(facts, stored)
    reasons = {name: [reason] for name, reason in forced.items()}
    for name, reason in apply_rules(facts, policy, stored):
        reasons.setdefault(name, []).append(reason)
    kept_names = {
        name: ", ".join(dict.fromkeys(given_reasons)) for name, given_reasons in reasons.items()
    }
    needed = _needed(stored, kept_names, _in_all_forms(facts))
    _refuse_to_keep_nothing(facts, policy, stored, kept_names, needed)
    live = frozenset(facts.live)
    decisions = []
    for manifest in sorted(facts.manifests, key=deletion_order(stored)):
        needed_by = needed.get(manifest.key)
        if needed_by is None:
            decisions.append(
                Decision(manifest, "drop", _why_dropped(manifest, live, kept_names, stored))
            )
        else:
            decisions.append(Decision(manifest, "keep", needed_by))
    return RetentionPlan(policy=policy, decisions=tuple(decisions), kept=kept_names)


def needed_manifests(facts: RunFacts, doomed: frozenset[str]) -> dict[str, str]:
    """Return which of the manifests `doomed` (keys) are still needed, each with the reason.

    This is the second look of a retention (format §6.6, look again).

    It applies no rule. A manifest is needed by every manifest that is not doomed, by pins and
    leases, and by the newest checkpoint of the live line.
    """
    stored = Representations(facts.manifests, facts.verdicts)
    own_manifests = [manifest for manifest in facts.manifests if manifest.key not in doomed]
    wanted_names = {manifest.name: f"{manifest.key} is there" for manifest in own_manifests}
    wanted_names |= _forced(facts, stored)
    needed = _needed(stored, wanted_names, _in_all_forms(facts))
    for manifest in own_manifests:
        # Marks this manifest's own chain, too, not only that of the form that a reader prefers.
        for name in stored.before(manifest):
            stored.mark_chain(name, f"{manifest.key} needs it", needed)
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
    for name, reader in facts.leased.items():
        keep(name, f"leased ({reader})")
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
            for parent in there.before(manifest):
                there.mark_chain(parent, f"the chain of {name} needs it", needed)
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
