"""Gradients of cached tables have the bits of plain tables, however the rows are looked up."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, SparseAdam
from torch.utils.checkpoint import checkpoint

from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.install import cached, read_rows
from recpoint.embeddings.cache.lookup_hooks import cache_of
from recpoint.embeddings.home.homes import local
from recpoint.errors import SettingsError
from tests.cached_training import RowWiseAdagrad, as_bits
from tests.combinations import combinations

ROWS, DIM, SLOTS = 211, 5, 90

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda weights: SGD(weights, lr=0.5),
    "adagrad": lambda weights: Adagrad(weights, lr=0.1),
    "sparse adam": lambda weights: SparseAdam(weights, lr=0.01),
    "row-wise adagrad": lambda weights: RowWiseAdagrad(weights),
}


class Towers(nn.Module):
    """Towers that share a table, each with a layer of its own."""

    def __init__(
        self, *, bag: bool = False, padding: int | None = None, sparse: bool = True
    ) -> None:
        super().__init__()
        kind: Any = nn.EmbeddingBag if bag else nn.Embedding
        form = {"mode": "sum"} if bag else {}
        self.table = kind(ROWS, DIM, sparse=sparse, padding_idx=padding, **form)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def tower(self, number: int, ids: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.layers[number](self.table(ids)))
        return found

    def forward(self, towers: list[Tensor]) -> Tensor:
        outputs = [self.tower(number, ids) for number, ids in enumerate(towers)]
        loss: Tensor = torch.stack(outputs).prod(0).sum() + torch.stack(outputs).square().sum()
        return loss


def pair(**form: Any) -> tuple[Towers, Towers, Cache]:
    """A plain model, and the same one in a cache."""
    torch.manual_seed(11)
    plain = Towers(**form)
    model = copy.deepcopy(plain)
    cached(model, local(), SLOTS, row_local_optimizers=(RowWiseAdagrad,))
    cache = cache_of(model)
    assert cache is not None
    return plain, model, cache


def towers(count: int, seed: int, shape: tuple[int, ...] = (4, 3)) -> list[Tensor]:
    """Ids of each tower: skewed, so that they meet within a tower and between towers."""
    drawn = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(shape, generator=drawn).square() * ROWS).to(torch.int64) for _ in range(count)
    ]


Train = Callable[[Towers, torch.optim.Optimizer, int], None]


def same(plain: Towers, model: Towers, train: Train, optimizer: str = "sgd") -> None:
    """Train both, and compare all bits of rows and row states."""
    own = OPTIMIZERS[optimizer]([plain.table.weight])
    other = OPTIMIZERS[optimizer]([model.table.weight])
    for number in range(12):
        train(plain, own, number)
        train(model, other, number)
        found, expected = (
            read_rows(one, "table", of) for one, of in ((model, other), (plain, own))
        )
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert torch.equal(as_bits(array), as_bits(found[name])), (number, name)


def stepped(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("lookups", "optimizer"),
    combinations(list(itertools.product([2, 3, 4], [False, True], [None, 2])), list(OPTIMIZERS)),
)
def test_several_lookups_in_one_pass(lookups: tuple[int, bool, int | None], optimizer: str) -> None:
    count, bag, padding = lookups
    plain, model, cache = pair(bag=bag, padding=padding)

    def train(model: Towers, optimizer: torch.optim.Optimizer, number: int) -> None:
        model(towers(count, number)).backward()
        stepped(optimizer)

    same(plain, model, train, optimizer)
    assert cache.stats.written_rows > 0  # rows have other slots than in the beginning


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bag", [False, True])
def test_several_passes_of_several_lookups(bag: bool, optimizer: str) -> None:
    def train(model: Towers, optimizer: torch.optim.Optimizer, number: int) -> None:
        for seed in range(3 * number, 3 * number + 3):
            model(towers(2 + seed % 3, seed)).backward()
        stepped(optimizer)

    same(*pair(bag=bag)[:2], train, optimizer)


@pytest.mark.parametrize("padding", [None, 2])
def test_a_graph_that_runs_again(padding: int | None) -> None:
    def train(model: Towers, optimizer: torch.optim.Optimizer, number: int) -> None:
        loss = model(towers(3, number))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=number % 2 == 0)
        stepped(optimizer)
        if number % 2 == 0:
            loss.backward()
            stepped(optimizer)

    same(*pair(padding=padding)[:2], train, "adagrad")


def test_lookups_whose_gradients_come_in_another_order() -> None:
    """The towers' outputs are used in another order than they are made."""

    def train(model: Towers, optimizer: torch.optim.Optimizer, number: int) -> None:
        first, second, third = towers(3, number)
        early, middle, late = model.tower(0, first), model.tower(1, second), model.tower(2, third)
        loss = (torch.cumsum(torch.exp(late), 0) * middle).sum()
        (loss + (torch.sin(torch.cos(early)) * early).sum()).backward()
        stepped(optimizer)

    same(*pair()[:2], train)


