"""What the next checkpoint is: a full, or an increment on which other one. Pure decisions.

The policy is the consecutive one: each increment holds what changed since the checkpoint before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import recpoint.errors
from recpoint.errors import ChainError, CommitError, FormatError, StaleWriter
from recpoint.format.manifest import Kind, TableSpec
from recpoint.format.records import CheckpointRef

__all__ = ["FULL", "Link", "Tip", "breaks_chain", "next_link", "superseded"]


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

    def tip(self, ref: CheckpointRef, tables: Sequence[TableSpec]) -> Tip:
        """The tip of the chain once a checkpoint `ref` stands at this link."""
        return Tip(
            ref=ref,
            base=self.base or ref,
            chain_length=self.chain_length,
            tables=tuple(tables),
        )


FULL = Link(kind="full", base=None, parent=None, chain_length=1)


def next_link(tip: Tip | None, *, step: int, tables: Sequence[TableSpec], full_every: int) -> Link:
    """The link of a checkpoint at `step` with these tables.

    Args:
        tip: None when there is nothing to build on: nothing was restored, or the chain broke.
        step: batches done.
        tables: what would be stored; other tables or row states than the tip's need a full.
        full_every: longest chain.
    """
    if tip is None or tip.chain_length >= full_every or tip.tables != tuple(tables):
        return FULL
    if tip.ref.step >= step:
        # A restored step can be checkpointed again only as a chain of its own: steps ascend.
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
