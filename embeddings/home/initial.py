"""First values of rows, computed from table, row and column, so that no table has to be filled.

Rows get their values when they are first looked up, in any order and in any process.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from recpoint.embeddings.tables.tables import Table, plain_tables
from recpoint.errors import SettingsError
from recpoint.format.first_values import FirstValueRule
from recpoint.kernels.first_values import uniform_values

__all__ = ["Initial", "Uniform", "fill", "fill_rows", "first_values", "padding_row", "stored_rule"]

_PIECE_ROWS: Final = 65_536


class Initial(Protocol):
    """Computes first values. Equal arguments always give equal values."""

    def __call__(self, table: str, ids: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        """Return the first values of rows.

        Args:
            table: name of the table.
            ids: int64 [n], on the CPU.
            dim: values in a row.
            dtype: dtype of the table.

        Returns:
            [n, dim], of that dtype, on the CPU.
        """


@dataclass(frozen=True)
class Uniform:
    """Values from a uniform distribution, by a hash of seed, table, row and column.

    Args:
        seed: a whole number, 0 to 2**32 - 1.
        low: the least value.
        high: values reach it only where the table's dtype rounds up to it.

    Raises:
        SettingsError: the seed is out of range, or low is not below high.
    """

    seed: int = 0
    low: float = -0.01
    high: float = 0.01

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise SettingsError(
                "Uniform(seed=...)",
                found=f"{self.seed!r:.200}",
                expected="a whole number from 0 to 2**32 - 1",
                next_step="give another seed",
            )
        if not self.low < self.high:
            raise SettingsError(
                "Uniform(low=..., high=...)",
                found=f"{self.low!r} and {self.high!r}",
                expected="low below high",
                next_step="exchange them",
            )

    def __call__(self, table: str, ids: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        """See `Initial`."""
        return uniform_values(
            zlib.crc32(table.encode()) << 32 | self.seed,
            ids.contiguous(),
            low=self.low,
            high=self.high,
            row_values=dim,
            columns=range(dim),
            dtype=dtype,
        )


def stored_rule(initial: Initial | None, table: str) -> FirstValueRule | None:
    """Return the rule as checkpoints name it; None: the format knows no such rule.

    Args:
        initial: computes first values; None: nothing does.
        table: the name of the table that `initial` is given.
    """
    if type(initial) is not Uniform:  # a subclass may compute other values
        return None
    return FirstValueRule.uniform(
        table, seed=initial.seed, low=float(initial.low), high=float(initial.high)
    )


def first_values(
    initial: Initial,
    table: str,
    ids: Tensor,
    *,
    dim: int,
    dtype: torch.dtype,
    padding_row: int | None,
) -> Tensor:
    """Return the first values of rows, of the table's dtype; those of the padding row are zero.

    Args:
        initial: computes the values.
        table, ids, dim, dtype: as for `Initial`.
        padding_row: the row that lookups skip; None: there is none.

    Raises:
        SettingsError: `initial` returns no tensor, or another shape.
    """
    try:
        values: object = initial(table, ids, dim, dtype)
    except Exception as error:
        error.add_note(f"recpoint called initial(...) for rows of table {table!r}")
        raise
    if not isinstance(values, Tensor) or tuple(values.shape) != (len(ids), dim):
        shape = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"{values!r:.200}"
        raise SettingsError(
            f"initial(...) of table {table!r}",
            found=shape,
            expected=f"a tensor of shape {(len(ids), dim)}",
            next_step="return a row for each id",
        )
    if padding_row is not None:
        values = torch.where((ids == padding_row)[:, None], torch.zeros_like(values), values)
    return values.to(dtype)


def fill_rows(table: Table, initial: Initial, rows: range, *, into: Tensor | None = None) -> None:
    """Fill rows of a table with their first values, in place.

    Args:
        table: the table; its weight may hold some of the rows and columns only.
        initial: computes the values.
        rows: positions in the weight, of step 1.
        into: filled in place of the weight: [rows, dim], of its dtype.

    Raises:
        SettingsError: see `first_values`.
    """
    weight = table.weight.detach() if into is None else into
    columns, dim = slice(0, table.dim), table.dim
    if table.columns is not None:
        first_column, dim = table.columns.first, table.columns.of
        columns = slice(first_column, first_column + table.dim)
    for first in range(rows.start, rows.stop, _PIECE_ROWS):
        last = min(first + _PIECE_ROWS, rows.stop)
        ids = torch.arange(first, last, dtype=torch.int64, device="cpu") + table.first_row
        values = first_values(
            initial,
            table.name,
            ids,
            dim=dim,
            dtype=weight.dtype,
            padding_row=padding_row(table),
        )
        weight[first:last].copy_(values[:, columns])


def padding_row(table: Table) -> int | None:
    """Return the row of a table that lookups skip; None: there is none."""
    row = getattr(getattr(table, "module", None), "padding_idx", None)
    return row if isinstance(row, int) else None


def fill(model: nn.Module, initial: Initial, tables: Iterable[str] | None = None) -> nn.Module:
    """Fill the tables of a model as a cache with the same `initial` has them at the beginning.

    Args:
        model: a model with plain embedding modules; changed in place.
        initial: computes the values.
        tables: names of tables; None: all.

    Returns:
        The same model.

    Raises:
        SettingsError: a table does not exist.
    """
    model_tables = {table.name: table for table in plain_tables(model).tables}
    for name in model_tables if tables is None else tables:
        table = model_tables.get(name)
        if table is None:
            raise SettingsError(
                f"fill(tables=...): {name!r}",
                found="no such table",
                expected=f"one of {sorted(model_tables)!r:.400}",
                next_step="use the name of the embedding module, as in model.named_modules()",
            )
        fill_rows(table, initial, range(table.rows))
    return model
