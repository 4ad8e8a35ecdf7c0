"""An optimizer that the Checkpointer was not given trains its model: refused, or no loss."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.optim import optimizer as torch_hooks

from recpoint import Checkpointer
from recpoint.errors import SettingsError
from tests.training_builder import (
    Place,
    Recommender,
    Training,
    checkpointer,
    everything,
    simple_training,
    train,
)


def _training(make: Callable[[Any], Optimizer] = lambda p: Adagrad(p, lr=0.1)) -> Training:
    training = simple_training()
    training.optimizers = [make(training.model.parameters())]
    return training


def _checkpointer(training: Training, place: Place, **settings: Any) -> Checkpointer:
    """Take a checkpoint when it is asked to, and wait for the one before."""
    return checkpointer(training, place, interval_batches=100, when_busy="wait", **settings)


def _hooks() -> int:
    pre, post = torch_hooks._global_optimizer_pre_hooks, torch_hooks._global_optimizer_post_hooks
    return len(pre) + len(post)


@pytest.fixture(autouse=True)
def no_hooks_are_left() -> Iterator[None]:
    gc.collect()  # those of a Checkpointer that another test has dropped
    before = _hooks()
    yield
    assert _hooks() == before


_REPLACEMENTS = [
    pytest.param(lambda model, old: Adagrad(model.parameters(), lr=0.1), id="of the same class"),
    pytest.param(lambda model, old: Adagrad(old.param_groups), id="of the same groups"),
    pytest.param(lambda model, old: SGD(model.parameters(), lr=0.1), id="without a state"),
    pytest.param(lambda model, old: Adam([model.items.weight], lr=0.1), id="of one table"),
]


@pytest.mark.parametrize("replace", _REPLACEMENTS)
def test_an_optimizer_that_was_replaced_is_refused_by_name(
    replace: Callable[[Recommender, Optimizer], Optimizer],
    place: Place,
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = _training()
    with place.agent(), _checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 2)
        assert ckpt.checkpoint()
        new = replace(training.model, training.optimizers[0])
        training.optimizers = [new]
        train(training, ckpt, 1)
        assert not ckpt.checkpoint()
        error = ckpt.stats.last_error
        assert error is not None
        for part in (type(new).__name__, "table 'items'", "was not given", "Next: "):
            assert part in error
        assert f"a checkpoint failed: {error}" in caplog.messages
        ckpt.close()
        assert (ckpt.stats.committed, ckpt.stats.failed) == (1, 2), "nor is there a last one"


def test_with_on_error_raise_the_refusal_ends_training(place: Place) -> None:
    training = _training()
    ckpt = checkpointer(training, place, interval_batches=2, on_error="raise")
    ckpt.restore()
    training.optimizers = [Adagrad(training.model.parameters(), lr=0.1)]
    with pytest.raises(SettingsError, match="an optimizer Adagrad: found steps of it that train"):
        train(training, ckpt, 2)
    ckpt.close(final=False)


def test_dense_parameters_that_another_optimizer_trains_too(place: Place) -> None:
    training = _training()
    with place.agent(), _checkpointer(training, place) as ckpt:
        ckpt.restore()
        training.optimizers.append(Adam(training.model.top.parameters()))
        train(training, ckpt, 1)
        assert not ckpt.checkpoint()
        assert "that train 'top.bias', 'top.weight', although" in str(ckpt.stats.last_error)


def test_a_frozen_table_that_is_trained_after_all(place: Place) -> None:
    training = simple_training()
    model = training.model
    model.users.weight.requires_grad_(False)
    rest = [p for p in model.parameters() if p is not model.users.weight]
    training.optimizers = [SGD(rest, lr=0.1)]
    with place.agent(), _checkpointer(training, place) as ckpt:
        ckpt.restore()
        model.users.weight.requires_grad_(True)
        training.optimizers.append(Adagrad([model.users.weight], lr=0.1))
        train(training, ckpt, 1)
        assert not ckpt.checkpoint()
        assert "that train table 'users', although" in str(ckpt.stats.last_error)


@pytest.mark.parametrize("sparse", [False, True])
def test_checkpoints_go_on_once_that_optimizer_is_gone(sparse: bool, place: Place) -> None:
    """It has left nothing but the values that it has trained, and these are stored."""

    def build() -> Training:
        training = simple_training()
        model = training.model
        if sparse:
            for table in (model.users, model.items):
                table.sparse = True
        training.optimizers = [Adagrad(model.parameters(), lr=0.1)]
        return training

    training = build()
    (given,) = training.optimizers
    with place.agent(), _checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 2)
        assert ckpt.checkpoint()
        new = Adagrad(training.model.parameters(), lr=0.1)
        training.optimizers = [new]
        train(training, ckpt, 2)
        training.optimizers = [given]
        train(training, ckpt, 1)
        assert not ckpt.checkpoint(), "it may be used again"
        training.optimizers = [new]
        train(training, ckpt, 1)
        training.optimizers = [given]
        gone = weakref.ref(new)
        del new
        assert gone() is None
        assert not ckpt.checkpoint(), "another may have taken its place"
        train(training, ckpt, 1)
        assert ckpt.checkpoint()
        expected = everything(training)
        ckpt.close()
        assert ckpt.stats.committed == 2
    again = build()
    with place.agent(), checkpointer(again, place) as ckpt:
        report = ckpt.restore()
        assert report is not None and ckpt.batches_done == 7
        assert everything(again) == expected


class Outer(Optimizer):
    """Perturbs the weights before each step of the optimizer in it, and keeps something itself."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["before"] = parameter.detach().clone()
        self.inner.step()


