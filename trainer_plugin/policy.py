"""What the next checkpoint is: a full, or an increment on which other one. Pure decisions.

| policy | an increment holds the rows changed since | a full is written |
|---|---|---|
| `OneShot` | the last full | first; then as `full_every` says |
| `Intermittent` | the last full | when it pays: see `full_pays`; or as `full_every` says |
| `Consecutive` | the checkpoint before | first; then as `full_every` says |
| `Continuous` | the checkpoint before | first; then only when consolidation does not keep up |

The first three are those of Check-N-Run, section 4.1. A cumulative increment (the first two) needs
its full alone to be restored, so that those between the two can be deleted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import recpoint.errors
from recpoint.errors import ChainError, CommitError, FormatError, StaleWriter
from recpoint.format.manifest import MAX_CHAIN_LENGTH, Kind, TableSpec
from recpoint.format.records import CheckpointRef
from recpoint.trainer_plugin.base_history import BaseHistory, Sizes
from recpoint.trainer_plugin.setting_checks import checked_choice, checked_whole, keep

__all__ = [
    "FULL",
    "POLICIES",
    "Consecutive",
    "Continuous",
    "Intermittent",
    "Link",
    "OneShot",
    "Policy",
    "PolicyName",
    "Tip",
    "as_policy",
    "breaks_chain",
    "full_pays",
    "next_link",
    "superseded",
]

PolicyName = Literal["one_shot", "consecutive", "intermittent", "continuous"]


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """When fulls are written, and what increments hold: what all policies have in common.

    Attributes:
        name: of the policy, as manifests have it.
        cumulative: whether an increment holds what changed since the full, not since the checkpoint
            before.
        full_every: a full takes the place of an increment that would be one too many; each policy
            says what it counts. 1: fulls only. None: no bound.
    """

    name: ClassVar[PolicyName]
    cumulative: ClassVar[bool]

    full_every: int | None = None

    def __post_init__(self) -> None:
        if self.full_every is not None or not self.cumulative:
            setting = f"{type(self).__name__}.full_every"
            keep(self, full_every=checked_whole(setting, self.full_every, 1, MAX_CHAIN_LENGTH))

    def full_is_due(self, tip: Tip, history: BaseHistory) -> bool:
        """Whether the next checkpoint is to be a full, with `tip` and all of `history` there."""
        return self.full_every is not None and self._there(tip, history) >= self.full_every

    @abstractmethod
    def _there(self, tip: Tip, history: BaseHistory) -> int:
        """What `full_every` counts, as far as it is there."""


@dataclass(frozen=True, kw_only=True)
class Consecutive(Policy):
    """Increments hold the rows changed since the checkpoint before; a restore reads all of them.

    Attributes:
        full_every: checkpoints from one full to the next: each n-th is a full. 1: fulls only.
    """

    name = "consecutive"
    cumulative = False

    full_every: int = 16

    def _there(self, tip: Tip, history: BaseHistory) -> int:
        return tip.chain_length


@dataclass(frozen=True, kw_only=True)
class Continuous(Policy):
    """As `Consecutive`, for chains that are consolidated in the background: a full is written only
    where that does not keep up.

    Attributes:
        full_every: most manifests that a restore reads, consolidated ones counted as what they are.
            1: fulls only.
    """

    name = "continuous"
    cumulative = False

    full_every: int = 64

    def _there(self, tip: Tip, history: BaseHistory) -> int:
        return history.links_to_read


@dataclass(frozen=True, kw_only=True)
class OneShot(Policy):
    """Increments hold the rows changed since the last full; a restore reads two checkpoints.

    Attributes:
        full_every: most checkpoints that stand on one full, itself counted. 1: fulls only. None: no
            bound.
    """

    name = "one_shot"
    cumulative = True

    def _there(self, tip: Tip, history: BaseHistory) -> int:
        return len(history)


@dataclass(frozen=True, kw_only=True)
class Intermittent(Policy):
    """As `OneShot`, and a full whenever one costs less than going on without: see `full_pays`.

    Attributes:
        full_every: most checkpoints that stand on one full, itself counted. 1: fulls only. None: no
            bound but what pays.
    """

    name = "intermittent"
    cumulative = True

    def full_is_due(self, tip: Tip, history: BaseHistory) -> bool:
        """Whether the next checkpoint is to be a full, with `tip` and all of `history` there."""
        return super().full_is_due(tip, history) or full_pays(history.base_bytes, history.known)

    def _there(self, tip: Tip, history: BaseHistory) -> int:
        return len(history)


POLICIES: dict[PolicyName, type[Policy]] = {
    policy.name: policy for policy in (OneShot, Consecutive, Intermittent, Continuous)
}


def as_policy(policy: Policy | PolicyName) -> Policy:
    """The policy itself; of a name, the policy with its own defaults.

    Raises:
        SettingsError: it is neither.
    """
    if isinstance(policy, Policy):
        return policy
    otherwise = ", or a policy such as recpoint.Consecutive(full_every=16)"
    return POLICIES[checked_choice("policy", policy, POLICIES, otherwise=otherwise)]()


def full_pays(base_bytes: int | None, increments: Sizes) -> bool:
    """The predictor of Check-N-Run: whether a full now costs no more than going on without it.

    After increments S_1 … S_i, in units of the full, it is due iff 1 + S_1 + … + S_i <=
    (i + 1)·S_i: the last increment was as large as a checkpoint of this full was on average. In
    bytes as stored, so that all that a checkpoint costs is counted, and exactly.

    Args:
        base_bytes: the full's; None: not known yet, then nothing is due.
        increments: those whose size is known. A newest one that is not known yet may be
            left out: taken to be as large as the one before, it changes neither side's order.
    """
    if base_bytes is None or not increments.number:
        return False
    spent = base_bytes + increments.total_bytes
    return spent <= (increments.number + 1) * increments.newest_bytes


@dataclass(frozen=True, kw_only=True)
class Tip:
    """The checkpoint that the next increment would be taken after."""

    ref: CheckpointRef
    base: CheckpointRef
    chain_length: int
    tables: tuple[TableSpec, ...]


@dataclass(frozen=True, kw_only=True)
class Link:
    """Where a checkpoint stands in its chain."""

    kind: Kind
    base: CheckpointRef | None
    parent: CheckpointRef | None
    chain_length: int

    def tip(
        self, ref: CheckpointRef, tables: Sequence[TableSpec], *, before: Tip | None, policy: Policy
    ) -> Tip:
        """The tip of the chain once a checkpoint `ref` stands at this link.

        Args:
            ref: the checkpoint.
            tables: what it holds.
            before: the tip that it was cut after.
            policy: of the next ones: cumulative increments are all taken after one and the same.
        """
        if self.kind == "increment" and policy.cumulative and before is not None:
            return before
        return Tip(
            ref=ref,
            base=self.base or ref,
            chain_length=self.chain_length,
            tables=tuple(tables),
        )


FULL = Link(kind="full", base=None, parent=None, chain_length=1)


def next_link(
    tip: Tip | None,
    history: BaseHistory | None,
    *,
    step: int,
    tables: Sequence[TableSpec],
    policy: Policy,
) -> Link:
    """The link of a checkpoint at `step` with these tables.

    Args:
        tip: None when there is nothing to build on: nothing was restored, or the chain broke.
        history: of what stands on the tip's base; None only without a tip.
        step: batches done.
        tables: what would be stored; other tables or row states than the tip's need a full.
        policy: what decides between full and increment where both are possible.
    """
    if tip is None or history is None or tip.tables != tuple(tables):
        return FULL
    if tip.ref.step >= step or tip.chain_length >= MAX_CHAIN_LENGTH:
        # A restored step can be checkpointed again only as a chain of its own: steps ascend.
        return FULL
    if policy.full_is_due(tip, history):
        return FULL
    return Link(kind="increment", base=tip.base, parent=tip.ref, chain_length=tip.chain_length + 1)


def _error_class(error_type: str) -> type | None:
    found = getattr(recpoint.errors, error_type, None)
    return found if isinstance(found, type) else None


def breaks_chain(error_type: str) -> bool:
    """Whether a rejection of this class means that later increments cannot join up either.

    A FormatError may be about the parent's manifest, which then stays damaged: increments after it
    would be rejected for ever. If it is about the slot, the full costs no more than its bytes.
    """
    found = _error_class(error_type)
    return found is not None and issubclass(found, ChainError | CommitError | FormatError)


def superseded(error_type: str) -> bool:
    """Whether a rejection of this class means that another trainer owns the run now."""
    found = _error_class(error_type)
    return found is not None and issubclass(found, StaleWriter)
