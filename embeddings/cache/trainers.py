"""What a cache asks of the trainers that share its tables, and the answers of a single trainer.

A cache has a part, `Trainers`, for what differs if several trainers share its rows. There are five
moments at which it asks:

- rows are planned: `tell`, `expect`, `plan` and their like;
- a batch begins and ends: `begin_batch` has the values of rows arrive that others have;
- an optimizer makes a step: `reduce` puts the gradients of all trainers in place of this one's;
- rows change: `changed_ids` says which of them a checkpoint of this trainer has to hold;
- trainers meet for checkpoints, reads and restores.

`OneTrainer` shares its rows with nobody. `shared.SeveralTrainers` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.optim import Optimizer

from recpoint.embeddings.cache.batch_ids import Reading
from recpoint.embeddings.cache.progress import Progress
from recpoint.embeddings.cache.reduction import Reduction
from recpoint.embeddings.cache.residents import NO_IDS, CachedRows
from recpoint.embeddings.cache.shared_lookups import SharedLookups
from recpoint.lookahead.oracle import Oracle, Step

__all__ = ["OneTrainer", "Trainers"]


class Trainers(ABC):
    """The trainers that share the rows of a cache, as the cache of one of them sees them.

    All methods are called from the training thread.

    Attributes:
        progress: at which batch this trainer is.
        reduction: averages gradients of all trainers; None: there are no others.
        lookups: makes lookups of keyed tables together with them; None: there are no others.
    """

    progress: Progress
    reduction: Reduction | None = None
    lookups: SharedLookups | None = None

    @abstractmethod
    def new_oracles(self) -> None:
        """Give each table an oracle by which no row has a slot."""

    @abstractmethod
    def tell(self, count: int, ids: Callable[[int], Mapping[str, Tensor]], reading: Reading) -> int:
        """Learn which batches were read and not handed out; see `Planner.tell`.

        Raises:
            RankLost: a trainer does not answer.
        """

    @abstractmethod
    def expect(self, rows: CachedRows, ids: Tensor | None) -> None:
        """Expect a table's rows for the batch after `progress.expected`."""

    @abstractmethod
    def plan(self, rows: CachedRows, ids: Tensor | None) -> tuple[Step | None, bool]:
        """Plan a table for the batch after `progress.planned`.

        Returns:
            What is to be moved, and whether the table is planned. Otherwise there is no room.

        Raises:
            CapacityError: the batch alone needs more slots than the table has.
        """

    @abstractmethod
    def plan_none(self, rows: CachedRows) -> None:
        """Plan no row of a table for a batch that there is no room for.

        Raises:
            SettingsError: trainers must plan alike.
        """

    @abstractmethod
    def forget(self) -> None:
        """Forget what was planned for batches that were not handed out.

        Raises:
            RankLost: a trainer does not answer.
        """

    @abstractmethod
    def oracle_outside_plans(self, rows: CachedRows) -> Oracle:
        """Return the oracle that gives slots to rows of a table that are looked up outside a plan.

        Raises:
            SettingsError: other trainers would have to send the rows.
        """

    @abstractmethod
    def refuse_reset(self, name: str) -> None:
        """Refuse a reset of a table's rows if these are in the caches of several trainers.

        Raises:
            SettingsError: they are.
        """

    @abstractmethod
    def find(self, rows: CachedRows, ids: Tensor, hold: int | None) -> Tensor:
        """Return the slots of rows, -1 for none.

        Args:
            rows: the table.
            ids: int32 or int64 [n], on the CPU.
            hold: the rows stay until this batch is released; None: no step changes them.
        """

    @abstractmethod
    def begin_batch(self) -> None:
        """Have the values of rows of other trainers arrive for the batch that was handed out.

        Raises:
            RankLost: a trainer does not answer.
        """

    @abstractmethod
    def end_batch(self) -> None:
        """Take note that training asks for another batch. No row changes any more for this one."""

    @abstractmethod
    def reduce(self, optimizer: Optimizer) -> None:
        """Put the gradients of all trainers in place of this one's, for rows that it steps.

        Raises:
            RanksDiffer: trainers make other steps.
            RankLost: a trainer does not answer.
        """

    @abstractmethod
    def to_change(self, rows: CachedRows) -> Tensor:
        """Return the slots whose rows the next step may change: int64 [n]."""

    @abstractmethod
    def stepped(self, optimizer: Optimizer, changed: Sequence[CachedRows]) -> None:
        """Take note that a step has changed rows.

        Args:
            optimizer: has made the step.
            changed: the tables of which this trainer has had gradients.
        """

    @abstractmethod
    def changed_ids(self, rows: CachedRows, slots: Tensor) -> Tensor:
        """Return the rows that a checkpoint of this trainer has to hold, from slots that change.

        They count from the first row of this trainer's part.
        """

    @abstractmethod
    def leaving(self) -> AbstractContextManager[None]:
        """Leave the other trainers if the block fails, so that none waits for this one."""

    @abstractmethod
    def announce_cut(self) -> None:
        """Wait until all trainers take a checkpoint next, or end.

        Raises:
            RanksDiffer: trainers do different things.
        """

    @abstractmethod
    def meet_for_view(self) -> bool:
        """Wait until all trainers prepare for a view.

        Returns:
            Whether the view needs all changed rows at home, because others own some of them.

        Raises:
            HomeError: the home has failed.
            RankLost: a trainer does not answer.
        """

    @abstractmethod
    def end_read(self) -> None:
        """Wait until all trainers have read their rows.

        Raises:
            RankLost: a trainer does not answer.
        """

    @abstractmethod
    def restoring(self) -> AbstractContextManager[None]:
        """Empty all caches together: no trainer writes rows back in the block or after it.

        Raises:
            HomeError: the home has failed.
            RankLost: a trainer does not answer, or its home has failed.
        """

    @property
    @abstractmethod
    def end_seconds(self) -> float | None:
        """How long to wait for the end of the home thread; None: without limit."""

    @abstractmethod
    def end(self) -> None:
        """End what works together with other trainers, after the home thread."""


