"""Implements row-wise sharded embeddings updated in backward, which recpoint cannot see by itself.

Each rank holds a range of a table's rows. Every rank gets the ids and gradients of all ranks, so
that the trained rows are the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint.catalog.restore.state import canonical_name
from recpoint.embeddings.tables.tables import Marker, Table

__all__ = ["RowShard", "find"]


class RowShard(nn.Module):
    """Holds rows first … first + n − 1 of a table [rows, dim], which is divided among all ranks."""

    def __init__(self, rows: int, dim: int, *, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        edges = [rows * rank // self.ranks for rank in range(self.ranks + 1)]
        self.table_rows, self.first = rows, edges[self.rank]
        whole = torch.randn(rows, dim, generator=torch.Generator().manual_seed(rows))
        self.weight = whole[edges[self.rank] : edges[self.rank + 1]].clone()
        self.sums = torch.zeros(len(self.weight))
        self.learning_rate, self.steps = learning_rate, 0
        self.marker: Marker | None = None
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, int64 [n], from all ranks: [n, dim]."""
        rows: Any = _Lookup.apply(ids, self._anchor, self)  # type: ignore[no-untyped-call]
        return rows  # type: ignore[no-any-return]

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of this rank's ids, and the ids of all ranks."""
        everywhere = _gathered(ids)
        is_local = self.here(everywhere)
        if self.marker is not None:
            self.marker.looked_up(everywhere[is_local] - self.first)
        looked_up = torch.zeros(len(everywhere), self.weight.shape[1])
        looked_up[is_local] = self.weight[everywhere[is_local] - self.first]
        dist.all_reduce(looked_up)
        return looked_up[self.rank * len(ids) :][: len(ids)], everywhere

    def update(self, everywhere: Tensor, gradient: Tensor) -> None:
        """Take one step of row-wise Adagrad."""
        gradients = _gathered(gradient) / self.ranks
        is_local = self.here(everywhere)
        rows = everywhere[is_local] - self.first
        total = torch.zeros_like(self.weight).index_add(0, rows, gradients[is_local])
        touched = rows.unique()
        self.sums[touched] += total[touched].square().mean(1)
        scale = self.learning_rate / (self.sums[touched].sqrt() + 1e-8)
        self.weight[touched] -= scale[:, None] * total[touched]
        self.steps += 1
        if self.marker is not None:
            self.marker.applied()

    def here(self, ids: Tensor) -> Tensor:
        """Return a mask of the ids that are rows of this rank."""
        return (ids >= self.first) & (ids < self.first + len(self.weight))


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, _anchor: Tensor, shard: RowShard) -> Tensor:
        rows, ctx.everywhere = shard.lookup(ids)
        ctx.shard = shard
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        ctx.shard.update(ctx.everywhere, gradients[0].contiguous())
        return None, torch.zeros(()), None


def _gathered(tensor: Tensor) -> Tensor:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.cat(gathered)


@dataclass(frozen=True, kw_only=True, eq=False)
class _ShardTable(Table):
    module: RowShard

    @property
    def weight(self) -> Tensor:
        return self.module.weight

    @property
    def first_row(self) -> int:
        return self.module.first

    @property
    def table_rows(self) -> int:
        return self.module.table_rows

    @property
    def trained(self) -> bool:
        return True

    @property
    def fused(self) -> bool:
        return True

    @property
    def row_states(self) -> Mapping[str, Tensor]:
        return {"sum": self.module.sums}


class _Source:
    name = "row_shards"
    settings_step = "build it as it was"

    def __init__(self, modules: Mapping[str, tuple[str, RowShard]]) -> None:
        self._modules = [module for _, module in modules.values()]
        self.modules: Collection[str] = list(modules)
        self.tables: Sequence[Table] = [
            _ShardTable(name=name, parameter_name=f"{name}.weight", module=module)
            for name, module in modules.values()
            if len(module.weight)
        ]

    def stores_buffer(self, module: nn.Module, name: str) -> bool:
        return False

    def optimizers(self, given: Sequence[Optimizer]) -> Sequence[Optimizer]:
        return given

    def track(self, markers: Mapping[str, Marker]) -> None:
        for table in self.tables:
            assert isinstance(table, _ShardTable)
            table.module.marker = markers.get(table.key)

    def untrack(self) -> None:
        for module in self._modules:
            module.marker = None

    def state_dict(self) -> Any:
        return [module.steps for module in self._modules]

    def lacks_states(self, states: Sequence[Any]) -> bool:
        return not states

    def differences(self, states: Sequence[Any]) -> list[str]:
        return []

    def load_state_dicts(self, states: Sequence[Any]) -> None:
        for module, steps in zip(self._modules, states[0], strict=True):
            module.steps = steps


def find(model: nn.Module) -> _Source | None:
    """See `trainer_plugin.integrations.find_sources`."""
    shards = {
        name: (canonical_name(model, name), module)
        for name, module in model.named_modules()
        if isinstance(module, RowShard)
    }
    return _Source(shards) if shards else None
