"""Builds a TorchRec model, sharded as a test asks, and its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "BAGS",
    "DIM",
    "MISSING",
    "ROWS",
    "PooledBatch",
    "PooledRanker",
    "Ranker",
    "all_tables",
    "batch",
    "sharded",
    "shards",
]

MISSING = (
    None
    if find_spec("torchrec") and find_spec("fbgemm_gpu")
    else "torchrec and fbgemm-gpu-cpu are not installed (README, TorchRec)"
)

BAGS: dict[str, tuple[int, tuple[str, ...]]] = {
    "t0": (23, ("f0", "g0")),
    "t1": (40, ("f1",)),
    "t2": (3, ("f2",)),
}
ROWS: dict[str, tuple[int, tuple[str, ...]]] = {"s0": (31, ("h0",)), "s1": (29, ("h1",))}
DIM = 8
BATCH = 4


class Ranker(nn.Module):
    """A model of pooled embeddings (bags), sequence embeddings (rows) and a dense layer."""

    def __init__(self, *, sequences: bool = True, dense: bool = True, device: str = "meta") -> None:
        super().__init__()
        from torchrec import (
            EmbeddingBagCollection,
            EmbeddingBagConfig,
            EmbeddingCollection,
            EmbeddingConfig,
        )

        self.bags = EmbeddingBagCollection(
            device=torch.device(device),
            tables=[
                EmbeddingBagConfig(
                    name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=list(features)
                )
                for name, (rows, features) in BAGS.items()
            ],
        )
        self.rows = (
            EmbeddingCollection(
                device=torch.device(device),
                tables=[
                    EmbeddingConfig(
                        name=name,
                        embedding_dim=DIM,
                        num_embeddings=rows,
                        feature_names=list(features),
                    )
                    for name, (rows, features) in ROWS.items()
                ],
            )
            if sequences
            else None
        )
        self.over = nn.Linear(DIM, 1) if dense else None

    def forward(self, bags: Any, rows: Any) -> Tensor:
        """Return the loss of one batch."""
        pooled = self.bags(bags).to_dict()
        total = torch.stack([pooled[name].square() for name in sorted(pooled)]).sum(0).mean(0)
        if self.rows is not None:
            looked_up = self.rows(rows)
            for name in sorted(looked_up.keys()):
                total = total + looked_up[name].values().square().sum(0) / BATCH
        result = total.sum() if self.over is None else self.over(total).sum()
        return result


class PooledBatch:
    """A batch of pooled features in one object, as train pipelines want it.

    Attributes:
        number: number of the batch.
        bags: the features.
    """

    def __init__(self, number: int, bags: Any) -> None:
        self.number = number
        self.bags = bags

    def to(self, device: torch.device, non_blocking: bool = False) -> PooledBatch:
        return PooledBatch(self.number, self.bags.to(device))

    def record_stream(self, stream: Any) -> None:
        """Do nothing: a CPU has no streams."""

    def pin_memory(self) -> PooledBatch:
        return self


class Head(nn.Module):
    """Computes the loss from pooled embeddings; a train pipeline does not trace it.

    It has one parameter: DDP puts several in another order after its first batch, and so three or
    more ranks add them in another order in the first batch after a restart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(DIM, 1, bias=False)

    def forward(self, pooled: Any) -> Tensor:
        features = pooled.to_dict()
        total = torch.stack([features[name].square() for name in sorted(features)]).sum(0).mean(0)
        loss: Tensor = self.over(total)
        return loss.reshape(1)


class PooledRanker(nn.Module):
    """The ranker's pooled tables and dense layer, for train pipelines."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = Ranker(sequences=False).bags
        self.rows = None
        self.head = Head()

    def forward(self, batch: PooledBatch) -> tuple[Tensor, Tensor]:
        """Return the losses of one batch, twice."""
        losses = self.head(self.bags(batch.bags))
        return losses, losses.detach()


def batch(step: int, rank: int, *, empty: bool = False) -> tuple[Any, Any]:
    """Return the batch of a step and rank, which does not depend on earlier calls."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return _jagged(BAGS, generator, empty), _jagged(ROWS, generator, empty)


