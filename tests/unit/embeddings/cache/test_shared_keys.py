"""Several trainers share the rows of keyed tables: results are those of whole tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import SGD

from recpoint import LeastRecent, LeastUsed, Lookahead, Probability, Seen
from recpoint.embeddings import Uniform
from recpoint.embeddings.cache.install import read_rows
from recpoint.embeddings.tables.optimizers import row_states
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.integrations.keyed import find
from tests.keyed_training import OPTIMIZERS, KeyedModel, KeyedReader, ids_of
from tests.several_trainers import added, present
from tests.simulated_trainers import Trainer, on_threads
from tests.training_builder import seed_everything

CAPACITY = 46
SLOTS = {2: 24, 3: 22, 4: 22}  # of users on each rank, by ranks

RULES: dict[str, dict[str, Any]] = {
    "recent": {},
    "ttl": {"evict": LeastRecent(ttl_batches=2)},
    "used": {"evict": LeastUsed()},
    "seen": {"evict": LeastUsed(), "admit": Seen(times=2)},
    "share": {"admit": Probability(share=0.6)},
}


class Reader(KeyedReader):
    """A reader of so many batches."""

    def __init__(self, rank: int, length: int) -> None:
        super().__init__(seed=rank, spread=50)
        self.length = length

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self.position == self.length:
            raise StopIteration
        return super().__next__()


def new_model(**form: Any) -> KeyedModel:
    seed_everything(1)
    return KeyedModel(CAPACITY, **form)


def optimizers_of(model: KeyedModel, optimizer: str, sparse: bool) -> list[Any]:
    tables = [model.users.weight, model.items.weight]
    return [OPTIMIZERS[optimizer](tables, sparse), SGD(model.top.parameters(), lr=0.1)]


def bits(tensors: Sequence[Tensor]) -> list[Any]:
    return [tensor.contiguous().view(-1).view(torch.uint8).tolist() for tensor in tensors]


def keys_of(model: KeyedModel) -> list[Any]:
    slots = model.users.slots
    state = slots.state_dict()
    admission = state["admission"].get("counts", torch.zeros(0))
    numbers = [*model.users.counts, state["steps"]]
    return [numbers, *bits([*slots.row_states.values(), admission])]


def alone(ranks: int, batches: int, optimizer: str, *, every: int, **form: Any) -> list[Any]:
    """Train with the batches of all ranks, and add the gradients in rank order.

    Args:
        every: so many batches have one step; then each batch has two lookups.
    """
    model = new_model(**form)
    users, sparse = model.users, form["sparse"]
    optimizers = optimizers_of(model, optimizer, sparse)
    readers = [Reader(rank, batches) for rank in range(ranks)]
    parameters = list(model.parameters())
    gradients: list[list[Any]] = [[None] * len(parameters) for _ in range(ranks)]
    for number in range(1, batches + 1):
        parts = [next(reader) for reader in readers]
        slots: list[list[Tensor]] = []
        for offset in range(min(every, 2)):
            users.slots.take(torch.unique(torch.cat([keys + offset for keys, _ in parts])))
            slots.append([users.slots.find(keys + offset) for keys, _ in parts])
        for rank, (keys, target) in enumerate(parts):
            for parameter, gradient in zip(parameters, gradients[rank], strict=True):
                parameter.grad = gradient
            rows = sum(
                functional.embedding(of_ranks[rank], users.weight, padding_idx=0, sparse=sparse)
                for of_ranks in slots
            )
            out = model.top(rows + model.items(keys % 9)).squeeze(1)
            functional.mse_loss(out, target).backward()
            gradients[rank] = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
        if number % every:
            continue
        for parameter, of_ranks in zip(parameters, zip(*gradients, strict=True), strict=True):
            parameter.grad = added([present(gradient) for gradient in of_ranks])
        gradients = [[None] * len(parameters) for _ in range(ranks)]
        for each in optimizers:
            each.step()
            each.zero_grad()
    states = row_states(optimizers[0].state.get(users.weight, {}), len(users.weight))
    rows_of_items = read_rows(model, "items", optimizers[0]).values()
    arrays = [users.weight.detach(), *states.values(), *rows_of_items, model.top.weight.detach()]
    return [keys_of(model), bits(arrays)]


def shared(
    trainer: Trainer, batches: int, optimizer: str, *, sparse: bool, window: int, every: int
) -> list[Any]:
    """Train this rank's batches, and return what all ranks have then."""
    model = trainer.model
    optimizers = optimizers_of(model, optimizer, sparse)
    reader = Lookahead(Reader(trainer.rank, batches), model, ids=ids_of, window=window)
    for number, (keys, target) in enumerate(reader, 1):
        rows = sum(model.users(keys + offset) for offset in range(min(every, 2)))
        out = model.top(rows + model.items(keys % 9)).squeeze(1)
        functional.mse_loss(out, target).backward()
        if number % 3 == 0:
            with torch.no_grad():  # rows of other batches, as an evaluation has them
                model.users(keys[:2] + trainer.rank)
        if number % every:
            continue
        for parameter in model.top.parameters():
            parameter.grad = trainer.averaged(present(parameter.grad))
        for each in optimizers:
            each.step()
            each.zero_grad()
    every_slot = torch.arange(CAPACITY + 1)
    arrays = [
        *trainer.cache.rows_of("users", every_slot),
        *read_rows(model, "items", optimizers[0]).values(),
        model.top.weight.detach(),
    ]
    assert trainer.cache.stats.written_rows > 5
    return [keys_of(model), bits(arrays)]


