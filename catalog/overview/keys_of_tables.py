"""Says what the keys of a checkpoint's keyed tables did, for people and metrics."""

from __future__ import annotations

from typing import Final, NamedTuple

from recpoint.format.manifest import Manifest
from recpoint.units import counted

__all__ = ["KeyedTableUse", "KeysOfTables", "keys_of_tables"]

#: Tables whose figures are kept of a checkpoint.
_MOST_TABLES: Final = 100


class KeyedTableUse(NamedTuple):
    """What the keys of one table did; see `format.keyed_use.KeyedUse`.

    Attributes:
        table: its name.
        capacity_rows: keys that can have rows.
        used: keys that have rows at the cut.
        inserted, evicted, refused: counts since training began.
    """

    table: str
    capacity_rows: int
    used: int
    inserted: int
    evicted: int
    refused: int

    @property
    def text(self) -> str:
        """The counts in words, without the name of the table."""
        return (
            f"{self.used:,} in {counted(self.capacity_rows, 'row')}; {self.inserted:,} inserted, "
            f"{self.evicted:,} evicted, {self.refused:,} refused"
        )


class KeysOfTables(NamedTuple):
    """What the keys of a checkpoint's tables did.

    Attributes:
        tables: the first tables of the checkpoint that are keyed.
        more: how many others are.
    """

    tables: tuple[KeyedTableUse, ...]
    more: int


def keys_of_tables(manifest: Manifest, *, most: int = _MOST_TABLES) -> KeysOfTables | None:
    """Return what the keys of at most so many tables did; None: no table is keyed."""
    if not manifest.keyed:
        return None
    tables = tuple(
        KeyedTableUse(
            table=manifest.tables[use.table].name,
            capacity_rows=manifest.tables[use.table].rows - 1,
            used=use.used,
            inserted=use.inserted,
            evicted=use.evicted,
            refused=use.refused,
        )
        for use in manifest.keyed[:most]
    )
    return KeysOfTables(tables, len(manifest.keyed) - len(tables))
