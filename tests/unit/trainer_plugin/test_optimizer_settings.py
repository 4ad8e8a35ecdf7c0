"""Settings and states of optimizers that a checkpoint holds otherwise than the optimizer here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer

from recpoint.trainer_plugin.state.optimizers import OptimizerState

Make = Callable[[list[nn.Parameter]], Optimizer]


class Life:
    """A convolution and its optimizer."""

    def __init__(self, make: Make, memory_format: torch.memory_format) -> None:
        torch.manual_seed(0)
        self.model = nn.Conv2d(3, 4, 5)
        weight = self.model.weight.detach().contiguous(memory_format=memory_format)
        self.model.weight = nn.Parameter(weight)
        self.optimizer = make(list(self.model.parameters()))
        self.state = OptimizerState(self.model, [self.optimizer], [])

    def train(self, batch: int) -> None:
        for parameter in self.model.parameters():
            torch.manual_seed(batch)
            parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape))
        self.optimizer.step()

    def resumed(self, saved: Any, make: Make, memory_format: torch.memory_format) -> Life:
        life = Life(make, memory_format)
        life.model.load_state_dict(self.model.state_dict())
        life.state.restore(saved, {})
        return life

    def weights(self) -> list[Any]:
        return [parameter.tolist() for parameter in self.model.parameters()]


def stored(state: OptimizerState) -> Any:
    """Return a captured state as a checkpoint gives it back: contiguous copies."""
    saved = state.capture()
    for entry in saved[0]["state"].values():
        entry["values"] = {
            key: value.clone(memory_format=torch.contiguous_format)
            for key, value in entry["values"].items()
        }
    return saved


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (lambda p: Adam(p, lr=0.1), "decoupled_weight_decay"),
        (lambda p: AdamW(p, lr=0.1), "decoupled_weight_decay"),
        (lambda p: NAdam(p, lr=0.1, decoupled_weight_decay=True), "decoupled_weight_decay"),
        (lambda p: Adagrad(p, lr=0.1), "fused"),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), "maximize"),
    ],
    ids=["adam", "adamw", "nadam", "adagrad", "sgd"],
)
def test_a_setting_that_an_older_torch_did_not_have_keeps_its_value(
    make: Make, missing: str
) -> None:
    before = Life(make, torch.contiguous_format)
    before.train(0)
    saved = stored(before.state)
    saved[0]["groups"][0].pop(missing, None)
    after = before.resumed(saved, make, torch.contiguous_format)
    (here,), (there,) = after.optimizer.param_groups, before.optimizer.param_groups
    assert here.get(missing) == there.get(missing)
    for life in (before, after):
        life.train(1)
    assert after.weights() == before.weights()


def test_a_setting_that_the_optimizer_lacks_is_kept_and_stored_again() -> None:
    """Such as `initial_lr` of a scheduler that is built after the restore."""

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.1)

    before = Life(make, torch.contiguous_format)
    before.optimizer.param_groups[0]["initial_lr"] = 0.5
    after = before.resumed(stored(before.state), make, torch.contiguous_format)
    assert after.state.capture()[0]["groups"][0]["initial_lr"] == 0.5


def test_what_later_steps_have_added_goes_at_a_rewind() -> None:
    """As of optimizers that count steps in their groups."""

    class Counting(SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
            return super().step(closure)

    life = Life(lambda parameters: Counting(parameters, lr=0.1), torch.contiguous_format)
    before = stored(life.state)
    life.train(0)
    later = stored(life.state)
    life.train(1)
    life.state.restore(later, {})
    assert life.optimizer.param_groups[0]["steps"] == 1
    life.state.restore(before, {})
    assert "steps" not in life.optimizer.param_groups[0]


@pytest.mark.parametrize("make", [Adam, AdamW, Adagrad, SGD])
def test_fused_optimizers_of_weights_in_another_memory_format(make: Any) -> None:
    def fused(parameters: list[nn.Parameter]) -> Optimizer:
        momentum = {"momentum": 0.9} if make is SGD else {}
        optimizer: Optimizer = make(parameters, lr=0.1, fused=True, **momentum)
        return optimizer

    before = Life(fused, torch.channels_last)
    before.train(0)
    after = before.resumed(stored(before.state), fused, torch.channels_last)
    for life in (before, after):
        life.train(1)
    assert after.weights() == before.weights()


def test_a_learning_rate_that_requires_gradients() -> None:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=torch.tensor(0.1, requires_grad=True))

    before = Life(make, torch.contiguous_format)
    with torch.no_grad():
        before.optimizer.param_groups[0]["lr"].fill_(0.25)
    after = before.resumed(stored(before.state), make, torch.contiguous_format)
    assert after.optimizer.param_groups[0]["lr"].item() == 0.25
