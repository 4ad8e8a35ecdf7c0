"""What the next checkpoint is: a full, or an increment on which other one. Pure decisions.

| policy | an increment holds the rows changed since | a full is written |
|---|---|---|
| `one_shot` | the last full | first; then as `full_every` says |
| `intermittent` | the last full | when it pays: see `full_pays`; or as `full_every` says |
| `consecutive` | the checkpoint before | first; then as `full_every` says |
| `continuous` | the checkpoint before | first; then only when consolidation does not keep up |

The first three are those of Check-N-Run, section 4.1. A cumulative increment (the first two) needs
its full alone to be restored, so that those between the two can be deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import recpoint.errors
from recpoint.errors import ChainError, CommitError, FormatError, StaleWriter
from recpoint.format.manifest import MAX_CHAIN_LENGTH, Kind, TableSpec
from recpoint.format.records import CheckpointRef
from recpoint.trainer_plugin.base_history import BaseHistory, Sizes

__all__ = [
    "DEFAULT_FULL_EVERY",
    "FULL",
    "POLICIES",
    "Link",
    "Policy",
    "PolicyName",
    "Tip",
    "breaks_chain",
    "full_pays",
    "next_link",
    "superseded",
]

PolicyName = Literal["one_shot", "consecutive", "intermittent", "continuous"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

#: `full_every` where it is not given; None: no bound.
DEFAULT_FULL_EVERY: dict[PolicyName, int | None] = {
    "one_shot": None,
    "consecutive": 16,
    "intermittent": None,
    "continuous": 64,
}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When fulls are written, and what increments hold.

    Attributes:
        name: the policy.
        full_every: a full instead of an increment that would be one too many; None: as
            `DEFAULT_FULL_EVERY` says; 1: fulls only. For `consecutive` it is the checkpoints of a
            chain, so that each n-th is a full; for `one_shot` and `intermittent` those that stand
            on one full, itself counted; for `continuous` the manifests that a restore would read,
            consolidated ones counted as what they are.
    """

    name: PolicyName
    full_every: int | None = None

    @property
    def cumulative(self) -> bool:
        """Whether an increment holds what changed since the full, not since the one before."""
        return self.name in ("one_shot", "intermittent")

    def full_is_due(self, tip: Tip, history: BaseHistory) -> bool:
        """Whether the next checkpoint is to be a full, with `tip` and all of `history` there."""
        limit = DEFAULT_FULL_EVERY[self.name] if self.full_every is None else self.full_every
        if limit is not None:
            if self.cumulative:
                there = len(history)
            elif self.name == "continuous":
                there = history.links_to_read
            else:
                there = tip.chain_length
            if there >= limit:
                return True
        return self.name == "intermittent" and full_pays(history.base_bytes, history.known)


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
