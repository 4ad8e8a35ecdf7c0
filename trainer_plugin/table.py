"""One embedding weight, or the part of it that this process holds: what the rest needs to know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from recpoint.format.manifest import Columns

__all__ = ["TABLE_DTYPES", "Lookup", "ModuleTable", "Table", "TableDtype", "table_key"]

Lookup = nn.Embedding | nn.EmbeddingBag

TableDtype = Literal["F64", "F32", "F16", "BF16"]

TABLE_DTYPES: dict[torch.dtype, TableDtype] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def table_key(name: str, columns: Columns | None) -> str:
    """See `Table.key`."""
    return name if columns is None else f"{name}[:, {columns.first}:]"


@dataclass(frozen=True, kw_only=True, eq=False)
class Table(ABC):
    """The rows of one table, or of some of its columns, that this process holds.

    `ModuleTable` is the one of a plain module. An integration gives its own (see `table_source`):
    it says where rows lie in the whole table, where their row states are, and which rows change.

    Where another process lists the same rows, as all do with a model that is replicated, they have
    to be equal, and the lowest rank stores them.

    Attributes:
        name: of the whole table, the same in each process and whatever wraps the model: the full
            name of its module, as `catalog.restoring.names` spells it.
        parameter_name: of its weight; what an optimizer keeps for it is stored under it.
    """

    name: str
    parameter_name: str

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """[rows, dim], contiguous: the live values. The same tensor object each time, until the
        rows lie elsewhere: another one, or another address, makes all rows dirty."""

    @property
    def rows(self) -> int:
        """Rows of the weight, those of this process alone."""
        return self.weight.shape[0]

    @property
    def dim(self) -> int:
        """Values of a row of the weight."""
        return self.weight.shape[1]

    @property
    def dtype(self) -> TableDtype:
        """The weight's dtype by its stored name."""
        return TABLE_DTYPES[self.weight.dtype]

    @property
    def first_row(self) -> int:
        """Position in the whole table of the weight's first row."""
        return 0

    @property
    def table_rows(self) -> int:
        """Rows of the whole table, over all processes."""
        return self.rows

    @property
    def columns(self) -> Columns | None:
        """Which columns of the whole table the weight holds; None: all."""
        return None

    @property
    def key(self) -> str:
        """Name of the piece among all of a model: `name`, and its first column where it is cut."""
        return table_key(self.name, self.columns)

    @property
    def trained(self) -> bool:
        """Whether training changes it."""
        return self.weight.requires_grad

    @property
    def changes(self) -> bool:
        """Whether anything changes its rows, training or not."""
        return self.trained

    @property
    def fused(self) -> bool:
        """Whether it is updated in no step of a torch optimizer, but for instance in backward.

        Its source then tells the tracker of each change (`table_source.TableSource.track`): neither
        gradients nor how often the weight was changed in place are looked at.
        """
        return False

    @property
    def counts_changes(self) -> bool:
        """Whether in-place changes of the weight are counted, and for it alone."""
        return not self.fused

    @property
    def row_states(self) -> Mapping[str, Tensor] | None:
        """Optimizer state with one entry for each row, [rows, ...]; restored in place.

        None: what the optimizers of the Checkpointer hold for `weight`. Of a fused table: name ->
        live tensor, contiguous, the same objects each time, there from the start.
        """
        return None

    @property
    def sparse(self) -> bool:
        """Whether its gradient is sparse."""
        return False

    @property
    def changed_by_lookup(self) -> bool:
        """Whether a lookup rewrites the rows it reads, trained or not."""
        return False

    def before_lookup(self, hook: Callable[..., None]) -> RemovableHandle | None:
        """Have `hook(module, args, kwargs)` called before each lookup; None: there is no way to."""
        return None

    def after_lookup(self, hook: Callable[..., None]) -> RemovableHandle | None:
        """Have `hook(module, args, kwargs, output)` called after each lookup that returned."""
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleTable(Table):
    """The weight of an `nn.Embedding` or `nn.EmbeddingBag`: a whole table."""

    module: Lookup

    @property
    def weight(self) -> Tensor:
        """The weight as it is now: `model.to(device)` may have replaced its storage."""
        return self.module.weight

    @property
    def changes(self) -> bool:
        """max_norm changes rows at each lookup, trained or not."""
        return self.trained or self.changed_by_lookup

    @property
    def sparse(self) -> bool:
        """As the module says now."""
        return self.module.sparse

    @property
    def changed_by_lookup(self) -> bool:
        """Whether the module has a max_norm."""
        return self.module.max_norm is not None

    def before_lookup(self, hook: Callable[..., None]) -> RemovableHandle | None:
        """See `Table.before_lookup`."""
        handle: Any = self.module.register_forward_pre_hook(hook, with_kwargs=True)
        return handle  # type: ignore[no-any-return]

    def after_lookup(self, hook: Callable[..., None]) -> RemovableHandle | None:
        """See `Table.after_lookup`."""
        handle: Any = self.module.register_forward_hook(hook, with_kwargs=True)
        return handle  # type: ignore[no-any-return]
