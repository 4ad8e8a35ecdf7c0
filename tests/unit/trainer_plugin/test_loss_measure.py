"""A measurement gives the losses of a model with rounded rows, and leaves no trace of itself."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from recpoint.errors import SettingsError
from recpoint.trainer_plugin.loss.measure import MeasuredModel, RoundedTable
from recpoint.trainer_plugin.loss.measure import measure as measure_model
from recpoint.trainer_plugin.loss.price import LossPair
from tests.training_builder import Batches, Recommender, seed_everything

Batch = tuple[Tensor, Tensor, Tensor]


def measure(model: nn.Module, batch: Any, of: Any, tables: Sequence[RoundedTable]) -> LossPair:
    return measure_model(MeasuredModel(module=model), batch, of, tables)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    users, items, target = batch
    return functional.mse_loss(model(users, items), target)


def rounded(name: str, weight: Tensor, step: float = 0.25) -> RoundedTable:
    """Return a table whose values are stored as multiples of a step."""

    def decoded(ids: Tensor) -> Tensor:
        return (weight.detach()[ids] / step).round() * step

    return RoundedTable(name=name, weight=weight, decoded=decoded)


def tables_of(model: nn.Module) -> list[RoundedTable]:
    return [
        rounded(name, module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]


def by_hand(
    model: nn.Module, batch: Any, of: Callable[[nn.Module, Any], Tensor], sign: int
) -> float:
    """Return the loss of a copy whose tables have their errors added (1) or taken off (-1)."""
    changed = copy.deepcopy(model)
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with torch.no_grad():
        for table in tables_of(changed):
            error = table.decoded(torch.arange(len(table.weight))) - table.weight
            table.weight.add_(sign * error)
        loss = float(of(changed, batch))
    torch.set_rng_state(generators[0])
    random.setstate(generators[1])
    np.random.set_state(generators[2])
    return loss


def assert_measured(model: nn.Module, batch: Any, of: Callable[[nn.Module, Any], Tensor]) -> None:
    pair = measure(model, batch, of, tables_of(model))
    plain, added, taken_off = (by_hand(model, batch, of, sign) for sign in (0, 1, -1))
    assert pair.loss == plain
    assert pair.even == pytest.approx(0.5 * (added + taken_off) - plain, abs=1e-6)
    assert pair.odd == pytest.approx(0.5 * (added - taken_off), abs=1e-6)
    assert abs(pair.even) > 1e-5 and abs(pair.odd) > 1e-5  # the rounding is felt


def batch_of(seed: int) -> Batch:
    seed_everything(seed)
    return next(Batches(seed))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("training", (True, False))
def test_losses_are_those_of_a_model_with_rounded_rows(training: bool, dtype: torch.dtype) -> None:
    seed_everything(3)
    model = Recommender(dtype=dtype).train(training)
    assert_measured(model, batch_of(4), loss_of)


class Lookups(nn.Module):
    """Looks rows up in one of many ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        kind, _, options = way.partition(" ")
        words = options.split()
        self.table: nn.Embedding | nn.EmbeddingBag
        if kind == "bag":
            mode = next((word for word in words if word in ("sum", "mean", "max")), "mean")
            self.table = nn.EmbeddingBag(
                40,
                4,
                mode=mode,
                padding_idx=7 if "padding" in words else None,
                include_last_offset="last" in words,
                sparse="sparse" in words,
            )
        else:
            padding = 7 if "padding" in words else None
            self.table = nn.Embedding(40, 4, padding_idx=padding, sparse="sparse" in words)

    def forward(self, ids: Tensor) -> Tensor:
        table, way = self.table, self.way
        if way == "function":
            return functional.embedding(ids, table.weight)
        if way == "columns":
            apart: Tensor = table(ids.T.contiguous().T)  # ids that do not lie in a row
            return apart
        if way == "function detached":
            return functional.embedding(ids, table.weight.detach())
        if way == "function bag":
            return functional.embedding_bag(ids, table.weight, mode="max")
        if "weights" in way:
            scores: Tensor = table(
                ids, per_sample_weights=torch.linspace(0.1, 2, ids.numel()).view_as(ids)
            )
            return scores
        if "last" in way:
            scores = table(ids.reshape(-1), torch.tensor([0, 2, 2, ids.numel()]))
            return scores
        if "offsets" in way:
            scores = table(ids.reshape(-1), torch.tensor([0, 2, 2, 5]))
            return scores
        scores = table(ids)
        return scores


