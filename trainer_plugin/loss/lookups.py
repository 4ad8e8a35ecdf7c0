"""Does one lookup of torch in the tables as they are, or in small tables of the looked-up rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from recpoint.errors import SettingsError

__all__ = ["PlainLookup", "SmallTables", "WatchedLookup"]

_ATEN: Final[Any] = torch.ops.aten
_EMBEDDING: Final = _ATEN.embedding.default
_BAGS: Final = (_ATEN._embedding_bag.default, _ATEN._embedding_bag_forward_only.default)
#: Position of `padding_idx` among the arguments of a bag.
_PADDING_OF_BAG: Final = 8


class SmallTables:
    """Small tables that have the looked-up rows of watched tables alone.

    Args:
        names: names of the watched tables, for errors.
        ids: of each table: int64 [n], ascending, each once.
        rows: of each table: [n, dim], of the weight's dtype: the row of each id.
    """

    def __init__(self, names: Sequence[str], ids: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        self._names = names
        self._ids = ids
        self._rows = rows

    def rows(self, table: int) -> Tensor:
        """Return the rows of a table, [n, dim]."""
        return self._rows[table]

    def positions(self, table: int, ids: Tensor) -> Tensor:
        """Return where ids are in a small table: int64, of the shape of the ids.

        Raises:
            SettingsError: an id is not there.
        """
        table_ids = self._ids[table]
        ids = ids.to(torch.int64).contiguous()
        positions = torch.searchsorted(table_ids, ids)
        positions = positions.clamp_(max=max(table_ids.numel() - 1, 0))
        if not torch.equal(table_ids[positions], ids):
            raise SettingsError(
                f"Loss.of, table {self._names[table]!r}",
                found="two forward passes of one batch that look up different rows",
                expected="the same lookups each time, with equal random numbers and buffers",
                next_step="have of(model, batch) draw from the global generators only",
            )
        return positions

    def position_or_none(self, table: int, row: int) -> int:
        """Return where the id of a padding is in a small table; -1: it is not there."""
        places = (self._ids[table] == row).nonzero()
        return int(places[0, 0]) if row >= 0 and len(places) else -1


class WatchedLookup(Protocol):
    """One operation that looks rows of watched tables up, as torch is about to do it."""

    @property
    def ids(self) -> Iterable[tuple[int, Tensor]]:
        """The index of a watched table, and ids that are looked up in it, of any shape."""

    def run(self) -> Any:
        """Do it, and return what the operation returns."""

    def run_in(self, tables: SmallTables) -> Any:
        """Do it in small tables.

        Raises:
            SettingsError: it asks for a row that they do not have.
        """


class PlainLookup(NamedTuple):
    """A lookup of `nn.Embedding`, `nn.EmbeddingBag` or their functions.

    Attributes:
        table: index of the watched table.
        operation: the operation of torch.
        arguments: of the operation, the weight first and the ids second.
        keywords: its keyword arguments.
    """

    table: int
    operation: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @classmethod
    def of(
        cls,
        operation: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        table: int,
        weight: Tensor,
    ) -> Self | None:
        """Return the operation as a lookup; None: it is another use of the weight.

        Args:
            operation, arguments, keywords: as torch calls it.
            table: index of the watched table.
            weight: the argument that has its values.
        """
        is_lookup = operation is _EMBEDDING or operation in _BAGS
        if not is_lookup or weight is not arguments[0]:
            return None
        return cls(table, operation, arguments, keywords)

    @property
    def ids(self) -> Iterable[tuple[int, Tensor]]:
        """The table and the ids."""
        return ((self.table, self.arguments[1]),)

    def run(self) -> Any:
        """Do the lookup."""
        return self.operation(*self.arguments, **self.keywords)

    def run_in(self, tables: SmallTables) -> Any:
        """Do the lookup in small tables."""
        table, ids = self.table, self.arguments[1]
        arguments, keywords = [*self.arguments], dict(self.keywords)
        arguments[:2] = [tables.rows(table), tables.positions(table, ids).to(ids.dtype)]
        if self.operation in _BAGS:
            # A bag leaves out the row of its padding. (For other lookups it concerns gradients.)
            if len(arguments) > _PADDING_OF_BAG:
                padding = arguments[_PADDING_OF_BAG]
                arguments[_PADDING_OF_BAG] = tables.position_or_none(table, padding)
            elif "padding_idx" in keywords:
                keywords["padding_idx"] = tables.position_or_none(table, keywords["padding_idx"])
        elif len(arguments) > 2:
            arguments[2] = -1
        return self.operation(*arguments, **keywords)
