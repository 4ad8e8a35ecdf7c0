"""Trains through a textbook parameter server on torch RPC: one trainer, and a shard at each server.

For each batch the trainer asks all servers at once for the rows of all tables, and sends them the
gradients of these rows afterwards. The servers apply row-wise Adagrad. There is no cache.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import rpc

from benchmarks.cache_peers import INITIAL, OPTIMIZERS, Batch, TablesModel
from benchmarks.servers.gate import SMALL_JOB, in_memory
from benchmarks.servers.nodes import Place, ThisMachine
from benchmarks.servers.rank import given_job, serve_orders
from benchmarks.servers.trainers import (
    Job,
    Played,
    Trainers,
    batches_of,
    tables_of,
)

__all__ = ["process", "require_same_losses", "rpc_trainer"]

_PATIENCE_SECONDS = 300
_LEARNING_RATE, _EPS = 0.1, 1e-10
#: Rows of a table whose first values differ.
_PIECE_ROWS = 1 << 18


def rpc_trainer(job: Job, places: Sequence[Place]) -> Trainers:
    """Return a trainer at the first place, with servers at the others.

    The processes after the first are those of the servers.
    """
    return Trainers(job, places, module="torch_rpc", rank_count=1)


def require_same_losses(batches: int) -> None:
    """Compare the losses with those of tables in memory.

    Raises:
        RuntimeError: they differ by more than sums in another order do.
    """
    expected = in_memory(SMALL_JOB, OPTIMIZERS["row-wise Adagrad"], 1).play_all(batches)[0]
    with rpc_trainer(SMALL_JOB, [ThisMachine()] * 3) as trainer:
        (played,) = trainer.play("", batches, wait=0)
    if not np.allclose(played.losses, expected, rtol=1e-5, atol=0):
        raise RuntimeError("torch RPC: other losses than in memory")


class _Shard:
    """The rows of all tables at one server: row r is at server r mod S, in place r div S.

    First values of large tables repeat.
    """

    def __init__(self, rows: Mapping[str, int], dim: int, server: int, servers: int) -> None:
        self.weights: list[Tensor] = []
        self.sums: list[Tensor] = []
        for name, count in rows.items():
            shard_rows = range(server, count, servers)
            places = len(shard_rows)
            ids = torch.tensor(shard_rows[:_PIECE_ROWS], dtype=torch.int64, device="cpu")
            values = INITIAL(f"tables.{name}", ids, dim, torch.float32)
            weight = torch.empty(places, dim, dtype=torch.float32, device="cpu")
            for piece in weight.split(_PIECE_ROWS):
                piece.copy_(values[: len(piece)])
            self.weights.append(weight)
            self.sums.append(torch.zeros(places, dtype=torch.float32, device="cpu"))


_here: _Shard | None = None


def _fetch(places: Sequence[Tensor]) -> list[Tensor]:
    """Run at a server: returns rows of each table."""
    assert _here is not None
    return [weight[rows] for weight, rows in zip(_here.weights, places, strict=True)]


def _push(places: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run at a server: takes a step with the gradients of rows of each table."""
    assert _here is not None
    for weight, sums, rows, gradient in zip(
        _here.weights, _here.sums, places, gradients, strict=True
    ):
        sums[rows] += gradient.square().mean(dim=1)
        weight[rows] -= _LEARNING_RATE / (sums[rows].sqrt() + _EPS)[:, None] * gradient


