"""Where state of optimizers lies after a restore onto another device than it was stored from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recpoint.trainer_plugin.state.optimizers import OptimizerState


def _state(device: str, **settings: Any) -> tuple[nn.Linear, torch.optim.Adam, OptimizerState]:
    model = nn.Linear(3, 2, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, **settings)
    return model, optimizer, OptimizerState(model, [optimizer], [])


@pytest.mark.parametrize("setting", [None, "capturable", "fused"])
@pytest.mark.parametrize("how", ["restored", "carried"])
def test_step_counts_of_a_cpu_lie_where_torch_would_have_them(
    setting: str | None, how: str
) -> None:
    model, optimizer, state = _state("cpu")
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = state.capture()
    if setting is not None:
        saved[0]["groups"][0][setting] = True
    # Of any device but the CPU; this one is everywhere.
    there, its, its_state = _state("meta")
    if how == "restored":
        its_state.restore(saved, {})
    else:
        its.param_groups[0].update({setting: True} if setting else {})
        its_state.carry(saved, {"weight": "weight", "bias": "bias"}, {})
    for parameter in there.parameters():
        found = its.state[parameter]
        assert found["step"].device.type == ("cpu" if setting is None else "meta")
        assert found["exp_avg"].device.type == "meta"
