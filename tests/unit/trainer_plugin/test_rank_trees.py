"""Optimizers of a job, put together from the trees of its ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recpoint.trainer_plugin.mismatches import Mismatch
from recpoint.trainer_plugin.state.model import ModelState, optimizers_for, own_part, tree_for
from recpoint.trainer_plugin.state.optimizers import OptimizerState
from recpoint.trainer_plugin.state.training_state import TrainingState

_STEP: dict[str, Any] = {
    "keys": ["step", "sum"],
    "values": {"step": torch.tensor(7.0)},
    "on_host": [],
}


def trained(seed: int) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layer = nn.Linear(3, 5)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    layer(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    return layer, optimizer


def tree(captured: list[dict[str, Any]], rows: range | None) -> dict[str, Any]:
    """As a rank has it that holds these rows of the weight; None: all."""
    entry = captured[0]["state"]["weight"]

    def piece(key: str, value: torch.Tensor) -> object:
        if rows is None or value.dim() == 0:
            return value
        part = value[rows.start : rows.stop]
        return {"shard_of": list(value.shape), "at": [rows.start, 0], "tensor": part}

    values = {key: piece(key, value) for key, value in entry["values"].items()}
    state = {**captured[0]["state"], "weight": {**entry, "values": values}}
    return {"model": {"tensors": {}}, "optimizers": [{**captured[0], "state": state}]}


class Position:
    """A reader that cannot be divided between another number of ranks."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("the checkpoint does not fit")


def test_a_reader_that_other_ranks_cannot_divide_is_refused_with_its_own_next_step() -> None:
    layer, optimizer = trained(1)
    state = TrainingState(
        model=ModelState(layer, []),
        optimizers=OptimizerState(layer, [optimizer], []),
        schedulers=[],
        reader=Position(),
        extras={},
    )
    trees: dict[int, object] = {rank: state.capture(3) for rank in range(3)}
    assert state.differences(tree_for(trees, 0, 3, 3)) == []
    assert state.differences(tree_for(trees, 0, 2, 3)) == [
        Mismatch(
            "the checkpoint has the readers of 3 ranks, there are more or fewer ranks here, and "
            "the reader cannot divide what is left",
            "give the reader load_state_dicts(states, rank, ranks), or train on 3 ranks",
        )
    ]


def test_state_in_pieces_is_carried_whole() -> None:
    layer, optimizer = trained(1)
    captured = OptimizerState(layer, [optimizer], []).capture()
    trees = {0: tree(captured, range(3)), 1: tree(captured, range(3, 5))}
    other, its = trained(2)
    state = OptimizerState(other, [its], [])
    names = {"weight": "weight", "bias": "bias"}
    merged = optimizers_for(trees, None)
    assert state.carry_differences(merged, names) == []
    state.carry(merged, names, {})
    for name in names:
        there = optimizer.state[layer.get_parameter(name)]
        here = its.state[other.get_parameter(name)]
        assert here.keys() == there.keys()
        assert all(torch.equal(here[key], there[key]) for key in there)
    its.step()


def test_a_rank_has_no_state_of_tables_that_only_others_hold() -> None:
    layer, optimizer = trained(1)
    captured = OptimizerState(layer, [optimizer], []).capture()[0]
    trees: dict[int, Any] = {}
    for rank in range(2):
        group = {**captured["groups"][0], "params": ["bias", f"items{rank}.weight"]}
        state = {"bias": captured["state"]["bias"], f"items{rank}.weight": {**_STEP}}
        one = {**captured, "groups": [group], "state": state}
        whole = {"model": {"tensors": {}}, "optimizers": [one]}
        trees[rank] = whole if rank == 0 else own_part(whole, alike={"bias"})
    assert trees[1]["optimizers"][0]["state"]["bias"]["values"] == {}
    (found,) = optimizers_for(trees, trees[1])
    assert found["state"].keys() == {"bias", "items1.weight"}
    assert found["state"]["items1.weight"]["values"] == _STEP["values"]
    assert found["state"]["bias"]["values"] == captured["state"]["bias"]["values"]
    assert found["groups"][0]["params"] == ["bias", "items1.weight"]
