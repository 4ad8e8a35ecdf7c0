"""Watches each use of tables' weights inside a forward pass, however the model reaches them.

torch tells a dispatch mode of every operation with its tensors: those of `nn.Embedding` and
`nn.EmbeddingBag`, of functions, of scripted modules. So a lookup is seen whoever makes it, and no
module is changed for it. Any other use of a watched weight is refused by name: what it reads would
not be replaced, and the measured cost would be too low.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recpoint.errors import SettingsError

__all__ = ["RecordedIds", "ReplacedRows", "TableWatch", "WatchedLookup", "WatchedTable"]

_ATEN: Final[Any] = torch.ops.aten
_EMBEDDING: Final = _ATEN.embedding.default
_BAGS: Final = (_ATEN._embedding_bag.default, _ATEN._embedding_bag_forward_only.default)
#: These give a weight another name; what is done with that is seen again.
_ALIASES: Final = (_ATEN.detach.default, _ATEN.alias.default)
#: Position of `padding_idx` among the arguments of a bag.
_PADDING_OF_BAG: Final = 8


class WatchedTable(NamedTuple):
    """A table whose uses are watched.

    Attributes:
        name: name of the table.
        weight: its live weight [rows, dim], alone in its memory.
    """

    name: str
    weight: Tensor


class WatchedLookup(NamedTuple):
    """A lookup of rows, as torch is about to do it.

    Attributes:
        table: index of the watched table.
        operation: the operation of torch.
        ids: integers of any shape.
        arguments: of the operation, the weight first and the ids second.
        keywords: its keyword arguments.
    """

    table: int
    operation: Any
    ids: Tensor
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class AnswersLookups(Protocol):
    """Answers lookups in place of torch."""

    def answer(self, lookup: WatchedLookup) -> Any:
        """Return what the operation returns."""


class TableWatch(TorchDispatchMode):
    """Passes each lookup of watched tables to `answers`, while it is entered.

    Args:
        tables: the tables.
        answers: answers the lookups.

    Raises:
        SettingsError: while entered: a watched weight is used in another way than by a lookup.
    """

    def __init__(self, tables: Sequence[WatchedTable], answers: AnswersLookups) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tables = tables
        self._answers = answers
        self._index = {
            table.weight.untyped_storage().data_ptr(): index for index, table in enumerate(tables)
        }

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation of torch; see the class."""
        arguments, keywords = tuple(args), dict(kwargs or {})
        for tensor in _tensors((*arguments, *keywords.values())):
            index = self._table_of(tensor)
            if index is None or func in _ALIASES:
                continue
            if (func is _EMBEDDING or func in _BAGS) and tensor is arguments[0]:
                if tensor.shape == self._tables[index].weight.shape:
                    return self._answers.answer(
                        WatchedLookup(index, func, arguments[1], arguments, keywords)
                    )
            raise _refused(self._tables[index].name, func)
        return func(*arguments, **keywords)

    def _table_of(self, tensor: Tensor) -> int | None:
        if tensor.layout is not torch.strided:
            return None
        return self._index.get(tensor.untyped_storage().data_ptr())


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _refused(table: str, operation: Any) -> SettingsError:
    return SettingsError(
        f"Loss.of, table {table!r}",
        found=f"a use of its weight by {operation}, which is no lookup of rows by ids",
        expected="lookups by nn.Embedding, nn.EmbeddingBag or their functions, without max_norm: "
        "the cost of any other use cannot be measured",
        next_step=f"pass Precision(bits=Loss(...), tables={{{table!r}: 'lossless'}})",
    )


class RecordedIds:
    """Does lookups as torch does them, and notes the ids.

    Args:
        tables: number of watched tables.
    """

    def __init__(self, tables: int) -> None:
        self._ids: list[list[Tensor]] = [[] for _ in range(tables)]

    def answer(self, lookup: WatchedLookup) -> Any:
        """Do the lookup, and note its ids."""
        self._ids[lookup.table].append(lookup.ids.reshape(-1).to(torch.int64))
        return lookup.operation(*lookup.arguments, **lookup.keywords)

    def unique(self, table: int) -> Tensor:
        """Return the ids that were looked up in a table: int64, ascending, each once."""
        ids = self._ids[table]
        return torch.cat(ids).unique() if ids else torch.empty(0, dtype=torch.int64, device="cpu")


class ReplacedRows:
    """Does lookups in small tables that have the looked-up rows alone, with other values.

    Args:
        names: names of the watched tables, for errors.
        ids: of each table: int64 [n], ascending, each once.
        rows: of each table: [n, dim], of the weight's dtype: the row of each id.
    """

    def __init__(self, names: Sequence[str], ids: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        self._names = names
        self._ids = ids
        self._rows = rows

    def answer(self, lookup: WatchedLookup) -> Any:
        """Do the lookup.

        Raises:
            SettingsError: it asks for a row that was not replaced.
        """
        known_ids = self._ids[lookup.table]
        ids = lookup.ids.to(torch.int64).contiguous()
        positions = torch.searchsorted(known_ids, ids)
        positions = positions.clamp_(max=max(known_ids.numel() - 1, 0))
        if not torch.equal(known_ids[positions], ids):
            raise SettingsError(
                f"Loss.of, table {self._names[lookup.table]!r}",
                found="two forward passes of one batch that look up different rows",
                expected="the same lookups each time, with equal random numbers and buffers",
                next_step="have of(model, batch) draw from the global generators only",
            )
        arguments = [*lookup.arguments]
        arguments[:2] = [self._rows[lookup.table], positions.to(lookup.ids.dtype)]
        keywords = dict(lookup.keywords)
        if lookup.operation in _BAGS:
            # A bag leaves out the row of its padding. (For other lookups it concerns gradients.)
            if len(arguments) > _PADDING_OF_BAG:
                arguments[_PADDING_OF_BAG] = _position(known_ids, arguments[_PADDING_OF_BAG])
            elif "padding_idx" in keywords:
                keywords["padding_idx"] = _position(known_ids, keywords["padding_idx"])
        elif len(arguments) > 2:
            arguments[2] = -1
        return lookup.operation(*arguments, **keywords)


def _position(ids: Tensor, padding: int) -> int:
    """Return where the id of a padding is among the ids; -1: there is none among them."""
    places = (ids == padding).nonzero()
    return int(places[0, 0]) if padding >= 0 and len(places) else -1
