"""Decides whether the next checkpoint is a full or an increment, and what it is based on.

The policies: whether the next checkpoint is a full or an increment, and what it is based on.

| policy | an increment holds the rows changed since | a full is written |
|---|---|---|
| `OneShot` | the last full | first; then as `full_every` says |
| `Intermittent` | the last full | when it pays: see `full_pays`; or as `full_every` says |
| `Consecutive` | the checkpoint before | first; then as `full_every` says |
| `Continuous` | the checkpoint before | first; then only when consolidation does not keep up |

The first three come from Check-N-Run, section 4.1. The first two write cumulative increments. A
restore of a cumulative increment needs only its full, so the increments between can be deleted.
"""

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
    "ChainLink",
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


class Sizes(NamedTuple):
    """Stored sizes of the increments on a base whose outcome is known.

    Attributes:
        number: number of increments.
        total_bytes: stored bytes of all of them.
        newest_bytes: stored bytes of the increment that was cut last.
    """

    number: int = 0
    total_bytes: int = 0
    newest_bytes: int = 0

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Self:
        """Add up the sizes of increments, in bytes, given in the order of their cuts."""
        total = cls()
        for size in sizes:
            total = total.then(size)
        return total

    def then(self, size_bytes: int) -> Self:
        """Return these sizes with one more increment, cut later than the others."""
        return type(self)(self.number + 1, self.total_bytes + size_bytes, size_bytes)


class BaseHistory:
    """Records a base and the increments cut on it, in the order of their cuts.

    Outcomes arrive later than cuts, and in any order. A checkpoint that failed leaves no trace
    here. Memory grows with the increments that wait for an outcome, not with all increments on the
    base: with `one_shot`, their number has no limit.

    Args:
        base: the checkpoint that the increments are based on.
        stored_bytes: bytes of the base's chunks, or of the consolidated full that replaces it;
            None: not known yet.
        links_to_read: number of manifests that a restore of the base reads.
    """

    def __init__(
        self, base: CheckpointRef, *, stored_bytes: int | None = None, links_to_read: int = 1
    ) -> None:
        self.base = base
        self.base_bytes = stored_bytes
        # Increments cut before the first one that waits; their outcomes no longer change.
        self._final_sizes = Sizes()
        self._final_links = links_to_read
        # The other increments, in the order of their cuts -> size and links, once known.
        self._other_links: dict[CheckpointRef, tuple[int, int] | None] = {}

    def __len__(self) -> int:
        """Number of checkpoints on this base, including the base, without those that failed."""
        return 1 + self._final_sizes.number + len(self._other_links)

    @property
    def waiting(self) -> int:
        """Number of increments that are remembered one by one."""
        return len(self._other_links)

    def cut(self, ref: CheckpointRef) -> None:
        """Record that an increment was cut; its size is not known yet."""
        self._other_links[ref] = None

    def stored(self, ref: CheckpointRef, stored_bytes: int, *, links_to_read: int) -> None:
        """Record that the base, or an increment that was cut, is committed.

        Args:
            ref: a checkpoint of this history that waits for its outcome; other refs change nothing.
            stored_bytes: bytes of its chunks.
            links_to_read: number of manifests that a restore of it read at the commit.
        """
        if ref == self.base:
            self.base_bytes = stored_bytes
            if not self._final_sizes.number:
                self._final_links = links_to_read
        elif ref in self._other_links:
            self._other_links[ref] = (stored_bytes, links_to_read)
            self._fold_outcomes()

    def lost(self, ref: CheckpointRef) -> None:
        """Record that an increment that waited for its outcome failed or was dropped."""
        self._other_links.pop(ref, None)
        self._fold_outcomes()

    @property
    def known(self) -> Sizes:
        """Sizes of the increments whose outcome is known."""
        sizes = self._final_sizes
        for outcome in self._other_links.values():
            if outcome is not None:
                sizes = sizes.then(outcome[0])
        return sizes

    @property
    def links_to_read(self) -> int:
        """Number of manifests that a restore of the chain's newest increment reads.

        It is an estimate: the manifests that a restore of the newest committed increment reads, and
        one for each increment cut after that.
        """
        links_after = 0
        for outcome in reversed(self._other_links.values()):
            if outcome is not None:
                return outcome[1] + links_after
            links_after += 1
        return self._final_links + links_after

    def _fold_outcomes(self) -> None:
        for ref, outcome in list(self._other_links.items()):
            if outcome is None:
                return
            del self._other_links[ref]
            self._final_sizes = self._final_sizes.then(outcome[0])
            self._final_links = outcome[1]


