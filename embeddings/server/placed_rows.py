"""Knows a table on all embedding servers of a training, and divides its rows into requests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.embeddings.home.contract import FrozenRows
from recpoint.embeddings.home.forms import BatchOrder, TableForm
from recpoint.embeddings.parity.stripes import Stripes
from recpoint.embeddings.server.placement import Placement
from recpoint.embeddings.server.transport import SlotRows
from recpoint.errors import HomeError

__all__ = ["FrozenAt", "PlacedRows", "ServerTable", "requests"]

#: Slots and records that one request carries, unless one record is longer; and its tables.
_REQUEST_BYTES: Final = 4 << 20
_MOST_TABLES: Final = 128


class FrozenAt(NamedTuple):
    """Frozen rows at one server: the number of the reader, its batch, and the incarnation."""

    number: int
    batch: int
    incarnation: int


class _PartAtServer:
    """The rows of a table on one server.

    Attributes:
        incarnation: of the server that has them.
        lock: held while a number is drawn and during its call, so that the numbers of a table
            arrive in their order.
        open: numbers of freezes that are open.
    """

    def __init__(self) -> None:
        self.incarnation = 0
        self.lock = threading.Lock()
        self.open: set[int] = set()


class ServerTable:
    """A table on all servers.

    Attributes:
        rows_at: for each server how many rows, and parity rows, belong there.
        parts: for each server the rows there.
        frozen: open readers of frozen rows.
        lock: guards `frozen` and the batches.
    """

    def __init__(self, form: TableForm, placement: Placement | Stripes, servers: int) -> None:
        self.form = form
        self.placement = placement
        self.rows_at = tuple(
            len(placement.slots_of(server, range(form.rows)))
            + (placement.parity_slots(server) if isinstance(placement, Stripes) else 0)
            for server in range(servers)
        )
        self.parts = [_PartAtServer() for _ in range(servers)]
        self.frozen: set[FrozenRows] = set()
        self._batches = BatchOrder(form.table)
        self.lock = threading.Lock()

    @contextmanager
    def next_batch(self, batch: int) -> Iterator[None]:
        """Refuse a batch before the last one. If the block raises nothing, this is the last one."""
        with self.lock:
            self._batches.require_next(batch)
        yield
        with self.lock:
            self._batches.last = max(batch, self._batches.last or batch)

    def require_unfrozen(self) -> None:
        """Refuse a call while rows are frozen.

        Raises:
            HomeError: says how many readers there are.
        """
        with self.lock:
            if self.frozen:
                raise HomeError(
                    f"table {self.form.table!r}",
                    found=f"{len(self.frozen)} readers of frozen rows",
                    expected="none when a table is cleared",
                    next_step="release them first",
                )

    def forget_batches(self) -> None:
        """Accept any batch next."""
        with self.lock:
            self._batches.last = None


class PlacedRows(NamedTuple):
    """Rows of a table at one server: their slots, int64 [n], and records."""

    table: ServerTable
    slots: Tensor
    records: Tensor

    @staticmethod
    def room(table: ServerTable, slots: Tensor) -> PlacedRows:
        """Return rows with memory for their records."""
        size = len(slots), table.form.record_bytes
        return PlacedRows(table, slots, torch.empty(size, dtype=torch.uint8, device="cpu"))

    @property
    def beside(self) -> SlotRows:
        """The rows as they go beside a message, which names their table."""
        return SlotRows(self.slots, self.records)


def requests(rows: Sequence[PlacedRows], server: int) -> Iterator[list[PlacedRows]]:
    """Divide rows into what one request to a server carries: each table at most once.

    The rows of one request are those of one incarnation of the server.
    """
    request: list[PlacedRows] = []
    room = _REQUEST_BYTES
    for table, slots, records in rows:
        row_bytes = table.form.record_bytes + 8
        most_rows = max(1, _REQUEST_BYTES // row_bytes)
        for some_slots, some_records in _pieces(slots, records, most_rows):
            if request and (
                some_slots.numel() * row_bytes > room
                or len(request) == _MOST_TABLES
                or request[0].table.parts[server].incarnation != table.parts[server].incarnation
            ):
                yield request
                request, room = [], _REQUEST_BYTES
            request.append(PlacedRows(table, some_slots, some_records))
            room -= some_slots.numel() * row_bytes
    if request:
        yield request


def _pieces(slots: Tensor, records: Tensor, most_rows: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Divide slots and their records into pieces of at most `most_rows` rows."""
    if slots.numel() <= most_rows:
        return [(slots, records)]
    return zip(slots.split(most_rows), records.split(most_rows), strict=True)