WAYS = (
    *("embedding", "embedding padding", "embedding sparse"),
    *("bag sum", "bag mean", "bag max", "bag sum padding", "bag mean padding", "bag max padding"),
    *(
        "bag mean offsets",
        "bag sum last",
        "bag sum weights",
        "bag sum sparse",
        "bag mean last padding",
    ),
    *("function", "function detached", "function bag", "columns"),
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ids_dtype", (torch.int64, torch.int32))
def test_each_way_to_look_rows_up_is_measured(way: str, ids_dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    model = Lookups(way)
    with torch.no_grad():
        model.table.weight[7] = 0.3  # padding is not zero for ever
    ids = torch.tensor([[3, 7, 39], [7, 7, 7], [0, 3, 20]], dtype=ids_dtype)
    assert_measured(model, ids, lambda model, ids: (model(ids) ** 2).sum())


@pytest.mark.parametrize("way", WAYS)
def test_lookups_in_inference_mode_are_measured_alike(way: str) -> None:
    torch.manual_seed(5)
    model = Lookups(way)
    ids = torch.tensor([[3, 7, 39], [7, 7, 7], [0, 3, 20]])

    def of(model: nn.Module, ids: Tensor) -> Tensor:
        loss: Tensor = (model(ids) ** 2).sum()
        return loss

    def of_inference(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            return of(model, ids)

    pair = measure(model, ids, of, tables_of(model))
    assert measure(model, ids, of_inference, tables_of(model)) == pair
    with torch.inference_mode():
        assert measure(model, ids, of, tables_of(model)) == pair


def test_a_scripted_and_a_compiled_model_are_measured() -> None:
    torch.manual_seed(5)
    ids = torch.tensor([[3, 7, 39], [0, 3, 20]])
    table = nn.Embedding(40, 4)
    plain = nn.Sequential(table, nn.Linear(4, 2))

    def of(model: nn.Module, ids: Tensor) -> Tensor:
        loss: Tensor = (model(ids) ** 2).sum()
        return loss

    expected = measure(plain, ids, of, tables_of(plain))
    compiled: Any = torch.compile(plain, backend="eager")
    compiled(ids)  # has a graph now
    assert measure(compiled, ids, of, tables_of(plain)) == expected
    scripted: Any = torch.jit.script(plain)
    assert measure(scripted, ids, of, [rounded("0", table.weight)]) == expected


def test_a_batch_that_looks_nothing_up_costs_nothing() -> None:
    model = nn.Sequential(nn.Embedding(40, 4))
    pair = measure(model, None, lambda *_: torch.tensor(0.5), tables_of(model))
    assert (pair.loss, pair.even, pair.odd) == (0.5, 0.0, 0.0)


def test_nothing_has_changed_afterwards() -> None:
    seed_everything(8)
    model, batch = Recommender(sparse=True), batch_of(9)
    model.top.eval()  # modes differ between modules
    loss_of(model, batch).backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parts = [*model.parameters(), *model.buffers()]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    versions = [parameter._version for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def of(model: nn.Module, batch: Batch) -> Tensor:
        model.eval()
        model.train()
        noise = random.random() + float(np.random.standard_normal()) + float(torch.rand(1))
        return loss_of(model, batch) + noise**2

    measure(model, batch, of, tables_of(model))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    assert all(a is b for a, b in zip(parts, [*model.parameters(), *model.buffers()], strict=True))
    assert versions == [parameter._version for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        if gradient is not None:
            assert parameter.grad is not None
            assert torch.equal(parameter.grad.to_dense(), gradient.to_dense())
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()
    assert repr(generators[2]) == repr(np.random.get_state())
    assert torch.is_grad_enabled()


class KeepsBuffers(nn.Module):
    """Replaces, adds and rewrites buffers in each forward pass."""

    seen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 2)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("mean", torch.ones(3))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen = self.seen + 1
        self.mean.data.mul_(2)  # torch does not count this change
        self.register_buffer("late", torch.ones(1))
        scores: Tensor = self.table(ids).sum() * self.seen[0] * self.mean.sum()
        return scores


def test_buffers_are_put_back_before_each_pass() -> None:
    model = KeepsBuffers()
    seen, mean = model.seen, model.mean
    ids = torch.tensor([1, 4])
    pair = measure(model, ids, lambda model, ids: model(ids) ** 2, tables_of(model))
    assert pair.loss == pytest.approx(float((model.table(ids).detach().sum() * 6) ** 2))
    assert model.seen is seen and model.mean is mean and "late" not in model._buffers
    assert seen.tolist() == [0, 0] and mean.tolist() == [1, 1, 1]


@pytest.mark.parametrize("error", (ValueError, KeyboardInterrupt))
def test_nothing_has_changed_after_an_error(error: type[BaseException]) -> None:
    seed_everything(8)
    model, batch = Recommender(), batch_of(9)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    calls: list[None] = []

    def of(model: nn.Module, batch: Batch) -> Tensor:
        loss_of(model, batch)
        calls.append(None)
        if len(calls) == 2:
            raise error
        return torch.tensor(1.0)

    with pytest.raises(error):
        measure(model, batch, of, tables_of(model))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    assert torch.equal(generator, torch.get_rng_state()) and torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("of", "found"),
    (
        (lambda model, _: model.users.weight.sum(), "aten.sum.default"),
        (lambda model, _: model.users.weight[torch.tensor([1])].sum(), "aten.index.Tensor"),
        (lambda model, _: (model.users.weight.data * 2).sum(), "aten.mul.Tensor"),
        (lambda model, _: functional.linear(torch.ones(6), model.users.weight).sum(), "aten.t."),
        (lambda model, _: torch.cat([model.users.weight, torch.ones(1, 6)]).sum(), "aten.cat"),
        (
            lambda model, _: functional.embedding(
                torch.tensor([1]), model.users.weight, max_norm=0.1
            ).sum(),
            "embedding_renorm_",
        ),
        (
            lambda model, _: functional.embedding(torch.tensor([1]), model.users.weight[:5]).sum(),
            "aten.slice",
        ),
    ),
)
def test_a_use_that_cannot_be_replaced_is_refused(
    of: Callable[[nn.Module, Any], Tensor], found: str
) -> None:
    seed_everything(2)
    model = Recommender()
    weight_before = model.users.weight.detach().clone()
    with pytest.raises(SettingsError, match="'users'") as refused:
        measure(model, None, of, tables_of(model))
    assert found in str(refused.value)
    assert torch.equal(model.users.weight, weight_before)


@pytest.mark.parametrize(
    ("of", "found"),
    (
        (lambda *_: 0.5, "a float"),
        (lambda *_: torch.ones(2), "shape \\(2,\\)"),
        (lambda *_: torch.tensor(-0.5), "-0.5"),
        (lambda *_: torch.tensor(0.0), "0.0"),
    ),
)
def test_what_is_no_loss_is_refused(of: Callable[..., Any], found: str) -> None:
    with pytest.raises(SettingsError, match=found):
        measure(nn.Linear(1, 1), None, of, [])


def test_a_function_that_trains_is_refused() -> None:
    seed_everything(2)
    model, batch = Recommender(), batch_of(1)

    def steps(_: nn.Module, batch: Batch) -> Tensor:
        model.top.weight.mul_(0.5)
        return torch.tensor(1.0)

    def has_gradients(_: nn.Module, batch: Batch) -> Tensor:
        model.top.weight.grad = torch.ones_like(model.top.weight)
        return torch.tensor(1.0)

    for of in (steps, has_gradients):
        with pytest.raises(SettingsError, match="changes parameters or their gradients"):
            measure(model, batch, of, tables_of(model))


def test_a_function_that_switches_gradients_on_is_refused_before_it_looks_rows_up() -> None:
    seed_everything(2)
    model, batch = Recommender(), batch_of(1)

    def of(model: nn.Module, batch: Batch) -> Tensor:
        with torch.enable_grad():
            loss = loss_of(model, batch)
            loss.backward()
        return loss.detach()

    with pytest.raises(SettingsError, match="switches gradients on"):
        measure(model, batch, of, tables_of(model))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_passes_that_look_up_different_rows_are_refused() -> None:
    model = nn.Embedding(10, 2)
    calls: list[None] = []

    def of(model: nn.Module, batch: None) -> Tensor:
        calls.append(None)
        loss: Tensor = (model(torch.tensor([len(calls)])) ** 2).sum()
        return loss

    with pytest.raises(SettingsError, match="look up different rows"):
        measure(model, None, of, [rounded("table", model.weight)])


def test_a_loss_that_is_no_number_is_returned_as_it_is() -> None:
    model = nn.Embedding(10, 2)

    def of(model: nn.Module, ids: Tensor) -> Tensor:
        loss: Tensor = model(ids).sum() * torch.nan
        return loss

    pair = measure(model, torch.tensor([1]), of, [rounded("table", model.weight)])
    assert np.isnan(pair.loss) and np.isnan(pair.even)
