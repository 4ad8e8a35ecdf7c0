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
from recpoint.trainer_plugin.loss.batched_lookups import BatchedLookup
from recpoint.trainer_plugin.loss.lookups import PlainLookup, SmallTables, WatchedLookup

__all__ = ["AnswersLookups", "RecordedIds", "ReplacedRows", "TableWatch", "WatchedTable"]

_ATEN: Final[Any] = torch.ops.aten
#: These read no values: they compare addresses, or give a weight another name, and what is done
#: with that is seen again.
_READS_NO_VALUES: Final = (
    _ATEN.detach.default,
    _ATEN.alias.default,
    _ATEN.is_set_to.default,
)


class WatchedTable(NamedTuple):
    """A table whose uses are watched.

    Attributes:
        name: name of the table.
        weight: its live weight [rows, dim], alone in its memory, or beside other tables of a TBE.
    """

    name: str
    weight: Tensor


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
        SettingsError: while entered: a watched weight is used in another way than by a lookup; or
            gradients are on in a lookup, which then counts as one of training.
    """

    def __init__(self, tables: Sequence[WatchedTable], answers: AnswersLookups) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tables = tables
        self._answers = answers
        #: Address of a memory -> position of each table's first value in it -> the table's index.
        self._places: dict[int, dict[int, int]] = {}
        for index, table in enumerate(tables):
            address = table.weight.untyped_storage().data_ptr()
            self._places.setdefault(address, {})[int(table.weight.storage_offset())] = index

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
            places = self._tables_in(tensor)
            if places is None or func in _READS_NO_VALUES:
                continue
            lookup = self._lookup(func, arguments, keywords, tensor, places)
            if lookup is not None:
                if torch.is_grad_enabled():
                    raise _refused_gradients()
                return self._answers.answer(lookup)
            # In inference mode torch tells of some lookups before it has taken them apart.
            with self:
                output = func.decompose(*arguments, **keywords)
            if output is NotImplemented:
                raise _refused(self._tables[min(places.values())].name, func)
            return output
        return func(*arguments, **keywords)

    def _lookup(
        self,
        func: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        weight: Tensor,
        places: Mapping[int, int],
    ) -> WatchedLookup | None:
        table = places.get(int(weight.storage_offset()))
        if table is not None and weight.shape == self._tables[table].weight.shape:
            return PlainLookup.of(func, arguments, keywords, table=table, weight=weight)
        return BatchedLookup.of(func, arguments, keywords, weights=weight, tables=places)

    def _tables_in(self, tensor: Tensor) -> Mapping[int, int] | None:
        if tensor.layout is not torch.strided:
            return None
        return self._places.get(tensor.untyped_storage().data_ptr())


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


def _refused_gradients() -> SettingsError:
    return SettingsError(
        "Loss.of(model, batch)",
        found="a function that switches gradients on, so that its lookups count as training",
        expected="a function that computes a loss under torch.no_grad(), as it is called",
        next_step="leave terms that need gradients out of Loss.of, or pass a number of bits, such "
        "as bits=8",
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
        for table, ids in lookup.ids:
            self._ids[table].append(ids.reshape(-1).to(torch.int64))
        return lookup.run()

    def unique(self, table: int) -> Tensor:
        """Return the ids that were looked up in a table: int64, ascending, each once."""
        ids = self._ids[table]
        return torch.cat(ids).unique() if ids else torch.empty(0, dtype=torch.int64, device="cpu")


class ReplacedRows:
    """Does lookups in small tables that have the looked-up rows alone, with other values.

    Args:
        tables: the small tables.
    """

    def __init__(self, tables: SmallTables) -> None:
        self._tables = tables

    def answer(self, lookup: WatchedLookup) -> Any:
        """Do the lookup.

        Raises:
            SettingsError: it asks for a row that was not replaced.
        """
        return lookup.run_in(self._tables)
