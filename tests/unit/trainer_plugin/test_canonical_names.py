"""Names and values of dense state are those of torch's `get_state_dict` functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from recpoint.errors import SettingsError
from recpoint.trainer_plugin.state.model import ModelState
from recpoint.trainer_plugin.state.optimizers import OptimizerState
from recpoint.trainer_plugin.tables import find_tables


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(10, 4)
        self.module = nn.Linear(4, 6)  # by a name that wrappers use too
        self.top = nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.top(self.module(self.items(ids)))
        return found


def _bare(net: _Net) -> nn.Module:
    return net


def _compiled(net: _Net) -> nn.Module:
    return torch.compile(net, backend="eager")  # type: ignore[return-value]  # a module, wrapped


def _replicated(net: _Net) -> nn.Module:
    return DistributedDataParallel(net)


def _sharded(net: _Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(net.top, mesh=mesh)
    fully_shard(net.module, mesh=mesh)
    return net


def _recomputed(net: _Net) -> nn.Module:
    net.top = checkpoint_wrapper(net.top)  # type: ignore[assignment]  # answers for what it wraps
    return net


def _several(net: _Net) -> nn.Module:
    net.module = checkpoint_wrapper(net.module)  # type: ignore[assignment]  # as above
    return _compiled(_replicated(net))  # type: ignore[arg-type]


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'met'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _whole(value: Any) -> Any:
    if isinstance(value, dict):  # a piece, and of one rank the only one
        assert list(value["tensor"].shape) == value["shard_of"]
        return value["tensor"]
    return value.full_tensor() if isinstance(value, DTensor) else value


def _assert_same(ours: dict[str, Any], torchs: dict[str, Any]) -> None:
    assert ours.keys() == torchs.keys()
    for name, value in ours.items():
        assert torch.equal(torch.as_tensor(_whole(value)).flatten(), _whole(torchs[name]).flatten())


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "wrap",
    [_bare, _compiled, _replicated, _sharded, _recomputed, _several],
    ids=lambda f: f.__name__,
)
def test_dense_state_is_what_torch_says(wrap: Callable[[_Net], nn.Module]) -> None:
    torch.manual_seed(0)
    model = wrap(_Net())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(10)).sum().backward()
        optimizer.step()
    tables = find_tables(model, [optimizer]).tables
    weight = f"{tables[0].key}.weight"
    assert weight == "items.weight"

    expected: dict[str, Any] = get_model_state_dict(model)
    assert torch.equal(expected.pop(weight), tables[0].weight)  # stored by rows, not here
    _assert_same(ModelState(model, tables).capture()["tensors"], expected)

    theirs: Any = get_optimizer_state_dict(model, optimizer)["state"]
    (ours,) = OptimizerState(model, [optimizer], tables).capture()
    del theirs[weight]["sum"]  # a row state
    assert ours["state"].keys() == theirs.keys()
    for name, entry in theirs.items():
        _assert_same(ours["state"][name]["values"], entry)


def test_flat_shards_are_refused() -> None:
    net = _Net()
    # Its own __init__ wants an accelerator.
    flat = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(flat)
    flat._modules["_fsdp_wrapped_module"] = net.top
    net.add_module("top", flat)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    with pytest.raises(SettingsError, match=r"module 'top'.*fully_shard"):
        find_tables(net, [optimizer])


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_optimizer_that_ranks_divide_by_parameters_is_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns

    net = _Net()
    divided = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adagrad, lr=0.1)
    with pytest.raises(SettingsError, match=r"optimizers\[0\].*ZeroRedundancyOptimizer"):
        find_tables(net, [divided])