class Shared(Outer):
    """Has the state of the optimizer in it."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self.state = inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def _other_model(training: Training) -> list[Optimizer]:
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    return [*training.optimizers, Adam(other.parameters())]


@pytest.mark.parametrize(
    "stepped",
    [
        pytest.param(_other_model, id="of another model"),
        pytest.param(lambda t: [Outer(t.optimizers[0])], id="around the one that was given"),
        pytest.param(lambda t: [Shared(t.optimizers[0])], id="with the same state"),
    ],
)
def test_optimizers_that_are_no_loss(
    stepped: Callable[[Training], list[Optimizer]], place: Place
) -> None:
    training = _training()
    ckpt = checkpointer(training, place, interval_batches=2, on_error="raise")
    with place.agent(), ckpt:
        ckpt.restore()
        training.optimizers = stepped(training)
        train(training, ckpt, 6)
    assert ckpt.stats.committed and not ckpt.stats.failed


def test_what_is_inside_the_one_that_was_given_must_have_its_state(place: Place) -> None:
    def wrapped(kind: Callable[[Optimizer], Optimizer]) -> Training:
        return _training(lambda p: kind(Adagrad(p, lr=0.1)))

    local = {"row_local_optimizers": (Outer,)}
    training = wrapped(Shared)
    with place.agent(), checkpointer(training, place, on_error="raise", **local) as ckpt:
        ckpt.restore()
        train(training, ckpt, 4)
    training = wrapped(Outer)
    with place.agent(), _checkpointer(training, place, **local) as ckpt:
        ckpt.restore(fresh=True)
        train(training, ckpt, 2)
        assert not ckpt.checkpoint()
        assert "an optimizer Adagrad: found steps" in str(ckpt.stats.last_error)


def test_an_optimizer_in_extras_is_known(place: Place) -> None:
    training = simple_training()
    model = training.model
    tables = SGD([model.users.weight, model.items.weight], lr=0.1)
    dense = Adam([*model.norm.parameters(), *model.top.parameters()])
    training.optimizers = [tables, SGD(model.top.parameters(), lr=0.1)]
    extras = {"dense": dense}
    ckpt = checkpointer(training, place, extras=extras, on_error="raise")
    with place.agent(), ckpt:
        ckpt.restore()
        training.optimizers.append(dense)
        train(training, ckpt, 4)
    assert ckpt.stats.committed and not ckpt.stats.failed


def test_gradient_scalers_and_schedulers_step_the_optimizer_itself(place: Place) -> None:
    training = _training()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    (optimizer,) = training.optimizers
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ckpt = checkpointer(
        training, place, on_error="raise", extras={"scaler": scaler}, schedulers=[scheduler]
    )
    with place.agent(), ckpt:
        ckpt.restore()
        for _ in range(4):
            users, items, target = next(training.reader)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(training.model(users, items), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            ckpt.step()
    assert ckpt.stats.committed and not ckpt.stats.failed


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_accelerate_wraps(place: Place) -> None:
    accelerate = pytest.importorskip("accelerate", reason="wraps an optimizer")
    training = _training()
    given = training.optimizers[0]
    prepared = accelerate.Accelerator(cpu=True).prepare(given)
    ckpt = checkpointer(training, place, on_error="raise")
    with place.agent(), ckpt:
        ckpt.restore()
        training.optimizers = [prepared]
        train(training, ckpt, 4)
    assert ckpt.stats.committed and not ckpt.stats.failed
    training.optimizers = [prepared]
    with pytest.raises(SettingsError, match="AcceleratedOptimizer, which trains table") as refused:
        checkpointer(training, place)
    assert "the optimizer inside the wrapper" in refused.value.next_step


def test_what_accelerate_wraps_may_be_given_for_dense_layers(place: Place) -> None:
    accelerate = pytest.importorskip("accelerate", reason="wraps an optimizer")
    for make in (Adam, SGD):  # with a state, and without
        training = simple_training()
        model = training.model
        dense = [*model.norm.parameters(), *model.top.parameters()]
        prepared = accelerate.Accelerator(cpu=True).prepare(make(dense, lr=0.1))
        tables = SGD([model.users.weight, model.items.weight], lr=0.1)
        training.optimizers = [tables, prepared]
        ckpt = checkpointer(training, place, on_error="raise")
        with place.agent(), ckpt:
            ckpt.restore(fresh=True)
            train(training, ckpt, 4)
        assert ckpt.stats.committed and not ckpt.stats.failed


def test_a_model_whose_checkpointer_was_dropped_is_freed(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place)
    ckpt.restore()
    weight = weakref.ref(training.model.users.weight)
    ckpt.close(final=False)
    del ckpt, training
    gc.collect()
    assert weight() is None


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_an_unknown_optimizer_whose_steps_are_compiled(place: Place) -> None:
    training = _training()
    with place.agent(), _checkpointer(training, place) as ckpt:
        ckpt.restore()
        new = Adagrad(training.model.parameters(), lr=0.1)
        training.batch()
        torch.compile(new.step, backend="eager")()
        assert not ckpt.checkpoint()
        assert "an optimizer Adagrad: found steps" in str(ckpt.stats.last_error)


class Unreadable(SGD):
    """Its groups cannot be read once it has stepped."""

    @property
    def param_groups(self) -> Any:
        if self.__dict__.get("stepped"):
            raise RuntimeError("as good as any")
        return self.__dict__["groups"]

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.__dict__["groups"] = groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.__dict__["stepped"] = True


def test_an_optimizer_that_cannot_be_looked_at_ends_no_training(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    training = _training()
    with place.agent(), _checkpointer(training, place) as ckpt:
        ckpt.restore()
        training.batch()
        other = Unreadable(training.model.parameters(), lr=0.1)
        other.step()
        assert not ckpt.checkpoint()
        assert "Unreadable: found steps" in str(ckpt.stats.last_error)
        assert "as good as any" in str(ckpt.stats.last_error)


class Fails(Adagrad):
    """Ends its step with an error when it has trained."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        raise KeyboardInterrupt


def test_a_step_that_did_not_end_is_noticed_at_the_next_cut(place: Place) -> None:
    training = _training()
    with place.agent(), _checkpointer(training, place) as ckpt:
        ckpt.restore()
        training.batch()
        new = Fails(training.model.parameters(), lr=0.1)
        with pytest.raises(KeyboardInterrupt):
            new.step()
        assert not ckpt.checkpoint()
        assert "an optimizer Fails: found steps" in str(ckpt.stats.last_error)
