"""Ranks on a mesh of two dimensions: replicas of a model that is itself divided (`dp`, `tp`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from recpoint import Checkpointer, Options, Timeouts
from recpoint.errors import SettingsError
from tests.polling import until

__all__ = ["Division", "digest", "mesh_life"]

#: Tensor parallelism with `fully_shard` over the replicas; without; or one process.
Division = Literal["pieces", "replicas", "whole"]


class _Net(nn.Module):
    """No layer's pieces are all of one size, and `top` is in no tensor-parallel plan."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.items = nn.Embedding(11, 6)
        self.wide = nn.Linear(6, 10)
        self.narrow = nn.Linear(10, 7)
        self.norm = nn.LayerNorm(7)
        self.top = nn.Linear(7, 1)  # one row: half of the ranks have pieces without elements

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.top(self.norm(self.narrow(self.wide(self.items(ids)).relu())))
        return scores


def mesh_life(place: str, job: int, rank: int, ranks: int, division: Division, told: str) -> None:
    """Train two batches from the newest checkpoint, and tell in a file what came of it."""
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/meeting-{job}", rank=rank, world_size=ranks
    )
    found: dict[str, Any] = {}
    settings: dict[str, Any] = {
        "run": f"{place}/run",
        "staging": f"{place}/staging",
        "interval_batches": 2,
        "timeouts": Timeouts(ranks_seconds=240.0),
        "options": Options(on_error="raise"),
    }
    net = _Net()
    if division != "whole":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
        if division == "pieces":
            found["refused"] = _refused(mesh, settings)
        _divide(net, mesh, division)
    dense = [p for name, p in net.named_parameters() if "items" not in name]
    optimizers = [
        torch.optim.Adagrad(net.items.parameters(), lr=0.1),
        torch.optim.Adam(dense, lr=0.1, foreach=False),  # of one mesh each
    ]
    with Checkpointer(net, optimizers, **settings) as c:
        report = c.restore()
        found["restored"] = None if report is None else report.restored.step
        found["begun"] = _digests(net, optimizers)
        for _ in range(2):
            net.zero_grad()
            torch.manual_seed(c.batches_done)  # replicas get the same batches: nothing to average
            net(torch.randint(0, 11, (8,))).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            c.step()
            if division == "pieces" and c.batches_done % 2:
                found["unlike"] = _unlike(c, net)
        found["ended"] = _digests(net, optimizers)
        if division == "pieces":
            c.checkpoint()  # the one that was refused began an interval anew
        until(lambda: c.stats.committed == c.stats.staged > 0)
    Path(told).write_text(json.dumps(found))
    dist.destroy_process_group()


def _divide(net: _Net, mesh: DeviceMesh, division: Division) -> None:
    parallelize_module(net, mesh["tp"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    if division == "pieces":
        for layer in (net.wide, net.narrow, net.norm, net.top):
            fully_shard(layer, mesh=mesh["dp"])


def _refused(mesh: DeviceMesh, settings: dict[str, Any]) -> str:
    """What is said of a tensor whose pieces are not those that its mesh makes of it."""
    own = [torch.ones(6), torch.ones(4)][mesh["tp"].get_local_rank()]
    whole = DTensor.from_local(
        own, mesh["tp"], [Shard(0)], run_check=False, shape=torch.Size([10]), stride=(1,)
    )
    net = nn.Module()
    net.register_parameter("uneven", nn.Parameter(whole))
    try:
        Checkpointer(net, torch.optim.SGD(net.parameters(), lr=0.1), **settings)
    except SettingsError as error:
        return str(error)
    return "nothing"


def _unlike(c: Checkpointer, net: _Net) -> str:
    """What is said where the second of the meshes that `norm` lies on has other values."""
    weight = net.norm.weight
    assert isinstance(weight, DTensor)
    own, before = weight.to_local().detach(), weight.to_local().detach().clone()
    if int(weight.device_mesh.mesh.min()):
        own.mul_(1.5)
    try:
        c.checkpoint()
    except SettingsError as error:
        return str(error)
    finally:
        own.copy_(before)
    return "nothing"


def _digests(net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, str]:
    """Of the bits of each whole tensor."""
    found: dict[str, str] = {}
    for name, parameter in net.named_parameters():
        found[name] = digest(parameter)
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}, {key}"] = digest(torch.as_tensor(value))
    return found


def digest(tensor: Tensor) -> str:
    """Of the bits of the whole of it."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()
