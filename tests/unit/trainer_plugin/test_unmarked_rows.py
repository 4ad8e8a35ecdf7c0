"""A check of rows that nothing has marked finds what torch does not count, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from recpoint import Checkpointer
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.sample import spread_rows
from recpoint.catalog.store.store import open_store
from tests.training_builder import (
    DIM,
    ROWS,
    Batches,
    Place,
    Recommender,
    Training,
    checkpointer,
    everything,
    reject,
    seed_everything,
    simple_training,
    train,
    until,
)

ALL = 10_000


def _training(
    make: Callable[[list[Tensor]], Optimizer] = lambda p: Adagrad(p, lr=0.1),
    *,
    sparse: bool = True,
    seed: int = 1,
) -> Training:
    """Two tables trained by one optimizer, and the dense layers by another."""
    seed_everything(seed)
    model = Recommender(sparse=sparse)
    tables = [model.users.weight, model.items.weight]
    dense = [*model.norm.parameters(), *model.top.parameters()]
    return Training(model, [make(tables), SGD(dense, lr=0.1)], Batches(seed))


def _checkpointer(training: Training, place: Place, **settings: Any) -> Checkpointer:
    given = {"interval_batches": 100, "when_busy": "wait", "verify_unmarked_rows": ALL, **settings}
    return checkpointer(training, place, **given)


def _stored(place: Place) -> dict[str, Any]:
    target = MemoryTarget()
    restore(Run.open(open_store(place.run)), target)
    return target.tables


def _unmarked(training: Training, ckpt: Checkpointer) -> int:
    """A row of the users that neither training marks nor a cut stores."""
    marked = ckpt._parts.trackers["users"].bitmap
    return next(row for row in range(ROWS) if not int(marked[row // 32]) >> row % 32 & 1)


def _write_weight(training: Training, row: int) -> None:
    training.model.users.weight.detach().numpy()[row] = 7.0


def _write_data(training: Training, row: int) -> None:
    training.model.users.weight.data[row] = 7.0


def _write_state(training: Training, row: int) -> None:
    training.optimizers[0].state[training.model.users.weight]["sum"].numpy()[row] = 7.0


@pytest.mark.parametrize("policy", ["consecutive", "one_shot"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("write", "what"),
    [(_write_weight, "values"), (_write_data, "values"), (_write_state, "row state 'sum'")],
)
def test_a_write_that_torch_does_not_count_is_found_and_stored(
    write: Callable[[Training, int], None],
    what: str,
    sparse: bool,
    policy: str,
    place: Place,
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = _training(sparse=sparse)
    with place.agent(), _checkpointer(training, place, policy=policy) as ckpt:
        ckpt.restore()
        train(training, ckpt, 2)
        assert ckpt.checkpoint()
        train(training, ckpt, 2)
        row = _unmarked(training, ckpt)
        write(training, row)
        assert ckpt.checkpoint()
        assert ckpt.stats.unmarked_rows == 1
        (warning,) = [m for m in caplog.messages if "nothing had marked" in m]
        assert warning.startswith("table 'users': 1 of ")
        assert f"({what}; rows {row})" in warning and "Next: call mark()" in warning
        train(training, ckpt, 1)
        assert ckpt.checkpoint()
        expected = everything(training)
        users = training.model.users.weight.detach().clone()
    assert ckpt.stats.unmarked_rows == 1 and not ckpt.stats.failed
    assert torch.equal(_stored(place)["users"].values, users)
    again = _training(sparse=sparse, seed=5)
    with place.agent(), _checkpointer(again, place, policy=policy) as ckpt:
        assert ckpt.restore() is not None
        assert everything(again) == expected


def test_what_another_process_writes_into_shared_memory_is_found(
    place: Place, tmp_path: Path
) -> None:
    file = tmp_path / "weights"
    torch.rand(ROWS, DIM).numpy().tofile(file)
    shared = torch.from_file(str(file), shared=True, size=ROWS * DIM).view(ROWS, DIM)
    training = _training()
    model = training.model
    model.add_module("frozen", nn.Embedding(ROWS, DIM, _weight=shared).requires_grad_(False))
    write = f"import numpy; numpy.memmap({str(file)!r}, 'f4', 'r+')[{9 * DIM}:{11 * DIM}] = 3"
    with place.agent(), _checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 1)
        assert ckpt.checkpoint()
        subprocess.run([sys.executable, "-c", write], check=True)
        train(training, ckpt, 1)
        assert ckpt.checkpoint()
    assert ckpt.stats.unmarked_rows == 2
    assert torch.equal(_stored(place)["frozen"].values[9:11], torch.full((2, DIM), 3.0))


def test_the_first_checkpoint_after_a_restore_is_compared_with_what_was_restored(
    place: Place,
) -> None:
    for expected in (0, 1):
        training = _training()
        with place.agent(), _checkpointer(training, place) as ckpt:
            ckpt.restore()
            train(training, ckpt, 1)
            if expected:
                _write_weight(training, _unmarked(training, ckpt))
            assert ckpt.checkpoint()
        assert ckpt.stats.unmarked_rows == expected


def test_what_torch_counts_is_not_laid_to_what_it_does_not(place: Place) -> None:
    training = _training()
    with place.agent(), _checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 1)
        assert ckpt.checkpoint()
        with torch.no_grad():
            training.model.users.weight[_unmarked(training, ckpt)] = 7.0
        train(training, ckpt, 1)
        assert ckpt.checkpoint()
    assert ckpt.stats.unmarked_rows == 0
    assert torch.equal(_stored(place)["users"].values, training.model.users.weight.detach())


def test_nothing_is_compared_unless_it_is_asked_for(place: Place) -> None:
    """Which is why the README's table says that such a write is not noticed."""
    training = _training()
    with place.agent(), _checkpointer(training, place, verify_unmarked_rows=0) as ckpt:
        ckpt.restore()
        train(training, ckpt, 1)
        assert ckpt.checkpoint()
        train(training, ckpt, 1)
        row = _unmarked(training, ckpt)
        _write_weight(training, row)
        assert ckpt.checkpoint()
    assert ckpt.stats.unmarked_rows == 0
    assert not torch.equal(
        _stored(place)["users"].values[row], training.model.users.weight.detach()[row]
    )