class _Trainer:
    """Trains batches, one after the other.

    Args:
        job: what it trains.
        servers: number of servers; their names are their numbers from 1 on.
    """

    def __init__(self, job: Job, servers: int) -> None:
        rows, batches = batches_of(job, 0)
        self._batches = iter(batches)
        self._servers = servers
        self._delay = job.delay_seconds
        self._top = TablesModel({}, dim=job.dim).top
        self._of_top = torch.optim.SGD(self._top.parameters(), lr=0.01)
        self._tables = len(rows)

    def play(self, peer: str, batches: int, wait: float) -> Played:
        """Train so many batches."""
        cpu, start_s = time.process_time(), time.perf_counter()
        own_s = step = 0.0
        moved = 0
        losses = []
        for _ in range(batches):
            batch = next(self._batches)
            unique = [torch.unique(ids, return_inverse=True) for ids in batch.sparse]
            places = self._places([ids for ids, _ in unique])
            moved += sum(len(ids) for ids, _ in unique)
            tables = self._fetched(places)
            started = time.perf_counter()
            losses.append(self._trained(batch, tables, [inverse for _, inverse in unique]))
            spent = time.perf_counter() - started
            time.sleep(max(0.0, wait - spent))
            own_s += spent
            step += time.perf_counter() - started
            self._pushed(places, tables)
        return Played(
            seconds=time.perf_counter() - start_s,
            own_seconds=own_s,
            step_seconds=step,
            cpu_seconds=time.process_time() - cpu,
            fetched=moved,
            written=moved,
            losses=losses,
        )

    def _places(self, ids: Sequence[Tensor]) -> list[list[tuple[Tensor, Tensor]]]:
        """Return for each server and table which ids it has, and their places there."""
        places = []
        for server in range(self._servers):
            positions = [
                torch.nonzero(table_ids % self._servers == server).view(-1) for table_ids in ids
            ]
            places.append(
                [
                    (positions_here, table_ids[positions_here] // self._servers)
                    for table_ids, positions_here in zip(ids, positions, strict=True)
                ]
            )
        return places

    def _fetched(self, places: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> list[Tensor]:
        time.sleep(self._delay)
        coming = [
            rpc.rpc_async(str(server), _fetch, args=([rows for _, rows in of_server],))
            for server, of_server in enumerate(places, 1)
        ]
        answers = [future.wait() for future in coming]
        tables = []
        for table in range(self._tables):
            parts = [of_server[table] for of_server in answers]
            rows = torch.empty(sum(map(len, parts)), parts[0].shape[1], device="cpu")
            for of_server, part in zip(places, parts, strict=True):
                rows[of_server[table][0]] = part
            tables.append(rows.requires_grad_())
        return tables

    def _trained(
        self, batch: Batch, tables: Sequence[Tensor], looked_up: Sequence[Tensor]
    ) -> float:
        self._of_top.zero_grad()
        rows = [
            nn.functional.embedding(positions, table)
            for positions, table in zip(looked_up, tables, strict=True)
        ]
        logits = self._top(torch.stack(rows).sum(dim=0)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        loss.backward()
        self._of_top.step()
        return loss.item()

    def _pushed(
        self, places: Sequence[Sequence[tuple[Tensor, Tensor]]], tables: Sequence[Tensor]
    ) -> None:
        time.sleep(self._delay)
        going = []
        for server, of_server in enumerate(places, 1):
            gradients = []
            for table, (positions, _) in zip(tables, of_server, strict=True):
                assert table.grad is not None
                gradients.append(table.grad[positions])
            going.append(
                rpc.rpc_async(str(server), _push, args=([rows for _, rows in of_server], gradients))
            )
        for future in going:
            future.wait()


def process(pipe: Connection) -> None:
    """Run the trainer, which is rank 0, or a server."""
    global _here
    # torch itself calls what it warns of.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    settings: dict[str, Any] = given_job(pipe)
    job: Job = settings["job"]
    rank, ranks = settings["rank"], settings["ranks"]
    if rank:
        _here = _Shard(tables_of(job), job.dim, rank - 1, ranks - 1)
    rpc.init_rpc(
        str(rank),
        rank=rank,
        world_size=ranks,
        # It would find out that both sides are one machine, and go around the network.
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=settings["meeting"],
            rpc_timeout=_PATIENCE_SECONDS,
            _transports=["uv"],
            _channels=["basic"],
        ),
    )
    orders = {} if rank else {"play": _Trainer(job, ranks - 1).play}
    serve_orders(orders, pipe)
    # The other side wants no more. Nothing that is under way matters.
    os._exit(0)