PolicyName = Literal["one_shot", "consecutive", "intermittent", "continuous"]


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Decides when a full is written and what an increment holds; base class of all policies.

    Attributes:
        name: name of the policy, as written in manifests.
        cumulative: whether an increment holds the rows changed since the last full (True) or since
            the checkpoint before (False).
        full_every: a full is written instead of an increment once the policy's count has reached
            this number; each policy says what it counts. 1: fulls only. None: no bound.
    """

    name: ClassVar[PolicyName]
    cumulative: ClassVar[bool]

    full_every: int | None = None

    def __post_init__(self) -> None:
        if self.full_every is not None or not self.cumulative:
            setting = f"{type(self).__name__}.full_every"
            keep(self, full_every=checked_whole(setting, self.full_every, 1, MAX_CHAIN_LENGTH))

    def full_is_due(self, tip: Tip, history: BaseHistory) -> bool:
        """Whether the next checkpoint must be a full.

        Args:
            tip: the checkpoint that an increment would be taken after.
            history: the checkpoints on the tip's base.
        """
        return self.full_every is not None and self._there(tip, history) >= self.full_every

    @abstractmethod
    def _there(self, tip: Tip, history: BaseHistory) -> int:
        """Return the current value of what `full_every` bounds."""


@dataclass(frozen=True, kw_only=True)
class Consecutive(Policy):
    """Writes increments with the rows changed since the checkpoint before.

    A restore reads all increments since the last full.

    Attributes:
        full_every: every n-th checkpoint is a full. 1: fulls only.
    """

    name = "consecutive"
    cumulative = False

    full_every: int = 16

    def _there(self, tip: Tip, history: BaseHistory) -> int:
        return tip.chain_length


@dataclass(frozen=True, kw_only=True)
class Continuous(Policy):
    """Writes increments like `Consecutive`, for chains that are consolidated in the background.

    It writes a full only if consolidation does not keep up.

    Attributes:
        full_every: the most manifests that a restore may read; consolidated increments count as one
            manifest. 1: fulls only.
    """

    name = "continuous"
    cumulative = False

    full_every: int = 64

    def _there(self, tip: Tip, history: BaseHistory) -> int:
        return history.links_to_read


@dataclass(frozen=True, kw_only=True)
class OneShot(Policy):
    """Writes increments with the rows changed since the last full; a restore reads two checkpoints.

    Attributes:
        full_every: the most checkpoints based on one full, including the full. 1: fulls only. None:
            no bound.
    """

    name = "one_shot"
    cumulative = True

    def _there(self, tip: Tip, history: BaseHistory) -> int:
        return len(history)


@dataclass(frozen=True, kw_only=True)
class Intermittent(Policy):
    """Writes increments like `OneShot`, and a full as soon as it costs no more than to do without.

    The costs are compared as in Check-N-Run: a full is due once the last increment is as large as
    the average checkpoint on the present full.

    Attributes:
        full_every: the most checkpoints based on one full, including the full. 1: fulls only. None:
            only the cost decides.
    """

    name = "intermittent"
    cumulative = True

    def full_is_due(self, tip: Tip, history: BaseHistory) -> bool:
        """Whether the next checkpoint must be a full.

        Args:
            tip: the checkpoint that an increment would be taken after.
            history: the checkpoints on the tip's base.
        """
        return super().full_is_due(tip, history) or full_pays(history.base_bytes, history.known)

    def _there(self, tip: Tip, history: BaseHistory) -> int:
        return len(history)


POLICIES: dict[PolicyName, type[Policy]] = {
    policy.name: policy for policy in (OneShot, Consecutive, Intermittent, Continuous)
}


def as_policy(policy: Policy | PolicyName) -> Policy:
    """Return the policy itself, or for a name, the policy of that name with its defaults.

    Raises:
        SettingsError: `policy` is neither a policy nor the name of one.
    """
    if isinstance(policy, Policy):
        return policy
    otherwise = ", or a policy such as recpoint.Consecutive(full_every=16)"
    return POLICIES[checked_choice("policy", policy, POLICIES, otherwise=otherwise)]()


def full_pays(base_bytes: int | None, increments: Sizes) -> bool:
    """Whether a full now costs no more than to go on without it (the predictor of Check-N-Run).

    After increments of sizes S_1 … S_i, in units of the full, a full is due if and only if
    1 + S_1 + … + S_i <= (i + 1)·S_i, that is, if the last increment was at least as large as the
    average checkpoint on this full. The sizes are stored bytes, so they count everything that a
    checkpoint costs, and count it exactly.

    Args:
        base_bytes: stored bytes of the full; None: not known yet, so that no full is due.
        increments: the increments whose size is known. A newest increment of unknown size may be
            left out: if it is as large as the one before, it does not change the result.
    """
    if base_bytes is None or not increments.number:
        return False
    spent = base_bytes + increments.total_bytes
    return spent <= (increments.number + 1) * increments.newest_bytes


@dataclass(frozen=True, kw_only=True)
class Tip:
    """The checkpoint that the next increment would be taken after.

    Attributes:
        ref: the checkpoint.
        base: the full of its chain.
        chain_length: number of checkpoints in its chain, from the full to `ref`.
        tables: specs of the tables that it holds.
    """

    ref: CheckpointRef
    base: CheckpointRef
    chain_length: int
    tables: tuple[TableSpec, ...]


@dataclass(frozen=True, kw_only=True)
class ChainLink:
    """The place of a checkpoint in its chain.

    Attributes:
        kind: full or increment.
        base: the full of the chain; None: this is the full.
        parent: the checkpoint that it was taken after; None: this is a full.
        chain_length: number of checkpoints from the full to this one.
    """

    kind: Kind
    base: CheckpointRef | None
    parent: CheckpointRef | None
    chain_length: int

    def tip(
        self, ref: CheckpointRef, tables: Sequence[TableSpec], *, before: Tip | None, policy: Policy
    ) -> Tip:
        """Return the tip of the chain after a checkpoint at this link.

        Args:
            ref: the checkpoint.
            tables: specs of the tables that it holds.
            before: the tip that it was cut after.
            policy: the policy of the next checkpoints. Cumulative increments are all taken after
                the same checkpoint.
        """
        if self.kind == "increment" and policy.cumulative and before is not None:
            return before
        return Tip(
            ref=ref,
            base=self.base or ref,
            chain_length=self.chain_length,
            tables=tuple(tables),
        )


FULL = ChainLink(kind="full", base=None, parent=None, chain_length=1)


def next_link(
    tip: Tip | None,
    history: BaseHistory | None,
    *,
    step: int,
    tables: Sequence[TableSpec],
    policy: Policy,
) -> ChainLink:
    """Return the link of a checkpoint at `step` with these tables.

    Args:
        tip: the tip of the chain; None: there is no chain to extend, because nothing was restored
            or the chain broke.
        history: the checkpoints on the tip's base; None only without a tip.
        step: batches done.
        tables: specs of the tables to store; if tables or row states differ from the tip's, a full
            is needed.
        policy: decides between full and increment if both are possible.
    """
    if tip is None or history is None or tip.tables != tuple(tables):
        return FULL
    if tip.ref.step >= step or tip.chain_length >= MAX_CHAIN_LENGTH:
        # Steps ascend in a chain, so a step that was restored needs a new chain to be stored again.
        return FULL
    if policy.full_is_due(tip, history):
        return FULL
    return ChainLink(
        kind="increment", base=tip.base, parent=tip.ref, chain_length=tip.chain_length + 1
    )


def _error_class(error_type: str) -> type | None:
    error_class = getattr(recpoint.errors, error_type, None)
    return error_class if isinstance(error_class, type) else None


def breaks_chain(error_type: str) -> bool:
    """Whether after a rejection with this error, later increments of the chain fail too.

    A FormatError may concern the parent's manifest. That manifest stays damaged, so all increments
    after it would be rejected. If the error concerns the slot instead, the only cost is the bytes
    of the full that is written.

    Args:
        error_type: name of an error class in `recpoint.errors`.
    """
    error_class = _error_class(error_type)
    return error_class is not None and issubclass(
        error_class, ChainError | CommitError | FormatError
    )


def superseded(error_type: str) -> bool:
    """Whether a rejection with this error means that another trainer owns the run now."""
    error_class = _error_class(error_type)
    return error_class is not None and issubclass(error_class, StaleWriter)
