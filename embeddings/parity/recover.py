"""Recovers the rows and parity rows that one server has lost.

A server that takes the place of a lost one knows no row at first. It recovers rows when they are
asked for, and all others in the background, a batch at a time. Each batch is consistent in itself:
the servers tell at which moment they have read their rows, and parity rows are returned as of these
moments, because their servers keep what came since (`Inbox`). So nobody waits for a recovery,
except for the rows that it has not reached.

A lost row is decoded by the server that has the first parity row of its stripe (`decoded`). The
successor stores it. A lost parity row is computed by the successor, from the rows of its stripe.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NoReturn

import torch
from torch import Tensor

from recpoint.embeddings.parity.gathering import Gathering, Together, chosen_rows
from recpoint.embeddings.parity.other_servers import OtherServers
from recpoint.embeddings.parity.own_rows import OwnRows, require_slots
from recpoint.embeddings.parity.own_tables import Batch, OwnTable, RowsOfTables, first_batch
from recpoint.embeddings.parity.peers import HasMembers, Members, OutOfStep, TableSlots
from recpoint.errors import HomeError, ServerLost
from recpoint.kernels import row_gather

__all__ = ["Recovery", "in_step"]

_LOG: Final = logging.getLogger("recpoint")
#: How long the background waits for calls that ask for lost rows, before each batch. It waits no
#: longer, because such calls may come one after another.
_GIVE_WAY_SECONDS: Final = 0.05
#: How often a batch is tried again because servers had moved on meanwhile.
_TRIES: Final = 20
#: Between tries of the background, while the leader finds out which server is lost.
_PAUSE_SECONDS: Final = 0.05
#: Between its tries after any other error.
_ERROR_SECONDS: Final = 1.0


class Recovery:
    """Recovers what one server has lost, and decodes what the others have.

    All calls may come from several threads at the same time, except that one thread at a time calls
    `recover_next` or `recover_all`.

    Args:
        rows: of this server.
        other_servers: the other servers.
        own_members: the same rows, as `Gathering` asks for them.
        together: makes calls to several servers.
    """

    def __init__(
        self,
        rows: OwnRows,
        other_servers: OtherServers,
        own_members: HasMembers,
        *,
        together: Together,
    ) -> None:
        self._rows = rows
        self._other_servers = other_servers
        self._own_members = own_members
        self._together = together
        # Held while lost rows are recovered. The calls to other servers that are made meanwhile
        # never need the lock of this kind of the other server, so none waits for the other.
        self._recovering = threading.Lock()
        self._askers = 0  # calls that wait for lost rows; guarded by the lock of the rows
        self._nobody_asks = threading.Event()
        self._nobody_asks.set()

    def recover(self, wanted: Sequence[TableSlots]) -> None:
        """Recover those of these rows that are lost, from the other servers.

        Args:
            wanted: rows of any tables, each at most once.

        Raises:
            ServerLost: more servers are lost than parity makes up for, or one does not answer.
            OutOfStep: servers have moved on; the call may be repeated.
        """
        named = [(self._rows.table(name), slots) for name, slots in wanted]
        suspects = [(table, slots) for table, slots in named if table.is_known is not None]
        for table, slots in suspects:
            require_slots(slots, table.slots)
        if not self._missing(suspects):
            return  # without a wait for what is being recovered
        with self._rows.lock:
            self._askers += 1
            self._nobody_asks.clear()
        try:
            self._recover_batches(suspects)
        finally:
            with self._rows.lock:
                self._askers -= 1
                if not self._askers:
                    self._nobody_asks.set()

    def _recover_batches(self, wanted: RowsOfTables) -> None:
        is_more = True
        while is_more:
            with self._recovering:  # for a batch, so that others get their turns
                missing = self._missing(wanted)
                is_more = bool(missing)
                if is_more:
                    in_step(partial(self._recover_rows, missing))

    def _missing(self, wanted: RowsOfTables) -> RowsOfTables:
        """Return those of these rows that are lost, as many as one batch has."""
        with self._rows.lock:
            missing = [
                (table, slots[:0] if table.is_known is None else slots[~table.is_known[slots]])
                for table, slots in wanted
            ]
        return first_batch(missing)

    def recover_all(self, is_over: threading.Event, name: str) -> None:
        """Recover all rows and parity rows; return once none is lost.

        An error does not end it: the next try begins with the same batch.

        Args:
            is_over: set when the server stops taking part in parity. This then returns early.
            name: what errors and logs call this server.
        """
        has_logged = False
        while not is_over.is_set():
            try:
                if not self.recover_next():
                    return
            except (ServerLost, OutOfStep) as error:
                _LOG.debug("%s waits with its recovery: %s", name, error)
                is_over.wait(_PAUSE_SECONDS)
            except (HomeError, ValueError, RuntimeError, OSError, MemoryError) as error:
                # One bad answer, or one moment without memory, must not end the recovery.
                if not has_logged and not is_over.is_set():
                    _LOG.error("%s cannot recover its rows, and tries again: %s", name, error)
                    has_logged = True
                is_over.wait(_ERROR_SECONDS)

    def recover_next(self) -> bool:
        """Recover one batch of lost rows or lost parity rows; return False if none is lost.

        It lets those go first who ask for lost rows, for a while.

        Raises:
            ServerLost, OutOfStep: as for `recover`. The call may be repeated.
        """
        self._nobody_asks.wait(_GIVE_WAY_SECONDS)
        with self._rows.lock:
            tables = self._rows.tables
            missing = first_batch((table, table.first_missing()) for table in tables)
        if missing:
            self._recover_batches(missing)
            return True
        with self._rows.lock:
            missing = first_batch((table, table.first_missing_parity()) for table in tables)
        if missing:
            in_step(partial(self._recover_parity, missing))
        return bool(missing)

    def _recover_rows(self, missing: RowsOfTables) -> None:
        """Recover rows that are lost. The caller holds `_recovering`."""
        generations = [table.generation for table, _ in missing]
        coded = self._decoded_elsewhere(missing)
        parts = coded.split([len(slots) for _, slots in missing])
        with self._rows.lock:
            for (table, slots), part, generation in zip(missing, parts, generations, strict=True):
                if table.is_known is None or table.generation != generation:
                    continue  # the table was cleared
                if bool((part[:, -1] > 1).any()):
                    self._refuse_misfit(table)
                written = part[:, -1].nonzero().view(-1)
                written_slots = slots[written]
                records = chosen_rows(part[:, :-1].contiguous(), written)
                self._rows.store(table.name, written_slots, records)
                for frozen in table.frozen:
                    frozen.reveal(written_slots, records)
                table.set_known(slots)

    def _refuse_misfit(self, table: OwnTable) -> NoReturn:
        raise HomeError(
            f"table {table.name!r} on embedding server {self._rows.number + 1}",
            found="rows and parity that do not fit each other",
            expected="parity that was computed of these rows",
            next_step="restore the last checkpoint, and look at the memory of the machines",
        )

    def _decoded_elsewhere(self, missing: RowsOfTables) -> Tensor:
        """Return lost rows of this server, coded: uint8 [n, coded_bytes].

        The server with the first parity row of a stripe decodes its lost row. So each server
        receives a share of the rows that are needed, and this one only those that it has lost.
        """
        living = self._other_servers.living
        rows = Batch(missing)
        _require_all(len(living) + 1, rows.stripes.servers)
        stripes, _ = rows.stripes.members_at(rows.table_places, self._rows.number, rows.slots)
        decoders, _ = rows.stripes.parity_in(rows.table_places, stripes, 0)
        places, calls = [], []
        for server, peer in living:
            chosen = (decoders == server).nonzero().view(-1)
            if len(chosen):
                places.append(chosen)
                _, table_slots = rows.by_table(rows.table_places[chosen], rows.slots[chosen])
                calls.append(partial(peer.decoded, table_slots, self._rows.number))
        size = len(rows.slots), rows.tables[0].coded_bytes
        out = torch.empty(size, dtype=torch.uint8, device="cpu")
        for chosen, members in zip(places, self._together(calls), strict=True):
            row_gather.scatter(members.rows, chosen, out)
        return out

    def decoded(self, wanted: Sequence[TableSlots], lost: int) -> Members:
        """Compute rows that another server has lost; see `Peer.decoded`."""
        rows = Batch(self._rows.same_length(wanted))
        form = rows.stripes
        # Once for all: if a server is lost meanwhile, its call fails, or tells a moment. If it were
        # left out, one parity row could have a message of it, and another one could not.
        sources = self._other_servers.sources(self._own_members)
        _require_all(len(sources), form.servers)
        if not 0 <= lost < form.servers:
            raise ValueError(f"server {lost}, expected one of {form.servers}")
        for table, (_, slots) in zip(rows.tables, wanted, strict=True):
            require_slots(slots, len(table.stripes.slots_of(lost, range(table.stripes.rows))))
        stripes, positions = form.members_at(rows.table_places, lost, rows.slots)
        del sources[lost]  # it does not have these rows
        gathering = Gathering(rows, stripes, sources, self._together, recover=False)
        lost_rows = gathering.lost_rows(positions, lost)
        gathering.require_one_generation()
        with self._rows.lock:
            moment = self._other_servers.moment
        return Members(
            is_known=torch.ones(len(rows.slots), dtype=torch.bool, device="cpu"),
            rows=lost_rows,
            moment=moment,
            generations=[table.generation for table in rows.tables],
        )

    def _recover_parity(self, missing: RowsOfTables) -> None:
        """Compute parity rows that are lost. One thread at a time does this."""
        rows = Batch(missing)
        stripes, numbers = rows.stripes.parity_at(rows.table_places, self._rows.number, rows.slots)
        generations = [table.generation for table, _ in missing]
        # Lost rows of these stripes are recovered at their servers first.
        sources = self._other_servers.sources(self._own_members)
        gathering = Gathering(rows, stripes, sources, self._together, recover=True)
        parity_rows = gathering.parity_rows(numbers)
        moments = gathering.seen_by(self._rows.number)
        parts = parity_rows.split([len(slots) for _, slots in missing])
        with self._rows.lock:
            for (table, slots), part, generation in zip(missing, parts, generations, strict=True):
                if table.is_parity_known is None or table.generation != generation:
                    continue  # the table was cleared
                self._other_servers.add_later(table, slots, part, moments)
                self._rows.store_parity(table, slots, part)


def in_step(act: Callable[[], None]) -> None:
    """Call again, as often as servers have moved on meanwhile.

    Raises:
        OutOfStep: too often.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            act()
            return
        except OutOfStep:
            if not tries_left:
                raise


def _require_all(count: int, servers: int) -> None:
    """Refuse to decode before all servers have joined.

    Raises:
        OutOfStep: messages of a lost server may be taken back at some servers only.
    """
    if count < servers:
        raise OutOfStep("a server that was lost has no successor yet")
