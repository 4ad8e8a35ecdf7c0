"""Ranks that have something of their own beside what all of them have alike."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recpoint import Checkpointer, Options, Timeouts
from recpoint.errors import RecpointError
from recpoint.trainer_plugin.ranks.agreement import Replicas
from recpoint.trainer_plugin.ranks.ranks import Ranks
from tests.polling import until

__all__ = ["Unlike", "exhausted_rank", "failing_rank", "own_state_life", "told_of_start"]

#: What a rank has that others have not; the first two no rank has to have alike.
Unlike = Literal["buffers", "tables", "parameters", "a table", "names", "buffer names"]


class _Scaled(nn.Module):
    """A layer with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


class _Net(nn.Module):
    def __init__(self, rank: int, unlike: Unlike) -> None:
        super().__init__()
        torch.manual_seed(1 + (rank if unlike == "a table" else 0))
        self.users = nn.Embedding(50, 4, sparse=True)
        self.norm = nn.BatchNorm1d(4)
        self.scaled = _Scaled()
        torch.manual_seed(1 + (rank if unlike == "parameters" else 0))
        setattr(self, self._top(rank, unlike), nn.Linear(4, 1))
        self.top_name = self._top(rank, unlike)
        self.own_table = f"items{rank}" if unlike == "tables" else "items"
        setattr(self, self.own_table, nn.Embedding(20, 4, sparse=True))
        if unlike == "buffer names":
            self.register_buffer(f"seen{rank}", torch.zeros(2))

    @staticmethod
    def _top(rank: int, unlike: Unlike) -> str:
        return f"top{rank}" if unlike == "names" else "top"

    def forward(self, ids: Tensor) -> Tensor:
        top: nn.Module = getattr(self, self.top_name)
        own: nn.Module = getattr(self, self.own_table)
        scores: Tensor = self.scaled.scale * top(self.norm(self.users(ids)) + own(ids % 20))
        return scores


def own_state_life(place: str, job: int, rank: int, ranks: int, unlike: Unlike, told: str) -> None:
    """Train two batches from the newest checkpoint, and tell in a file what came of it."""
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/meeting-{job}", rank=rank, world_size=ranks
    )
    net = _Net(rank, unlike)
    left_out = {
        "parameters": ["top.weight"],
        "a table": ["users.weight"],
        "tables": [f"{net.own_table}.weight"],
    }
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        net, left_out.get(unlike, [])
    )
    model = net if "names" in unlike else DistributedDataParallel(net)
    tables = [net.users.weight, net.get_parameter(f"{net.own_table}.weight")]
    in_tables = {id(table) for table in tables}
    sparse = torch.optim.Adagrad(tables, lr=0.1)
    dense = torch.optim.SGD([p for p in net.parameters() if id(p) not in in_tables], lr=0.1)
    slower = torch.optim.lr_scheduler.StepLR(dense, 3)
    found: dict[str, Any] = {}

    def state() -> dict[str, Any]:
        return {
            "mean": net.norm.running_mean.tolist() if net.norm.running_mean is not None else [],
            "top": net.get_parameter(f"{net.top_name}.weight").tolist(),
            "scale": net.scaled.scale,
            "table": [tables[1].tolist(), sparse.state[tables[1]]["sum"].tolist()],
            "table_steps": float(sparse.state[tables[1]]["step"]),
            "rate": dense.param_groups[0]["lr"],
        }

    try:
        with Checkpointer(
            model,
            [sparse, dense],
            run=f"{place}/run",
            staging=f"{place}/staging",
            schedulers=[slower],
            interval_batches=2,
            timeouts=Timeouts(ranks_seconds=240.0),
        ) as c:
            report = c.restore()
            found["restored"] = None if report is None else report.restored.step
            found["begun"] = state()
            torch.manual_seed(100 + rank)
            for _ in range(2):
                model.zero_grad()
                model(torch.randint(0, 50, (16,))).sum().backward()
                sparse.step()
                dense.step()
                slower.step()
                net.scaled.scale += 1 + rank
                c.step()
            found["ended"] = state()
            found["failed"] = [c.stats.failed, c.stats.last_error]
            until(lambda: c.stats.committed == c.stats.staged)
    except RecpointError as error:
        found["error"] = str(error)
    Path(told).write_text(json.dumps(found))
    dist.destroy_process_group()


def exhausted_rank(place: str, rank: int, told: str) -> None:
    """One of two ranks of which tensors are not alike; rank 1 has no memory to tell which."""
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=2)
    ranks = Ranks(wait_seconds=240.0)
    more = torch.empty(0)

    def tensors() -> dict[str, Tensor]:
        return {"top": torch.full((8,), 1.0 + rank), "more": more.new_empty(more.numel())}

    replicas = Replicas(ranks, tensors, {}, {})
    sketches = ranks.gather(replicas.sketch())
    if rank == 1:
        more = torch.empty(1).expand(1 << 50)
    error = replicas.differences(sketches)
    Path(told).write_text(json.dumps([str(error), ranks.gather("in step")]))
    dist.destroy_process_group()


class _Unsaved(_Scaled):
    """A layer whose state cannot be had."""

    def get_extra_state(self) -> dict[str, float]:
        raise ZeroDivisionError("no such state")


def failing_rank(place: str, rank: int, told: str) -> None:
    """One of two ranks, of which rank 1 gives its Checkpointers what they cannot work with; tell
    in a file what came of each."""
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=2)
    found: dict[str, list[Any]] = {}
    for case in ("settings", "tables", "state", "anything"):
        wrong = case if rank == 1 else None
        net = _Net(0, "buffers")
        if wrong == "anything":
            net.scaled = _Unsaved()
        trained = [p for name, p in net.named_parameters() if wrong != "tables" or "top" in name]
        given: dict[str, Any] = {
            "schedulers": [object()] if wrong == "state" else [],
            "timeouts": "long" if wrong == "settings" else Timeouts(ranks_seconds=1000.0),
        }
        try:
            Checkpointer(
                net,
                torch.optim.SGD(trained, lr=0.1),
                run=f"{place}/run",
                staging=f"{place}/staging",
                interval_batches=2,
                **given,
            )
        except Exception as error:
            found[case] = [type(error).__name__, str(error), *getattr(error, "__notes__", ())]
    Path(told).write_text(json.dumps(found))
    dist.destroy_process_group()


def told_of_start(place: str, rank: int, announce: bool, stderr: str) -> None:
    """One of two ranks that start, train a batch, and start once more; what it says is in a file.

    The file is its standard error while it starts, and nothing else.
    """
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=2)
    for _ in range(2):
        net = _Net(0, "buffers")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with Checkpointer(
            net,
            optimizer,
            run=f"{place}/run",
            staging=f"{place}/staging",
            extras={"position": nn.Linear(1, 1)},  # without any, a warning is on stderr too
            interval_batches=1,
            timeouts=Timeouts(ranks_seconds=240.0),
            options=Options(announce=announce),
        ) as c:
            before = os.dup(2)
            with open(stderr, "ab") as file:
                os.dup2(file.fileno(), 2)
                c.restore()
                os.dup2(before, 2)
            os.close(before)
            net(torch.arange(16)).sum().backward()
            for parameter in net.parameters():  # what DDP would do
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            c.step()
            _until_committed(c, 1)
    dist.destroy_process_group()


def _until_committed(checkpoints: Checkpointer, count: int) -> None:
    until(lambda: checkpoints.stats.committed == count)