@pytest.mark.parametrize("reentrant", [False, True])
def test_lookups_that_are_made_again_for_a_backward_pass(reentrant: bool) -> None:
    def train(model: Towers, optimizer: torch.optim.Optimizer, number: int) -> None:
        first, second, third = towers(3, number)
        on = torch.ones((), requires_grad=True)  # reentrant checkpoints need an input with one

        def part(on: Tensor) -> Tensor:
            return on * model.tower(0, first) * model.tower(1, second)

        kept: Any = checkpoint(part, on, use_reentrant=reentrant)
        (kept * model.tower(2, third) + model.tower(3, first)).square().sum().backward()
        stepped(optimizer)

    same(*pair()[:2], train, "adagrad")


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:
            return given.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise OverflowError

    def train(model: Towers, optimizer: torch.optim.Optimizer, number: int) -> None:
        ids = towers(2, number)
        with pytest.raises(OverflowError):
            # The gradient of the second lookup is there when that of the first fails.
            (Failing.apply(model.table(ids[0])) * model.table(ids[1])).sum().backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.zero_grad()
        model(ids).backward()
        stepped(optimizer)

    same(*pair()[:2], train)


def test_gradients_that_are_asked_for() -> None:
    """`torch.autograd.grad` gives the gradient of the slots, added by the rows' ids."""
    plain, model, cache = pair()
    for seed in range(6):
        ids = towers(3, seed)
        (expected,) = torch.autograd.grad(plain(ids), [plain.table.weight])
        (found,) = torch.autograd.grad(model(ids), [model.table.weight])
        found = cache.tables["table"].slots.by_ids(found)
        assert torch.equal(found._indices(), expected._indices())
        assert torch.equal(as_bits(found._values()), as_bits(expected._values()))


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_gradients(sparse: bool) -> None:
    def train(model: Towers, optimizer: torch.optim.Optimizer, number: int) -> None:
        ids = towers(1, number)
        (gradient,) = torch.autograd.grad(model(ids), [model.table.weight], create_graph=True)
        gradient.to_dense().square().sum().backward()
        stepped(optimizer)

    same(*pair(sparse=sparse)[:2], train)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # from torch, at a graph break
@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_compiled_towers(sparse: bool, bag: bool) -> None:
    plain, model, _ = pair(bag=bag, sparse=sparse)
    model.compile(backend="eager")

    def train(model: Towers, optimizer: torch.optim.Optimizer, number: int) -> None:
        model(towers(3, number)).backward()
        stepped(optimizer)

    same(plain, model, train)


@pytest.mark.parametrize("bag", [False, True])
def test_frozen_tables_get_no_gradient(bag: bool) -> None:
    plain, model, _ = pair(bag=bag)

    def train(model: Towers, optimizer: torch.optim.Optimizer, number: int) -> None:
        model.table.weight.requires_grad_(number % 3 > 0)
        model(towers(2, number)).backward()
        assert (model.table.weight.grad is None) == (number % 3 == 0)
        stepped(optimizer)

    same(plain, model, train)


USES: dict[str, Callable[[nn.Embedding, Tensor], Tensor]] = {
    "a lookup": lambda table, ids: nn.functional.embedding(ids, table.weight),
    "scores": lambda table, ids: table(ids) @ table.weight.t(),
    "a penalty": lambda table, ids: table(ids).sum() + table.weight.square().sum(),
    "a sparse lookup": lambda table, ids: (
        table(ids) + nn.functional.embedding(ids, table.weight, sparse=True)
    ),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("sparse", [False, True])
def test_other_uses_of_the_weight_are_refused(sparse: bool, use: str) -> None:
    _, model, _ = pair(sparse=sparse)
    ids = towers(1, 0)
    loss = USES[use](model.table, ids[0] % SLOTS).sum()
    with pytest.raises(SettingsError, match="cached table 'table'.*another use of the weight"):
        loss.backward()
    assert model.table.weight.grad is None
    model(ids).backward()
    assert model.table.weight.grad is not None


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_gradients_that_a_hook_of_the_step_drops(
    optimizer: str, sparse: bool, set_to_none: bool
) -> None:
    def train(model: Towers, optimizer: torch.optim.Optimizer, number: int) -> None:
        model(towers(2, number)).backward()
        handle = optimizer.register_step_post_hook(
            lambda optimizer, *_: optimizer.zero_grad(set_to_none=set_to_none)
        )
        optimizer.step()
        handle.remove()

    same(*pair(sparse=sparse)[:2], train, optimizer)
