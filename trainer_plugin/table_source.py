"""The seam by which a library of sharded embeddings supplies its tables.

What recpoint needs of a table is in `table.Table`. A library that shards embeddings keeps rows in
its own kernels, updates them in backward, and looks them up by ids of the shard; nothing of that
can be seen from `nn.Embedding` modules and torch optimizers. So a model's `TableSource` brings the
tables, answers for the modules that hold them, and tells the trackers which rows change.

    Checkpointer -- find_tables --> find_sources(model): a source, if its library is loaded
        source.modules      left out of the dense state, and of the search for plain tables
        source.tables       stored like all others, as shards of whole tables
        source.optimizers   what is left for the dense state and its optimizer entries
        source.track        from restore() on; untrack() at the end
        source.state_dict   whatever is no row: learning rates, step counts
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint.trainer_plugin.table import Table

__all__ = ["Marker", "TableSource", "find_sources"]

#: module that has to be loaded already -> module with `find(model) -> TableSource | None`.
_SOURCES: dict[str, str] = {
    "torchrec.distributed.embedding_types": "recpoint.trainer_plugin.integrations.torchrec",
}


class Marker(Protocol):
    """What a source tells of one table; a `tracking.Tracker`. Ids are positions in the weight,
    int32 or int64 of any shape, on any device; those that are out of range raise IndexError."""

    def looked_up(self, ids: Tensor) -> None:
        """These rows will be changed: they belong to the checkpoint before and to the one after a
        cut that comes between this and `applied`."""

    def applied(self) -> None:
        """All rows that were looked up so far have been changed, or will not be."""

    def mark(self, ids: Tensor) -> None:
        """These rows have changed."""

    def mark_all(self) -> None:
        """Any row may have changed."""


class TableSource(Protocol):
    """The tables of one model that a library keeps in its own form.

    All methods are called from the training thread, between batches; none may communicate with
    other processes, and none may draw from a random generator.

    Attributes:
        name: of the library; its state is stored under it.
        tables: what this process holds, in any order; without rows: not listed. Pieces of one
            table have disjoint rows or columns.
        modules: full names in the model (`named_modules`) of modules whose parameters and buffers,
            and those of all modules in them, are no dense state.
    """

    name: str
    tables: Sequence[Table]
    modules: Collection[str]

    def optimizers(self, given: Sequence[Optimizer]) -> Sequence[Optimizer]:
        """Those of the Checkpointer's optimizers, without the ones that train `tables` alone; ones
        that combine several may be taken apart."""

    def track(self, markers: Mapping[str, Marker]) -> None:
        """Tell from now on which rows change, by `Table.key`; `untrack` undoes it."""

    def untrack(self) -> None:
        """Take out what `track` has put into the model; also without a `track` before."""

    def state_dict(self) -> Any:
        """What the next life needs beside rows and row states: step counts, learning rates. Of what
        format §3.4 can store; stored by each rank."""

    def lacks_states(self, states: Sequence[Any]) -> bool:
        """Whether what further ranks of the checkpoint returned may be needed beside these."""

    def differences(self, states: Sequence[Any]) -> list[str]:
        """Why `load_state_dicts` cannot go on from these, one sentence each."""

    def load_state_dicts(self, states: Sequence[Any]) -> None:
        """Go on from what ranks of a checkpoint returned, in the order of ranks: all of them, or
        some that nothing was lacking from. They may be more or fewer than now, and may have held
        other tables. Rows and row states are in place."""


def find_sources(model: nn.Module) -> list[TableSource]:
    """What supplies tables of this model; libraries that are not loaded cannot have made any."""
    found = []
    for package, module in _SOURCES.items():
        if package in sys.modules:
            find: Callable[[nn.Module], TableSource | None] = importlib.import_module(module).find
            source = find(model)
            if source is not None:
                found.append(source)
    return found
