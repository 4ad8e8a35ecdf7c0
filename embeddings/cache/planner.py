"""Plans the rows of coming batches, and hands the batches out.

A `Lookahead` tells the cache which rows each coming batch looks up (`Planner.plan`), and when a
batch is handed out (`Planner.begin_batch`). For each table, an oracle gives rows their slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

from torch import Tensor

from recpoint.embeddings.cache.batch_ids import Reading
from recpoint.embeddings.cache.mover import Mover
from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.cache.trainers import Trainers
from recpoint.errors import SettingsError
from recpoint.interrupts import held
from recpoint.lookahead.oracle import CapacityError, Step

__all__ = ["Planner"]


class Planner:
    """Plans batches for the tables of one cache.

    Args:
        mover: moves the rows that plans name.
        trainers: the trainers that share the tables.
    """

    def __init__(self, mover: Mover, trainers: Trainers) -> None:
        self._tables = mover.tables
        self._mover = mover
        self._trainers = trainers
        self._progress = trainers.progress
        self._arrivals: dict[int, list[Future[None]]] = {}
        self._partly: set[str] = set()  # tables that are planned for the batch after `planned`
        self._reader: object = None  # whose batches are planned
        self._turn = 0  # how many times that became another one

    def turn_to(self, reader: object) -> None:
        """Plan the batches of this reader from now on; see `Cache.turn_to`."""
        if reader is not self._reader:
            if self._reader is not None:
                self.forget()
            self._reader = reader
            self._turn += 1

    def turn_from(self, reader: object) -> None:
        """Forget the batches of this reader, if they are planned."""
        if reader is self._reader:
            self.forget()

    def tell(self, count: int, ids: Callable[[int], Mapping[str, Tensor]], *, window: int) -> int:
        """Learn which batches were read and not handed out; see `Cache.tell`."""
        with self._trainers.leaving():
            return self._trainers.tell(count, ids, Reading(self._turn, window))

    def expect(self, ids: Mapping[str, Tensor]) -> None:
        """Keep the rows in slots that the batch after `expected` looks up; see `Cache.expect`."""
        for name, rows in self._tables.items():
            # A table may have been planned for this batch before the others had room.
            if rows.oracle.expected == self._progress.expected:
                self._trainers.expect(rows, ids.get(name))
        self._progress.expected += 1

    def plan(self, ids: Mapping[str, Tensor], *, is_next: bool) -> bool:
        """Plan the batch after the last that is planned; see `Cache.plan`."""
        with self._trainers.leaving():
            self._mover.raise_error()
            with held():  # a row that has a slot must be fetched into it
                return self._plan(ids, is_next)

    def _plan(self, ids: Mapping[str, Tensor], is_next: bool) -> bool:
        number = self._progress.planned + 1
        moves: list[tuple[CachedRows, Step]] = []
        try:
            for name, rows in self._tables.items():
                if name in self._partly:
                    continue
                try:
                    step, is_planned = self._trainers.plan(rows, ids.get(name))
                except CapacityError as error:
                    if is_next:
                        raise self.too_small(name, error.needed) from error
                    break
                if step is not None:
                    moves.append((rows, step))
                if not is_planned:
                    break
                self._partly.add(name)
        finally:
            # What is planned for some tables is under way all the same, also after an error.
            self._arrivals.setdefault(number, []).append(self._mover.start(moves, number))
        if len(self._partly) < len(self._tables):
            return False
        self._partly.clear()
        self._progress.plan_next()
        return True

    def begin_batch(self) -> None:
        """Wait until the rows of the batch that is handed out next have arrived.

        Raises:
            HomeError: the home has failed.
            RankLost: a trainer that shares the rows does not answer.
        """
        with self._trainers.leaving():
            number = self._progress.batch + 1
            if self._progress.planned < number:
                self._pass_over()
            # The wait may be interrupted; the batch is then still the next one.
            self._mover.wait(self._arrivals.get(number, []))
            with held():
                self._arrivals.pop(number, None)
                self._progress.batch = number
                self._progress.stats.batches += 1
            self._trainers.begin_batch()

    def _pass_over(self) -> None:
        """Begin a batch that there was no room to plan: its lookups bring its rows.

        What was planned for some tables is held until then.
        """
        with held():
            for name, rows in self._tables.items():
                if name not in self._partly:
                    self._trainers.plan_none(rows)
            self._progress.stats.unplanned += 1
            self._partly.clear()
            self._progress.plan_next()

    def forget(self) -> None:
        """Forget the plans of batches that were not handed out; rows keep their slots."""
        self._trainers.forget()
        batch = self._progress.batch
        for rows in self._tables.values():
            rows.oracle.forget(keep=batch)
        self._partly.clear()
        self._progress.forget_plans()
        for number in [number for number in self._arrivals if number > batch]:
            # Their rows may be looked up all the same, and then have to be waited for.
            self._arrivals.setdefault(batch + 1, []).extend(self._arrivals.pop(number))

    def begin_anew(self) -> None:
        """Forget all batches: no row has a slot."""
        self._trainers.new_oracles()
        self._arrivals.clear()
        self._partly.clear()
        self._progress.begin_anew()

    def too_small(self, name: str, needed: int) -> SettingsError:
        """Return the error of a table that has fewer slots than rows have to stay in them.

        Args:
            name: name of the table.
            needed: the slots that it needs.
        """
        # One number for all tables gives each an even share, and small tables only their rows.
        together = sum(min(rows.slots.rows, needed) for rows in self._tables.values())
        return SettingsError(
            f"cached(capacity_rows=...): table {name!r}",
            found=f"{self._tables[name].slots.capacity} slots",
            expected=f"at least {needed}: the rows that are looked up together, or whose gradients "
            "no step has applied yet",
            next_step=f"give the table more slots: capacity_rows={{{name!r}: {needed}}}, or "
            f"{together} if you give one number for all tables; or look up fewer rows at a time, "
            "and evaluate under torch.no_grad()",
        )