class OneTrainer(Trainers):
    """A trainer that shares its rows with no other.

    Args:
        tables: the tables of its cache.
    """

    def __init__(self, tables: Mapping[str, CachedRows]) -> None:
        self.progress = Progress()
        self._tables = tables
        self._oracles: dict[str, Oracle] = {}

    def new_oracles(self) -> None:
        """Give each table an oracle by which no row has a slot."""
        for name, rows in self._tables.items():
            rows.oracle = self._oracles[name] = Oracle(rows.slots.capacity)
            if rows.reserved is not None:
                rows.reserved.forget()
            rows.oracle.plan(NO_IDS)  # batch 1 stands for the time before the first batch

    def tell(self, count: int, ids: Callable[[int], Mapping[str, Tensor]], reading: Reading) -> int:
        """Return all batches: no other trainer reads any."""
        return count

    def expect(self, rows: CachedRows, ids: Tensor | None) -> None:
        """Keep rows in slots; see `Trainers.expect`."""
        rows.expect(self._oracles[rows.slots.name], ids)

    def plan(self, rows: CachedRows, ids: Tensor | None) -> tuple[Step | None, bool]:
        """Plan a table; see `Trainers.plan`."""
        step = rows.plan(self._oracles[rows.slots.name], ids, batch=self.progress.batch)
        return step, step is not None

    def plan_none(self, rows: CachedRows) -> None:
        """Plan no row: the lookups of the batch bring its rows."""
        self._oracles[rows.slots.name].plan(NO_IDS)

    def forget(self) -> None:
        """Do nothing."""

    def oracle_outside_plans(self, rows: CachedRows) -> Oracle:
        """Return the table's oracle."""
        return self._oracles[rows.slots.name]

    def refuse_reset(self, name: str) -> None:
        """Do nothing."""

    def find(self, rows: CachedRows, ids: Tensor, hold: int | None) -> Tensor:
        """Return the slots of rows; see `Trainers.find`."""
        return rows.oracle.slots_of(ids, hold=hold)

    def begin_batch(self) -> None:
        """Do nothing: no other trainer has rows."""

    def end_batch(self) -> None:
        """Release rows whose gradients a step has applied, or of which there are none."""
        for rows in self._tables.values():
            rows.release(self.progress.batch)

    def reduce(self, optimizer: Optimizer) -> None:
        """Do nothing: no other trainer has gradients."""

    def to_change(self, rows: CachedRows) -> Tensor:
        """Return the slots of the gradient; see `Trainers.to_change`."""
        return rows.to_change()

    def stepped(self, optimizer: Optimizer, changed: Sequence[CachedRows]) -> None:
        """Take note that a step has changed rows; see `Trainers.stepped`."""
        for rows in changed:
            rows.is_trained = True

    def changed_ids(self, rows: CachedRows, slots: Tensor) -> Tensor:
        """Return the rows of the slots."""
        return rows.slots.ids[slots]

    def leaving(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def announce_cut(self) -> None:
        """Do nothing."""

    def meet_for_view(self) -> bool:
        """Return False: this trainer's slots and home have all its rows."""
        return False

    def end_read(self) -> None:
        """Do nothing."""

    def restoring(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    @property
    def end_seconds(self) -> None:
        """None: the home thread waits for no other trainer."""
        return None

    def end(self) -> None:
        """Do nothing."""
