"""A small training job of several ranks, each a process that can be killed at any step.

Dense layers and one table are replicated (DDP), one table is sharded by rows (`tests.row_shards`),
dropout and a reader make every rank's randomness and position matter. On request the dense layers
are in pieces, none of which is as long as every other (`fully_shard`).
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import random
import signal
import traceback
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from recpoint import Checkpointer
from recpoint.catalog.store import durable
from recpoint.errors import IncompatibleModel, NothingToRestore, RankLost, SettingsError
from recpoint.trainer_plugin import integrations
from recpoint.trainer_plugin.pipeline.handoff import Handoff
from recpoint.trainer_plugin.policy import FULL, Consecutive, OneShot, Policy
from recpoint.trainer_plugin.ranks.agreement import (
    NOTHING,
    CutAgreement,
    agree_on_cut,
    agree_on_settings,
)
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.settings import Options, Precision, Settings, Staging, Timeouts
from recpoint.trainer_plugin.snapshot.seal import Snapshot
from tests import row_shards
from tests.fault.rank_points import announce_protocol, stop_at_step
from tests.fault.rank_watch import Origin, count_exchanges
from tests.flat_settings import arguments
from tests.interposed_store import InterposedStore
from tests.polling import until
from tests.running_parts import pipeline_of

__all__ = ["Shares", "announcing_rank", "disagreeing_rank", "rank_life"]

ROWS, DIM, BATCH, SAMPLES = 60, 4, 4, 480
#: Outputs of the hidden layer: no number of ranks but 1 divides them evenly.
HIDDEN = 7

integrations._SOURCES["tests.row_shards"] = "tests.row_shards"


class _Net(nn.Module):
    def __init__(self, more_rows: int) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS + more_rows, DIM)
        self.items = row_shards.RowShard(ROWS + 1 + more_rows, DIM)
        self.drop = nn.Dropout(0.2)
        self.hidden = nn.Linear(2 * DIM, HIDDEN)
        self.top = nn.Linear(HIDDEN, 1)

    def forward(self, ids: Tensor) -> Tensor:
        both = torch.cat([self.users(ids % ROWS), self.items(ids % (ROWS + 1))], dim=1)
        scores: Tensor = self.top(self.hidden(self.drop(both)).tanh())
        return scores.squeeze(1)


class FixedShares:
    """Each rank's share of one order of all samples; as many ranks have to go on."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.position = rank, ranks, 0
        self._order = np.random.default_rng(5).permutation(SAMPLES)

    def next(self) -> Tensor:
        """BATCH samples of this rank; those of all ranks follow each other in the order."""
        at = self.position + self.rank * BATCH
        self.position += self.ranks * BATCH
        return torch.from_numpy(self._order[at : at + BATCH].copy())

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Shares(FixedShares):
    """One that can be divided among any number."""

    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, ranks: int) -> None:
        (position,) = {state["position"] for state in states}
        assert (rank, ranks) == (self.rank, self.ranks)
        self.position = position


