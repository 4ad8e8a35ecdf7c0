"""Trains tables that TorchRec divides by rows over the trainers, with its sparse pipeline, on gloo.

There are no servers: each rank holds its part of all rows, and looks up the rows of the other ranks
in each batch.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cache_peers import INITIAL, OPTIMIZERS, Batch, TablesModel
from benchmarks.servers.gate import SMALL_JOB, in_memory
from benchmarks.servers.nodes import Place, ThisMachine
from benchmarks.servers.rank import given_job, join_ranks, serve_orders
from benchmarks.servers.trainers import (
    Job,
    Played,
    Trainers,
    batches_of,
)

__all__ = ["process", "require_torchrec_losses", "torchrec_trainers"]

_LEARNING_RATE, _EPS = 0.1, 1e-10
#: Rows of a table whose first values differ.
_PIECE_ROWS = 1 << 18


def torchrec_trainers(job: Job, places: Sequence[Place]) -> Trainers:
    """Return a trainer at each place."""
    return Trainers(job, places, module="torchrec")


def require_torchrec_losses(ranks: int, batches: int) -> None:
    """Compare the losses of all ranks with those of tables in memory.

    Raises:
        RuntimeError: they differ by more than sums in another order do.
    """
    expected = in_memory(SMALL_JOB, OPTIMIZERS["row-wise Adagrad"], ranks).play_all(batches)
    with torchrec_trainers(SMALL_JOB, [ThisMachine()] * ranks) as trainers:
        losses = [played.losses for played in trainers.play("", batches, wait=0)]
    if not np.allclose(losses, expected, rtol=1e-4, atol=0):
        raise RuntimeError("TorchRec: other losses than in memory")


class _Model(nn.Module):
    """Tables whose rows are summed, and one layer, as `TablesModel`.

    Attributes:
        least_seconds: how long a batch takes at least, from the moment when its rows are there.
        own_seconds: of the thread's processor, that a batch takes apart from its wait.
    """

    def __init__(self, rows: dict[str, int], dim: int) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        self.bags = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=name, embedding_dim=dim, num_embeddings=count, feature_names=[name]
                )
                for name, count in rows.items()
            ],
        )
        self.top = TablesModel({}, dim=dim).top
        self._names = list(rows)
        self.least_seconds = self.own_seconds = 0.0

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the loss twice: the first is trained."""
        pooled = self.bags(batch.sparse).to_dict()
        rows = torch.stack([pooled[name] for name in self._names]).sum(dim=0)
        loss = nn.functional.binary_cross_entropy_with_logits(
            self.top(rows).squeeze(1), batch.label
        )
        time.sleep(max(0.0, self.least_seconds - self.own_seconds))
        return loss, loss.detach()


class _Trainer:
    """Trains batches, one after the other."""

    def __init__(self, job: Job, rank: int) -> None:
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        rows, batches = batches_of(job, rank)
        self._batches = _jagged(list(rows), batches)
        self._model = _Model(rows, job.dim)
        sharded = _sharded(self._model, job.dim)
        of_top = torch.optim.SGD(
            [parameter for name, parameter in sharded.named_parameters() if ".top." in f".{name}"],
            lr=0.01,
        )
        self._pipeline = TrainPipelineSparseDist(sharded, of_top, torch.device("cpu"))

    def play(self, peer: str, batches: int, wait: float) -> Played:
        """Train so many batches."""
        self._model.least_seconds = wait
        cpu, start_s = time.process_time(), time.perf_counter()
        own_s = 0.0
        losses = []
        for _ in range(batches):
            started = time.thread_time()
            losses.append(self._pipeline.progress(self._batches).item())
            self._model.own_seconds = time.thread_time() - started
            own_s += self._model.own_seconds
        return Played(
            seconds=time.perf_counter() - start_s,
            own_seconds=own_s,
            step_seconds=max(own_s, batches * wait),
            cpu_seconds=time.process_time() - cpu,
            fetched=0,
            written=0,
            losses=losses,
        )


def _jagged(names: Sequence[str], batches: Sequence[Batch]) -> Iterator[Any]:
    """Yield batches as TorchRec takes them: one id of each table a sample."""
    from torchrec import KeyedJaggedTensor
    from torchrec.streamable import Pipelineable

    class Jagged(Pipelineable):  # type: ignore[misc]  # TorchRec has no types
        """A batch."""

        def __init__(self, sparse: KeyedJaggedTensor, label: Tensor) -> None:
            self.sparse, self.label = sparse, label

        def to(self, device: torch.device, non_blocking: bool = False) -> Jagged:
            """Return it as it is: there is one device."""
            return self

        def record_stream(self, stream: object) -> None:
            """Do nothing: there are no streams."""

    for batch in batches:
        lengths = torch.ones(batch.sparse.numel(), dtype=torch.int32, device="cpu")
        ids = batch.sparse.reshape(-1)
        yield Jagged(KeyedJaggedTensor.from_lengths_sync(list(names), ids, lengths), batch.label)


def _sharded(model: _Model, dim: int) -> Any:
    """Return the model with its tables' rows divided over all ranks."""
    import torchrec
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    from recpoint.trainer_plugin.integrations.torchrec import find

    apply_optimizer_in_backward(
        torchrec.optim.RowWiseAdagrad,
        model.bags.parameters(),
        {"lr": _LEARNING_RATE, "eps": _EPS},
    )
    world = dist.get_world_size()
    plan = plans.construct_module_sharding_plan(
        model.bags,
        {config.name: plans.row_wise() for config in model.bags.embedding_bag_configs()},
        local_size=world,
        world_size=world,
        device_type="cpu",
        sharder=plans.get_module_to_default_sharders()[type(model.bags)],
    )
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plan={"bags": plan})
    )
    source = find(sharded)
    assert source is not None
    for table in source.tables:
        stop = table.first_row + min(table.rows, _PIECE_ROWS)
        ids = torch.arange(table.first_row, stop, dtype=torch.int64, device="cpu")
        name = table.name.rsplit(".", 1)[-1]
        values = INITIAL(f"tables.{name}", ids, dim, torch.float32)
        with torch.no_grad():
            for piece in table.weight.split(_PIECE_ROWS):
                piece.copy_(values[: len(piece)])
    return sharded


def process(pipe: Connection) -> None:
    """Run one rank."""
    warnings.simplefilter("ignore")  # of TorchRec and FBGEMM themselves
    logging.disable(logging.WARNING)
    settings = given_job(pipe)
    join_ranks(settings)
    trainer = _Trainer(settings["job"], settings["rank"])
    serve_orders({"play": trainer.play}, pipe)
