"""Finds the rows that keys have in the row states of a keyed table (format §3.8)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from recpoint.errors import MalformedObject, RecpointError
from recpoint.format.keyed_use import KEY, KEYED_STATES, LAST_USE, USES, has_keys

__all__ = [
    "KEY",
    "KEYED_STATES",
    "LAST_USE",
    "USES",
    "has_keys",
    "naming_table",
    "require_own_keys",
    "rows_by_key",
    "used_rows",
]


def used_rows(last_use: Tensor) -> Tensor:
    """Return the rows that keys have, int64 [n], ascending.

    Args:
        last_use: the row state `LAST_USE`, int64 [rows].
    """
    return (last_use >= 0).nonzero().flatten()


def rows_by_key(table: str, key: Tensor, last_use: Tensor) -> Tensor:
    """Return the rows that keys have, int64 [n], in ascending order of keys.

    Args:
        table: its name, for errors.
        key, last_use: the row states `KEY` and `LAST_USE`, int64 [rows] each.

    Raises:
        MalformedObject: see `require_own_keys`.
    """
    rows = used_rows(last_use)
    rows = rows[torch.argsort(key[rows])]
    require_own_keys(table, rows, key[rows])
    return rows


def require_own_keys(table: str, rows: Tensor, keys: Tensor) -> None:
    """Check that each row has a key of its own, and that row 0 has none.

    Args:
        table: its name, for errors.
        rows: rows that keys have, int64 [n].
        keys: their keys, int64 [n]; equal ones are found fastest if they ascend.

    Raises:
        MalformedObject: it is not so.
    """
    with naming_table(table):
        if bool((rows == 0).any()):
            raise ValueError("a key in row 0")
        keys = keys.sort().values
        is_repeated = keys[1:] == keys[:-1]
        if bool(is_repeated.any()):
            raise ValueError(f"key {int(keys[1:][is_repeated][0])} in two rows")


@contextmanager
def naming_table(table: str) -> Iterator[None]:
    """Name the table when a `ValueError` says which rows or keys of a checkpoint cannot be.

    Raises:
        MalformedObject: in the place of that error.
    """
    try:
        yield
    except RecpointError:
        raise
    except ValueError as error:
        raise MalformedObject(
            f"keyed table {table!r}",
            found=str(error),
            expected="a key of its own for each row that has one, and none for row 0",
            next_step="take another checkpoint: recpoint list URL",
        ) from error
