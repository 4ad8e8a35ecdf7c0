"""Holds the tables of a home by name, and checks the arguments of its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from recpoint.errors import HomeError
from recpoint.kernels import row_gather
from recpoint.kernels.arguments import require

__all__ = ["BatchOrder", "HomeTables", "TableForm"]

T = TypeVar("T")


class TableForm(NamedTuple):
    """The name and size of a table of a home."""

    table: str
    rows: int
    record_bytes: int

    def require_rows(self, rows: range) -> None:
        """Refuse anything but a range of step 1 within the table.

        Raises:
            ValueError: names the range and what is expected.
        """
        if rows.step != 1 or not 0 <= rows.start <= rows.stop <= self.rows:
            raise ValueError(f"rows: {rows}, expected range(a, b) with 0 <= a <= b <= {self.rows}")

    def require_records(
        self, ids: Tensor, name: str, records: Tensor, within: range | None = None
    ) -> None:
        """Refuse ids and records that do not fit the table.

        Args:
            ids: expected as int64 [n], ascending, within `within`.
            name: the caller's name for `records`.
            records: expected as uint8 [n, record_bytes].
            within: the ids that are allowed; None: those of the table.

        Raises:
            ValueError: names the argument, and what is expected.
        """
        require("ids", ids, torch.int64, 1)
        require(name, records, torch.uint8, 2)
        for label, tensor in (("ids", ids), (name, records)):
            if not tensor.is_cpu:
                raise ValueError(f"{label}: device {tensor.device}, expected cpu")
        if tuple(records.shape) != (len(ids), self.record_bytes):
            raise ValueError(
                f"{name}: shape {tuple(records.shape)}, expected {(len(ids), self.record_bytes)}"
            )
        if not len(ids):
            return
        if within is None:
            within = range(self.rows)
        wrong = row_gather.first_unordered(ids, within.start, within.stop)
        if wrong < 0:
            return
        if int(ids[wrong]) not in within:
            raise ValueError(
                f"ids: {int(ids[wrong])}, expected {within.start} <= id < {within.stop} of "
                f"{self.table!r}"
            )
        raise ValueError("ids: not ascending, or one comes twice; pass torch.unique(ids)")


class BatchOrder:
    """The number of the last batch that wrote to a table."""

    def __init__(self, table: str) -> None:
        self._table = table
        self.last: int | None = None

    def require_next(self, batch: int) -> None:
        """Refuse a batch before the last one.

        Raises:
            HomeError: names both batches.
        """
        if self.last is not None and batch < self.last:
            raise HomeError(
                f"table {self._table!r}",
                found=f"a write-back of batch {batch} after one of batch {self.last}",
                expected="batches that never go back",
                next_step="write batches back in their order, or clear the table before training "
                "starts again from an earlier batch",
            )


class HomeTables(Generic[T]):
    """The tables of a home, until it is closed.

    Args:
        home: describes the home in errors.
    """

    def __init__(self, home: str) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._tables: dict[str, tuple[TableForm, T]] = {}
        self._is_closed = False

    def add(self, form: TableForm, make: Callable[[TableForm], T]) -> None:
        """Add a table, which `make` makes, unless it is there.

        Raises:
            HomeError: it is there with another size, or the home is closed.
            ValueError: a name or number that no table can have.
        """
        if not form.table:
            raise ValueError("table: '', expected a name")
        for name, value in (("rows", form.rows), ("record_bytes", form.record_bytes)):
            if value < 1:
                raise ValueError(f"{name}: {value} for table {form.table!r}, expected 1 or more")
        with self._lock:
            self._require_open()
            known_table = self._tables.get(form.table)
            if known_table is None:
                self._tables[form.table] = form, make(form)
            elif known_table[0] != form:
                was = known_table[0]
                raise HomeError(
                    f"table {form.table!r}",
                    found=f"{form.rows} rows of {form.record_bytes} bytes",
                    expected=f"{was.rows} rows of {was.record_bytes} bytes, as it was added",
                    next_step="give each table one size, or another name",
                )

    def add_rows(self, table: str, rows: int, grow: Callable[[T, TableForm], None]) -> None:
        """Give a table more rows.

        Args:
            table: name of the table.
            rows: rows of the table afterwards.
            grow: makes room for the larger form in the table, or raises and changes nothing.

        Raises:
            HomeError: as `get`.
            ValueError: fewer rows than the table has.
        """
        known_table = self.get(table)
        with self._lock:
            form, _ = self._tables[table]
            if rows < form.rows:
                raise ValueError(f"rows: {rows} for table {table!r}, expected {form.rows} or more")
            larger_form = form._replace(rows=rows)
            grow(known_table, larger_form)
            self._tables[table] = larger_form, known_table

    def get(self, table: str) -> T:
        """Return a table.

        Raises:
            HomeError: it was not added, or the home is closed.
        """
        self._require_open()
        known_table = self._tables.get(table)
        if known_table is None:
            raise HomeError(
                f"table {table!r}",
                found=f"no such table in {self._home}",
                expected=f"one of {sorted(self._tables)}",
                next_step="call add_table first",
            )
        return known_table[1]

    def all(self) -> list[T]:
        """Return all tables.

        Raises:
            HomeError: the home is closed.
        """
        self._require_open()
        with self._lock:
            return [table for _, table in self._tables.values()]

    def close(self) -> list[T]:
        """Close the home. Return the tables that are to be closed; none in a second call."""
        with self._lock:
            self._is_closed = True
            tables = [table for _, table in self._tables.values()]
            self._tables.clear()
            return tables

    def _require_open(self) -> None:
        if self._is_closed:
            raise HomeError(
                self._home,
                found="a call after close()",
                expected="no call after close()",
                next_step="make a new home",
            )