def of_ranks(results: Sequence[Any]) -> Iterator[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
        yield result


@pytest.mark.parametrize(
    ("rule", "optimizer", "sparse", "ranks", "window", "every"),
    [
        ("ttl", "adam", True, 2, 8, 1),
        ("seen", "adagrad", False, 2, 2, 2),
        *(
            pytest.param(*case, marks=pytest.mark.nightly("loops"))
            for case in (
                ("recent", "adagrad", True, 2, 3, 1),
                ("ttl", "adam", True, 3, 1, 1),
                ("used", "sgd", False, 2, 5, 1),
                ("seen", "adagrad", False, 4, 2, 1),
                ("share", "adagrad", True, 3, 8, 1),
                ("recent", "adagrad", False, 2, 2, 2),
                ("ttl", "sgd", True, 2, 2, 2),
            )
        ),
    ],
)
def test_ranks_have_the_rows_of_one_process(
    rule: str, optimizer: str, sparse: bool, ranks: int, window: int, every: int
) -> None:
    form = {"sparse": sparse, **RULES[rule]}
    expected = alone(ranks, 30, optimizer, every=every, **form)
    assert expected[0][0][2] > 9  # evicted
    results = on_threads(
        lambda trainer: shared(trainer, 30, optimizer, sparse=sparse, window=window, every=every),
        ranks=ranks,
        slots={"users": SLOTS[ranks] + 22 * (every - 1), "items": 9},
        new_model=new_model,
        **form,
    )
    for result in of_ranks(results):
        assert result[0] == expected[0]
        assert result[1] == expected[1]


def texts_of(act: Callable[[Trainer], object], **settings: Any) -> list[str]:
    """Return why each of two ranks is refused."""
    results = on_threads(
        act,
        slots=settings.pop("slots", {"users": 20, "items": 9}),
        new_model=settings.pop("new_model", new_model),
        sparse=True,
        **settings,
    )
    assert all(isinstance(result, SettingsError) for result in results), results
    return [str(result) for result in results]


def first_batch(trainer: Trainer) -> tuple[Tensor, Tensor]:
    reader = Lookahead(Reader(trainer.rank, 3), trainer.model, ids=ids_of, window=1)
    batch: tuple[Tensor, Tensor] = next(iter(reader))
    return batch


def test_lookups_outside_of_batches_are_refused() -> None:
    texts = texts_of(lambda trainer: trainer.model.users(torch.arange(3)))
    assert all("a lookup before the first batch of a Lookahead" in text for text in texts)


def test_keys_are_not_deleted_on_one_rank() -> None:
    def act(trainer: Trainer) -> None:
        trainer.model.users(first_batch(trainer)[0])
        source = find(trainer.model)
        assert source is not None
        source.tables[0].zero_rows(torch.tensor([1]), ())

    assert all("a reset of rows" in text for text in texts_of(act))


def test_ranks_that_do_different_things() -> None:
    def act(trainer: Trainer) -> None:
        keys, _ = first_batch(trainer)
        if trainer.rank:
            trainer.cache.rows_of("users", torch.arange(3))
        trainer.model.users(keys)

    results = texts_of(act)
    assert all("looks up keys in batch 1" in text for text in results)
    assert all("copies or reads rows after batch 1" in text for text in results)


def test_tables_with_other_rules_are_not_shared() -> None:
    seeds = iter((1, 2))

    def model(**form: Any) -> KeyedModel:
        built = new_model(**form)
        built.users.slots.rows.initial = Uniform(seed=next(seeds))
        return built

    texts = texts_of(lambda _: None, new_model=model)
    assert all("other tables, or other values in them" in text for text in texts)


def test_too_few_slots_are_named_on_all_ranks() -> None:
    texts = texts_of(
        lambda trainer: (first_batch(trainer), trainer.model.users(torch.arange(20) + 90)),
        slots={"users": 13, "items": 9},
    )
    assert all("keyed table 'users', which 2 ranks share" in text for text in texts)


def test_keys_of_an_interrupted_lookup_have_their_first_values() -> None:
    def act(trainer: Trainer) -> list[Any]:
        users = trainer.model.users
        first_batch(trainer)
        keys = torch.arange(5) + 700
        users.slots.take(keys)  # and no row was written
        users(torch.arange(3) + trainer.rank)
        rows: list[Any] = users(keys).tolist()
        return rows

    results = list(of_ranks(on_threads(act, slots={"users": 30}, new_model=new_model, sparse=True)))
    expected = new_model(sparse=True).users(torch.arange(5) + 700).tolist()
    assert results == [expected, expected]
