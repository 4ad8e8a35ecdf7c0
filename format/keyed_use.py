"""What the keys of keyed tables did, as jobs and manifests say it (format §4, `keyed`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from recpoint.format.records import Part

__all__ = ["KeyedUse", "KeyedUses", "check_keyed"]

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


def check_keyed(uses: Sequence[KeyedUse] | None, tables: int) -> None:
    """Check that each is of another table, in ascending order.

    Raises:
        ValueError: they are not, or name a table that does not exist.
    """
    indices = [use.table for use in uses or ()]
    if indices != sorted(set(indices)) or any(index >= tables for index in indices):
        raise ValueError("keyed must ascend by table, one at most for each table")
