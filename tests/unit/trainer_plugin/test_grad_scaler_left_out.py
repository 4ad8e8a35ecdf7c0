"""A GradScaler that is in no checkpoint begins anew after a restart; the log says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from tests.training_builder import Place, checkpointer, simple_training

WARNING = "is stepped by a"


def _train(place: Place, scaler: GradScaler, *, fused: bool = False, **given: Any) -> None:
    training = simple_training()
    training.optimizers = [torch.optim.SGD(training.model.parameters(), lr=0.1, fused=fused)]
    with checkpointer(training, place, close_seconds=0.0, drain_seconds=0.0, **given) as ckpt:
        ckpt.restore()
        for _ in range(3):
            users, items, target = next(training.reader)
            training.optimizers[0].zero_grad()
            loss = nn.functional.mse_loss(training.model(users, items), target)
            scaler.scale(loss).backward()
            scaler.step(training.optimizers[0])
            scaler.update()
            ckpt.step()


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_was_not_given(
    place: Place, caplog: pytest.LogCaptureFixture, fused: bool
) -> None:
    _train(place, GradScaler("cpu"), fused=fused)
    (warning,) = _warnings(caplog)
    assert warning.startswith("optimizers[0], a SGD, is stepped by a GradScaler")
    assert 'extras={"scaler": scaler}' in warning


def test_a_scaler_among_the_extras(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    scaler = GradScaler("cpu")
    _train(place, scaler, extras={"amp": scaler})
    assert not _warnings(caplog)


def test_another_scaler_than_the_given(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    _train(place, GradScaler("cpu"), extras={"amp": GradScaler("cpu")})
    assert len(_warnings(caplog)) == 1


class Amp:
    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)


def test_a_scaler_inside_an_extra(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    scaler = GradScaler("cpu")
    _train(place, scaler, extras={"amp": Amp(scaler)})
    assert not _warnings(caplog)


def test_a_scaler_that_is_turned_off(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    _train(place, GradScaler("cpu", enabled=False))
    assert not _warnings(caplog)


def test_a_scaler_that_is_used_later(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Each checkpoint is followed by another look."""
    training = simple_training()
    (optimizer,) = training.optimizers
    scaler = GradScaler("cpu")
    with place.agent(), checkpointer(training, place, when_busy="wait") as ckpt:
        ckpt.restore()
        for batch in range(8):
            users, items, target = next(training.reader)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(training.model(users, items), target)
            if batch < 3:
                loss.backward()
                optimizer.step()
                assert not _warnings(caplog)
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            ckpt.step()
    assert len(_warnings(caplog)) == 1