def rank_life(
    url: str,
    staging: str,
    meeting: str | None,
    rank: int,
    ranks: int,
    until_batch: int,
    told: str,
    *,
    kill: int | str | None = None,
    kill_from: int = 0,
    by: signal.Signals = signal.SIGKILL,
    besides: Container[str] = (),
    count_into: str | None = None,
    killed_after: int | None = None,
    shard_dense: bool = False,
    stop_at: int | None = None,
    terminate_at: int | None = None,
    idle_after: int | None = None,
    outlive_signals: bool = False,
    unstaged: int | None = None,
    end_once_staged: bool = False,
    divisible: bool = True,
    more_rows: int = 0,
    hosted: bool | None = None,
    settings: dict[str, Any] | None = None,
    restoring: dict[str, Any] | None = None,
) -> None:
    """Train from the newest checkpoint to `until_batch`, and tell in a file what came of it.

    Args:
        meeting: a file that no job before has met at; None: where torchrun says.
        kill: where to die by SIGKILL: at which durable step, see `recpoint.testing.die_at`, or at
            the first whose name begins so. Each exchange with the other ranks and each part of a
            restore is a step as well.
        kill_from: count from this batch on, when all that was cut before has been committed.
        by: the signal, with a name: SIGSTOP has it hang, with all connections open.
        besides: kinds of steps that are not counted.
        count_into: a file for a line at each step from there on.
        killed_after: die by SIGKILL after this batch, when all that was cut has been committed.
        shard_dense: dense layers under `fully_shard` in place of DDP.
        stop_at: end after this batch as if killed, without a word.
        terminate_at: send this very process SIGTERM after this batch.
        idle_after: train on after this batch only when the process is to end.
        outlive_signals: have a handler of SIGTERM that counts, and does not end the process.
        unstaged: the first time, a checkpoint of this step cannot be staged.
        end_once_staged: end when all that was cut is staged, or could not be.
        more_rows: how many more rows both tables have; no batch looks these up.
        divisible: whether the reader goes on with another number of ranks.
        hosted: rank 0 keeps what ranks meet with, as where nobody else does; else a file does.
        settings: of the Checkpointer.
        restoring: arguments of `restore`.
    """
    dist.init_process_group(
        "gloo",
        store=None if meeting is None else _store(Path(meeting), rank, ranks, hosted),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    if unstaged is not None:
        _fail_to_stage(unstaged)
    signals: list[int] = []
    if outlive_signals:
        signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    at_step = partial(stop_at_step, kill, by, besides=besides, count_into=count_into)
    looks_at_steps = kill is not None or count_into is not None
    if looks_at_steps:
        announce_protocol()
        if kill_from == 0:
            at_step()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + rank)
    torch.manual_seed(1)
    # With three ranks or more the bits of a sum follow from the buckets: DDP keeps its first ones,
    # in place of sorting them anew in the first step of each life, when it looks for unused ones.
    model = (
        _sharded(_Net(more_rows))
        if shard_dense
        else DistributedDataParallel(_Net(more_rows), find_unused_parameters=True)
    )
    torch.manual_seed(100 + rank)
    table = [p for name, p in model.named_parameters() if "users" in name]
    dense = [p for name, p in model.named_parameters() if "users" not in name]
    optimizers = [torch.optim.Adagrad(table, lr=0.1), torch.optim.Adam(dense, lr=0.1)]
    reader = (Shares if divisible else FixedShares)(rank, ranks)
    origin, exchanges = Origin(rank), count_exchanges()
    exchanged: list[list[str]] = []
    samples: list[int] = []
    given: dict[str, Any] = {
        "reader": reader,
        "extras": {"origin": origin},
        "interval_batches": 2,
        "directory": staging,
        "ranks_seconds": 90.0,
    }
    found: dict[str, Any] = {}
    with (
        _telling(Path(told), found),
        Checkpointer(model, optimizers, run=url, **arguments(given | (settings or {}))) as c,
    ):
        starts = c._training._starts
        starts._store = reads = InterposedStore(starts._store)
        report = c.restore(**(restoring or {}))
        found.update(
            begun=c.batches_done,
            restored=None if report is None else report.restored.step,
            restored_state=_digest(model, optimizers),
        )
        while c.batches_done < until_batch:
            ids = reader.next()
            samples += ids.tolist()
            model.zero_grad()
            nn.functional.mse_loss(model(ids), torch.rand(len(ids))).backward()
            for optimizer in optimizers:
                optimizer.step()
            if shard_dense:
                with torch.no_grad():  # an evaluation, which leaves what is in pieces whole
                    model.eval()(ids)
                model.train()
            if terminate_at == c.batches_done + 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if killed_after == c.batches_done + 1:
                until(lambda: c.stats.committed == c.stats.staged > 0)
                os.kill(os.getpid(), signal.SIGKILL)
            before = len(exchanges)
            c.step()
            exchanged.append(exchanges[before:])
            if looks_at_steps and kill_from == c.batches_done > 0:
                until(lambda: c.stats.committed == c.stats.staged > 0)
                at_step()
            if stop_at == c.batches_done:
                os._exit(0)
            if idle_after == c.batches_done:
                until(lambda: c._training.end.is_due)
        if end_once_staged:
            handoff = pipeline_of(c)._handoff
            until(lambda: not handoff.is_staging())
        c.close()
        found.update(
            world=ranks,
            state=_digest(model, optimizers),
            drawn=[random.random(), float(np.random.random()), float(torch.rand(()))],
            position=reader.position,
            origin=origin.rank,
            exchanged=exchanged,
            samples=samples,
            pieces=[len(p.to_local()) for p in model.parameters() if isinstance(p, DTensor)],
            failed=c.stats.failed,
            bound=c.memory_bound_bytes,
            host_bound=c.host_memory_bound_bytes,
            chunks_read=[key for call, key in reads.calls if call == "get" and "chunks/" in key],
            committed=c.stats.committed,
            signals=len(signals),
        )
    dist.destroy_process_group()