def _jagged(tables: Mapping[str, tuple[int, Any]], generator: torch.Generator, empty: bool) -> Any:
    from torchrec import KeyedJaggedTensor

    keys, lengths, values = [], [], []
    for rows, features in tables.values():
        for feature in features:
            counts = torch.randint(0, 3, (BATCH,), generator=generator) * (not empty)
            keys.append(feature)
            lengths.append(counts)
            values.append(torch.randint(0, rows, (int(counts.sum()),), generator=generator))
    return KeyedJaggedTensor.from_lengths_sync(keys, torch.cat(values), torch.cat(lengths).int())


def sharded(
    kinds: Mapping[str, str],
    *,
    optimizer: str = "RowWiseAdagrad",
    dense: bool = True,
    sequences: bool | None = None,
    model: nn.Module | None = None,
) -> Any:
    """Return a `DistributedModelParallel` with each table sharded as `kinds` says.

    It is seeded: initial values depend only on the place in the whole table, not on ranks or plans.
    """
    import torchrec
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    world = dist.get_world_size()
    if sequences is None:  # FBGEMM cannot look up sequences in replicated tables on a CPU
        sequences = "data_parallel" not in {kinds[name] for name in ROWS}
    plain: Any = model or Ranker(sequences=sequences, dense=dense)
    ways: dict[str, Callable[[int], Any]] = {
        "table_wise": lambda number: plans.table_wise(rank=number % world),
        "row_wise": lambda _: plans.row_wise(),
        "column_wise": lambda number: plans.column_wise(
            ranks=[number % world, (number + 1) % world]
        ),
        "table_row_wise": lambda _: plans.table_row_wise(host_index=0),
        "data_parallel": lambda _: plans.data_parallel(),
        "dense": lambda _: plans.table_wise(rank=world - 1, compute_kernel="dense"),
    }
    sharders = plans.get_module_to_default_sharders()
    chosen = {}
    for path, module, names in (("bags", plain.bags, BAGS), ("rows", plain.rows, ROWS)):
        if module is None:
            continue
        plan_of = {}
        for number, name in enumerate(names):
            kind = kinds[name]
            plan_of[name] = ways[kind](number)
            if kind not in ("data_parallel", "dense"):
                parameters = [
                    p for n, p in module.named_parameters() if n.endswith(f"{name}.weight")
                ]
                apply_optimizer_in_backward(
                    getattr(torchrec.optim, optimizer), parameters, {"lr": 0.1}
                )
        chosen[path] = plans.construct_module_sharding_plan(
            module,
            plan_of,
            local_size=world,
            world_size=world,
            device_type="cpu",
            sharder=sharders[type(module)],
        )
    torch.manual_seed(7)
    parallel = DistributedModelParallel(
        plain, device=torch.device("cpu"), plan=ShardingPlan(plan=chosen)
    )
    for table in shards(parallel):
        # Values depend on the place in the whole table, not on the rank that holds it.
        rows = torch.arange(table.first_row, table.first_row + table.rows).unsqueeze(1)
        first = 0 if table.columns is None else table.columns.first
        columns = torch.arange(first, first + table.dim).unsqueeze(0)
        with torch.no_grad():
            table.weight.copy_(torch.sin(1.0 + rows + 0.37 * columns + len(table.name)))
    return parallel


def shards(model: nn.Module) -> Sequence[Any]:
    """Return the tables of a sharded model as recpoint finds them."""
    from recpoint.trainer_plugin.integrations.torchrec import find

    source = find(model)
    assert source is not None
    return source.tables


def all_tables() -> list[str]:
    """Return the full names of all tables of the plain model."""
    return [f"bags.embedding_bags.{name}" for name in BAGS] + [
        f"rows.embeddings.{name}" for name in ROWS
    ]
