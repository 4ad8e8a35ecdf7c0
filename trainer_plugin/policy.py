"""Decides what the next checkpoint is: a full, or an increment on which other one. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import recpoint.errors
from recpoint.errors import ChainError, CommitError, FormatError, StaleWriter
from recpoint.format.manifest import MAX_CHAIN_LENGTH, Kind, TableSpec
from recpoint.format.records import CheckpointRef
from recpoint.trainer_plugin.setting_checks import checked_choice, checked_whole, keep

__all__ = [
    "BaseHistory",
    "Consecutive",
    "Continuous",
    "FULL",
    "Intermittent",
    "Link",
    "OneShot",
    "POLICIES",
    "Policy",
    "PolicyName",
    "Sizes",
    "Tip",
    "as_policy",
    "breaks_chain",
    "full_pays",
    "next_link",
    "superseded",
]


# The checkpoints on one base, and their sizes as stored: what a policy decides by. Pure.


class Sizes(NamedTuple):
    """Bytes as stored of the increments on a base whose outcome is known."""

    number: int = 0
    total_bytes: int = 0
    newest_bytes: int = 0  # of the one that was cut last

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Self:
        """Of increments in the order of their cuts."""
        found = cls()
        for size in sizes:
            found = found.then(size)
        return found

    def then(self, size_bytes: int) -> Self:
        """With one more, cut later than these."""
        return type(self)(self.number + 1, self.total_bytes + size_bytes, size_bytes)


class BaseHistory:
    """A base and the increments cut on it, in that order.

    Outcomes arrive later than cuts, and in any order. What came to nothing leaves no trace. Memory
    follows the increments that wait for an outcome, not those on the base: with `one_shot` there is
    no end of these.

    Args:
        base: what the increments stand on.
        stored_bytes: bytes of its chunks, or of the full that stands for it; None: not known yet.
        links_to_read: manifests that a restore of the base reads.
    """

    def __init__(
        self, base: CheckpointRef, *, stored_bytes: int | None = None, links_to_read: int = 1
    ) -> None:
        self.base = base
        self.base_bytes = stored_bytes
        # Of all that were cut before the first that waits; their outcomes do not change any more.
        self._settled = Sizes()
        self._settled_links = links_to_read
        # In the order of the cuts; size and links once they are known.
        self._others: dict[CheckpointRef, tuple[int, int] | None] = {}

    def __len__(self) -> int:
        """Checkpoints on this base, itself counted, but for those that came to nothing."""
        return 1 + self._settled.number + len(self._others)

    @property
    def waiting(self) -> int:
        """Increments that are remembered one by one."""
        return len(self._others)

    def cut(self, ref: CheckpointRef) -> None:
        """An increment was cut; its size is not known yet."""
        self._others[ref] = None

    def stored(self, ref: CheckpointRef, stored_bytes: int, *, links_to_read: int) -> None:
        """The base, or an increment that was cut, is committed.

        Args:
            ref: one of this history that waits for its outcome; others change nothing.
            stored_bytes: bytes of its chunks.
            links_to_read: manifests that a restore of it read when it was committed.
        """
        if ref == self.base:
            self.base_bytes = stored_bytes
            if not self._settled.number:
                self._settled_links = links_to_read
        elif ref in self._others:
            self._others[ref] = (stored_bytes, links_to_read)
            self._fold_outcomes()

    def lost(self, ref: CheckpointRef) -> None:
        """An increment that waited for its outcome came to nothing."""
        self._others.pop(ref, None)
        self._fold_outcomes()

    @property
    def known(self) -> Sizes:
        """Of the increments whose outcome is known."""
        found = self._settled
        for outcome in self._others.values():
            if outcome is not None:
                found = found.then(outcome[0])
        return found

    @property
    def links_to_read(self) -> int:
        """Manifests that a restore of the newest increment of a chain reads, as far as is known.

        Those that its newest committed one needs, and one for each that was cut after it.
        """
        after = 0
        for outcome in reversed(self._others.values()):
            if outcome is not None:
                return outcome[1] + after
            after += 1
        return self._settled_links + after

    def _fold_outcomes(self) -> None:
        for ref, outcome in list(self._others.items()):
            if outcome is None:
                return
            del self._others[ref]
            self._settled = self._settled.then(outcome[0])
            self._settled_links = outcome[1]


# What the next checkpoint is: a full, or an increment on which other one. Pure decisions.
#
# | policy | an increment holds the rows changed since | a full is written |
# |---|---|---|
# | `OneShot` | the last full | first; then as `full_every` says |
# | `Intermittent` | the last full | when it pays: see `full_pays`; or as `full_every` says |
# | `Consecutive` | the checkpoint before | first; then as `full_every` says |
# | `Continuous` | the checkpoint before | first; then only when consolidation does not keep up |
#
# The first three are those of Check-N-Run, section 4.1. A cumulative increment (the first two)
# needs its full alone to be restored, so that those between the two can be deleted.


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