def test_few_rows_are_drawn_anew_each_time_until_one_is_found(place: Place) -> None:
    training = _training()
    with place.agent(), _checkpointer(training, place, verify_unmarked_rows=40) as ckpt:
        ckpt.restore()
        for value in range(300):
            training.model.users.weight.detach().numpy()[:] = value
            if not ckpt.stats.unmarked_rows:
                train(training, ckpt, 1)
                ckpt.checkpoint()
        assert 1 <= ckpt.stats.unmarked_rows <= 40
    drawn = {tuple(spread_rows(ROWS, 40, seed).tolist()) for seed in range(20)}
    assert len(drawn) > 10 and all(len(set(rows)) == 40 for rows in drawn)
    assert spread_rows(3, 40, 1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("policy", ["consecutive", "one_shot"])
@pytest.mark.parametrize(
    ("make", "sparse"),
    [
        (lambda p: SGD(p, lr=0.1), True),
        (lambda p: Adagrad(p, lr=0.1), True),
        (lambda p: SparseAdam(p, lr=0.1), True),
        (lambda p: SGD(p, lr=0.1), False),
        (lambda p: Adagrad(p, lr=0.1), False),
    ],
    ids=["SGD-sparse", "Adagrad-sparse", "SparseAdam-sparse", "SGD-dense", "Adagrad-dense"],
)
def test_nothing_else_is_found(
    make: Callable[[list[Tensor]], Optimizer],
    sparse: bool,
    policy: str,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither after checkpoints that failed or were rejected, nor after what was told by hand."""
    training = _training(make, sparse=sparse)
    model = training.model
    ckpt = _checkpointer(training, place, policy=policy, when_busy="skip")
    ckpt.restore()

    def one(*, batches: int = 2, is_rejected: bool = False) -> None:
        train(training, ckpt, batches)
        staged_before, done = ckpt.stats.staged, ckpt.stats.committed + ckpt.stats.failed
        assert ckpt.checkpoint()
        until(lambda: ckpt.stats.staged == staged_before + 1)
        if is_rejected:
            reject(StagedRun(place.run_directory).staged_jobs()[0], "StagingError")
        else:
            place.persist_all()
        until(lambda: ckpt.stats.committed + ckpt.stats.failed == done + 1)

    one()
    one(is_rejected=True)
    one()
    model.users.weight.data[[3, 4]] = 1.0
    ckpt.mark("users", torch.tensor([3, 4]))
    one()
    model.items.weight.detach().numpy()[:] *= 0.5
    ckpt.mark_all("items")
    one()
    ckpt.delete_rows("users", torch.tensor([5, 6]))
    one(is_rejected=True)
    users, items, _ = next(training.reader)
    for optimizer in training.optimizers:
        optimizer.zero_grad()
    model(users, items).sum().backward()  # looked up before the cut, changed after it
    one(batches=0)
    for optimizer in training.optimizers:
        optimizer.step()

    def fails() -> dict[str, Any]:
        raise RuntimeError("as good as any")

    with monkeypatch.context() as patched:
        patched.setattr(training.reader, "state_dict", fails)
        train(training, ckpt, 1)
        assert not ckpt.checkpoint()
        assert "as good as any" in str(ckpt.stats.last_error)
    one()
    one()
    assert ckpt.stats.unmarked_rows == 0
    with place.agent():
        ckpt.close()
    assert torch.equal(_stored(place)["users"].values, model.users.weight.detach())


def test_training_goes_on_as_without_it(place: Place, tmp_path: Path) -> None:
    found = []
    for number, rows in enumerate((0, 50)):
        training = simple_training()
        here = Place(str(tmp_path / f"run{number}"), place.staging)
        with here.agent(), _checkpointer(training, here, verify_unmarked_rows=rows) as ckpt:
            ckpt.restore()
            for _ in range(4):
                train(training, ckpt, 1)
                ckpt.checkpoint()
            found.append(everything(training))
    assert found[0] == found[1]


def test_a_model_that_changes_is_not_compared_with_what_it_was(place: Place) -> None:
    training = _training(lambda p: SGD(p, lr=0.1))
    with place.agent(), _checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 1)
        assert ckpt.checkpoint()
        with suppress(RuntimeError):
            training.model.users.half()
        train(training, ckpt, 1)
        assert ckpt.checkpoint()
        train(training, ckpt, 1)
        assert ckpt.checkpoint()
    assert ckpt.stats.unmarked_rows == 0 and not ckpt.stats.failed
    assert np.array_equal(
        _stored(place)["users"].values.numpy(), training.model.users.weight.detach().numpy()
    )
