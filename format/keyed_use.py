"""Names the row states of keyed tables, and what their keys did (format §3.8, §4 `keyed`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Final, Protocol

from pydantic import Field

from recpoint.format.records import Part

__all__ = [
    "KEY",
    "KEYED_STATES",
    "LAST_USE",
    "MOST_KEYED_ROWS",
    "USES",
    "KeyedUse",
    "KeyedUses",
    "check_keyed",
    "check_keyed_table",
    "has_keys",
    "joined_uses",
]

#: Row state: the key that has the row; 0 if none has.
KEY: Final = "keyed.key"
#: Row state: the table's clock when the key was last looked up in training; below 0: no key has it.
LAST_USE: Final = "keyed.last_use"
#: Row state: how often the key was looked up; only where the rule of eviction counts that.
USES: Final = "keyed.uses"
#: Row states that belong to a keyed table and not to its optimizer.
KEYED_STATES: Final = frozenset((KEY, LAST_USE, USES))
#: The most rows of a keyed table, row 0 included.
MOST_KEYED_ROWS: Final = 2**31


class _KeyedState(Protocol):
    """What is read of a `format.manifest.RowStateSpec`."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class _KeyedForm(Protocol):
    """What is read of a `format.manifest.TableSpec`."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> object: ...
    @property
    def row_states(self) -> Sequence[_KeyedState]: ...


_Count = Annotated[int, Field(ge=0, lt=2**63)]


class KeyedUse(Part):
    """What the keys of one table did.

    Attributes:
        table: index of the table.
        used: rows that keys had at the cut.
        inserted, evicted: keys that had got a row, and that had lost it to others or by age, since
            training began.
        refused: keys that were looked up and not admitted since then.
    """

    table: Annotated[int, Field(ge=0, lt=100_000)]
    used: _Count
    inserted: _Count
    evicted: _Count
    refused: _Count


#: Those of all keyed tables of a checkpoint.
KeyedUses = Annotated[tuple[KeyedUse, ...], Field(min_length=1, max_length=100_000, strict=False)]


def joined_uses(of_parts: Iterable[Sequence[KeyedUse] | None]) -> tuple[KeyedUse, ...] | None:
    """Return the figures of a checkpoint that has several parts; None: no part has any.

    Ranks that have copies of a table say the same of it, so those of the first part count.

    Args:
        of_parts: figures of each part, in the order of parts.
    """
    by_table: dict[int, KeyedUse] = {}
    for uses in of_parts:
        for use in uses or ():
            by_table.setdefault(use.table, use)
    return tuple(by_table[table] for table in sorted(by_table)) or None


def has_keys(row_states: Collection[str]) -> bool:
    """Whether row states of these names are those of a keyed table."""
    return KEY in row_states and LAST_USE in row_states


def check_keyed_table(table: _KeyedForm) -> None:
    """Check the form of a table with row states of keys; any other table passes.

    Raises:
        ValueError: the form is wrong.
    """
    states = [state for state in table.row_states if state.name in KEYED_STATES]
    if not states:
        return
    names = [state.name for state in states]
    if not has_keys(names) or len(set(names)) < len(names):
        raise ValueError(f"{', '.join(names)} are not the row states of a keyed table")
    if any(state.dtype != "I64" or state.shape for state in states):
        raise ValueError(f"{', '.join(names)} are I64, one value a row")
    if not 2 <= table.rows <= MOST_KEYED_ROWS or table.columns is not None:
        raise ValueError(f"a keyed table is whole and has 2 to {MOST_KEYED_ROWS} rows")


def check_keyed(uses: Sequence[KeyedUse] | None, tables: Sequence[_KeyedForm]) -> None:
    """Check that each is of another keyed table, in ascending order, with no more keys than slots.

    Raises:
        ValueError: they are not, or name a table that does not exist.
    """
    indices = [use.table for use in uses or ()]
    if indices != sorted(set(indices)) or any(index >= len(tables) for index in indices):
        raise ValueError("keyed must ascend by table, one at most for each table")
    for use in uses or ():
        table = tables[use.table]
        if not has_keys([state.name for state in table.row_states]):
            raise ValueError(f"keyed names {table.name!r:.80}, which has no keys")
        if use.used > table.rows - 1:
            raise ValueError(f"keyed has {use.used} keys in {table.rows - 1} rows")