def announcing_rank(port: int, meeting: str, rank: int, told: str) -> None:
    """One of two ranks of a life whose store is older: tell what was there, and announce an end."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    # In its place, since this one's gloo would meet addresses of another life.
    setattr(dist.distributed_c10d, "_get_default_store", lambda: store)  # noqa: B010
    ranks = Ranks(wait_seconds=120.0)
    found = {"old": ranks._store.check(["end"]) or ranks._store.check([f"at/{rank}"])}
    ranks.exchange("a cut", [0])  # both have looked
    ranks.announce()
    until(lambda: ranks._store.check(["end"]))
    found["stop_after"] = until(lambda: ranks.meet(7 + rank))
    Path(told).write_text(json.dumps(found))
    ranks.exchange("a cut", [0])
    ranks.close()
    dist.destroy_process_group()


def disagreeing_rank(meeting: str, rank: int, told: str) -> None:
    """One of two ranks that differ in all that they may not; tell in a file what came of each."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    ranks = Ranks(wait_seconds=30.0)
    found: dict[str, Any] = {}

    def cut(step: int, cuts: int = 0) -> CutAgreement:
        return agree_on_cut(
            ranks, step, link=FULL, tip=None, again=False, cuts=cuts, lost=(), sketch=NOTHING
        )

    def refused(call: Callable[[], object]) -> str:
        try:
            call()
        except SettingsError as error:
            return str(error)
        return "nothing"

    found["numbers"] = [cut(6).number, cut(6, cuts=7 * rank).number]
    found["kinds"] = refused(
        lambda: cut(6) if rank == 0 else ranks.exchange("the end of training", [1], batches_done=6)
    )
    found["batches"] = refused(lambda: cut(6 + rank))
    policies = [Consecutive(), OneShot()]
    for name, settings in (
        ("policy", _settings(10, policies[rank])),
        ("interval", _settings((rank + 1) * 10, policies[0])),
        ("rewinds", _settings(10, policies[0], rewinds=3 * rank)),
    ):
        found[name] = refused(partial(agree_on_settings, ranks, settings.common))
    with torch.device("meta"):  # in its place: a GPU
        found["default_device"] = ranks.exchange("a cut", [rank])
        found["gathered"] = ranks.gather(str(rank) * (rank + 1))
    ranks.close()
    Path(told).write_text(json.dumps(found))
    dist.destroy_process_group()


def _settings(interval_batches: int, policy: Policy, *, rewinds: int = 0) -> Settings:
    return Settings(
        interval_batches=interval_batches,
        interval_seconds=None,
        precision=Precision(),
        policy=policy,
        failures=None,
        staging=Staging(),
        timeouts=Timeouts(),
        options=Options(rewinds=rewinds),
    )


def _store(meeting: Path, rank: int, ranks: int, hosted: bool | None) -> Store:
    if not hosted:
        return FileStore(str(meeting), ranks)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        durable.write_atomically(meeting, str(store.port).encode())
        return store
    until(meeting.exists)
    return TCPStore("127.0.0.1", int(meeting.read_text()), ranks)


def _fail_to_stage(step: int) -> None:
    """As if the disk failed under the first checkpoint of this step."""
    stage = Handoff._stage

    def failing(handoff: Handoff, snapshot: Snapshot) -> None:
        if snapshot.ref.step == step:
            setattr(Handoff, "_stage", stage)  # noqa: B010
            raise OSError("no such disk")
        stage(handoff, snapshot)

    setattr(Handoff, "_stage", failing)  # noqa: B010


@contextmanager
def _telling(told: Path, found: dict[str, Any]) -> Iterator[None]:
    """Write what was found, and which error there was."""
    try:
        yield
    except (IncompatibleModel, NothingToRestore, RankLost) as error:
        found["lost" if isinstance(error, RankLost) else "refused"] = str(error)
        raise
    except RuntimeError as error:
        # Of a collective of training itself, whose errors are gloo's.
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if not any("trainer_plugin" in file for file in files):
            found["training_failed"] = str(error)
        raise
    finally:
        told.write_text(json.dumps(found))


def _sharded(net: _Net) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    count = dist.get_world_size()
    # Four ranks: two copies of each piece, of which one is stored.
    if count == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "pieces"))
    else:
        mesh = init_device_mesh("cpu", (count,))
    fully_shard(net.hidden, mesh=mesh)
    fully_shard(net.top, mesh=mesh)

    def average(table: Tensor) -> None:  # what DDP does for the table, which stays whole
        assert table.grad is not None
        dist.all_reduce(table.grad)
        table.grad /= dist.get_world_size()

    net.users.weight.register_post_accumulate_grad_hook(average)
    return net


def _digest(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> str:
    """Of the whole model's bits, wherever its rows are."""
    net: Any = getattr(model, "module", model)
    found = hashlib.sha256()
    for tensor in (net.items.weight, net.items.sums):
        sizes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, tensor.numpy().tobytes())
        for size in sizes:
            found.update(size)
    found.update(str(net.items.steps).encode())
    for parameter in net.parameters():
        states = [one.state[parameter] for one in optimizers if parameter in one.state]
        for key, value in [("", parameter), *sorted(chain(*map(dict.items, states)))]:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found.update(key.encode() + whole.detach().numpy().tobytes())
    return found.hexdigest()
