"""A training that counts no batch is told so when it ends: nothing of it is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from recpoint import Checkpointer
from tests.torch_interpreter import run_program
from tests.training_builder import Place, checkpointer, simple_training, train

ROOT = Path(__file__).resolve().parents[3]
TOLD = "has counted no batch"


def test_it_is_told_once_when_it_is_closed(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    training = simple_training()
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        for _ in range(3):
            training.batch()  # and no step()
    ckpt.close()
    (line,) = [record for record in caplog.records if TOLD in record.getMessage()]
    assert line.levelname == "WARNING" and "call step() after each batch" in line.getMessage()


def test_it_is_told_once_while_training_goes_on(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 1)
    optimizers = [SGD([model.weight], 0.1), SGD([model.bias], 0.1)]
    with Checkpointer(
        model, optimizers, run=place.run, staging=place.staging, interval_batches=2
    ) as ckpt:
        ckpt.restore()
        for steps in range(1, 40):
            for optimizer in optimizers:  # both step on the same batch
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            told = [one for one in caplog.messages if "has stepped 16 times" in one]
            assert len(told) == (steps >= 16)
        ckpt.close(final=False)


def test_steps_of_counted_batches_are_not_told(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), 0.1)
    with Checkpointer(
        model, optimizer, run=place.run, staging=place.staging, interval_batches=1000
    ) as ckpt:
        ckpt.restore()
        for steps in range(40):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if steps % 10 == 9:  # ten steps a batch
                ckpt.step()
        ckpt.close(final=False)
    assert "has stepped" not in caplog.text


@pytest.mark.parametrize("trained", [0, 1])
def test_nothing_is_said_if_it_counts_or_trains_nothing(
    place: Place, caplog: pytest.LogCaptureFixture, trained: int
) -> None:
    training = simple_training()
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, trained)
    assert TOLD not in caplog.text


def test_a_batch_that_a_loop_was_left_in_counts(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    training = simple_training()
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        kept = ckpt.batches(total=3)  # the variable keeps the iterator: only close() counts
        for _ in kept:
            training.batch()
            break
    assert ckpt.batches_done == 1 and TOLD not in caplog.text


def test_an_error_that_ends_training_is_not_joined_by_another(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    training = simple_training()
    with pytest.raises(ZeroDivisionError), checkpointer(training, place) as ckpt:
        ckpt.restore()
        training.batch()
        raise ZeroDivisionError
    assert TOLD not in caplog.text


@pytest.mark.parametrize("counts", [True, False])
def test_a_training_that_closes_nothing_is_told_at_its_exit(tmp_path: Path, counts: bool) -> None:
    program = (
        "from pathlib import Path\n"
        "from tests.training_builder import Place, checkpointer, simple_training\n"
        f"place = Place({str(tmp_path / 'run')!r}, Path({str(tmp_path / 'staging')!r}))\n"
        "training = simple_training()\n"
        "ckpt = checkpointer(training, place)\n"
        "ckpt.restore()\n"
        "training.batch()\n"
    ) + ("ckpt.step()\n" if counts else "")
    done = run_program(program, directory=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(TOLD) == int(not counts), done.stderr
