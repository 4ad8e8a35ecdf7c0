"""Training a keyed table gives the bits of `nn.Embedding` with a row for each life of a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop, SparseAdam

from recpoint.embeddings.home.initial import Uniform
from recpoint.embeddings.keyed.embedding import KeyedEmbedding, KeyedEmbeddingBag
from recpoint.embeddings.keyed.eviction import Eviction, LeastRecent, LeastUsed
from recpoint.embeddings.tables.optimizers import row_states
from recpoint.errors import SettingsError

_DIM = 4
_INITIAL = Uniform(seed=5, low=-1, high=1)
_LIVES = 400

Made = Callable[[list[Tensor]], Optimizer]

_SPARSE: dict[str, Made] = {
    "SGD": lambda weights: SGD(weights, lr=0.3),
    "Adagrad": lambda weights: Adagrad(weights, lr=0.3, initial_accumulator_value=0.7),
    "SparseAdam": lambda weights: SparseAdam(weights, lr=0.3),
}
_DENSE: dict[str, Made] = {
    "SGD": lambda weights: SGD(weights, lr=0.3, momentum=0.9),
    "Adagrad": lambda weights: Adagrad(weights, lr=0.3),
    "Adam": lambda weights: Adam(weights, lr=0.3, amsgrad=True),
    "AdamW": lambda weights: AdamW(weights, lr=0.3, weight_decay=0),
    "NAdam": lambda weights: NAdam(weights, lr=0.3),
    "RMSprop": lambda weights: RMSprop(weights, lr=0.3, momentum=0.5),
}


class _Lives:
    """A plain table with a row for each life of a key, which is from its insertion to its eviction.

    Row 0 is that of keys without a row.
    """

    def __init__(self, keyed: KeyedEmbedding | KeyedEmbeddingBag, make: Made) -> None:
        self.keyed = keyed
        self.table = nn.Embedding(_LIVES, _DIM, padding_idx=0, sparse=keyed.sparse)
        self.optimizer = make([self.table.weight])
        self.rows: dict[int, int] = {}
        self.born = 0
        self.ttl_batches: int | None = None
        self.last_use: dict[int, int] = {}

    def follow(self, looked_up: Tensor) -> None:
        """Take note of the keys that came and went in one lookup of training."""
        steps = self.keyed.slots.steps
        if self.ttl_batches is not None:
            for key in list(self.rows):  # it may have left and come back in the lookup
                if self.last_use[key] < steps - self.ttl_batches:
                    del self.rows[key]
        self.last_use |= dict.fromkeys(looked_up.tolist(), steps)
        keys = self.keyed.keys().tolist()
        for key in self.rows.keys() - keys:
            del self.rows[key]
        for key in sorted(set(keys) - self.rows.keys()):
            self.born += 1
            self.rows[key] = self.born
            with torch.no_grad():
                self.table.weight[self.born] = _INITIAL(
                    "", torch.tensor([key]), _DIM, torch.float32
                )[0]

    def rows_of(self, keys: Tensor) -> Tensor:
        rows = [self.rows.get(key, 0) for key in keys.reshape(-1).tolist()]
        return torch.tensor(rows).view(keys.shape)


def _batches(seed: int, count: int = 30, size: int = 12) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        keys = torch.randint(0, 18, (size,), generator=generator) + number
        yield keys * 2**58 - 7  # keys of any size, some below zero


def _loss(rows: Tensor, keys: Tensor) -> Tensor:
    return ((rows * (keys % 5 + 1).view(-1, 1)).sum(1) - 1).square().mean()


def _compare(lives: _Lives, optimizer: Optimizer) -> None:
    keyed = lives.keyed
    keys = keyed.keys()
    slots, rows = keyed.slots.find(keys), lives.rows_of(keys)
    assert torch.equal(keyed.weight[slots], lives.table.weight[rows])
    states = row_states(optimizer.state[keyed.weight], len(keyed.weight))
    expected = row_states(lives.optimizer.state[lives.table.weight], _LIVES)
    assert states.keys() == expected.keys()
    for name, state in states.items():
        assert torch.equal(state[slots], expected[name][rows]), name


@pytest.mark.parametrize("evict", [LeastRecent(), LeastRecent(ttl_batches=2), LeastUsed()])
@pytest.mark.parametrize(
    ("sparse", "make"),
    [(True, make) for make in _SPARSE.values()] + [(False, make) for make in _DENSE.values()],
    ids=[*(f"{name}-sparse" for name in _SPARSE), *_DENSE],
)
def test_rows_and_states_are_those_of_a_row_for_each_life(
    evict: Eviction, sparse: bool, make: Made
) -> None:
    keyed = KeyedEmbedding(_DIM, 24, initial=_INITIAL, evict=evict, sparse=sparse)
    lives, optimizer = _Lives(keyed, make), make([keyed.weight])
    lives.ttl_batches = evict.ttl_batches
    for keys in _batches(1):
        optimizer.zero_grad()
        lives.optimizer.zero_grad()
        loss = _loss(keyed(keys), keys)
        lives.follow(keys)
        expected = _loss(lives.table(lives.rows_of(keys)), keys)
        assert torch.equal(loss, expected)
        for part, own_optimizer in ((loss, optimizer), (expected, lives.optimizer)):
            part.backward()
            own_optimizer.step()
        _compare(lives, optimizer)
    assert keyed.counts.evicted > 5


def test_gradients_of_several_lookups_add_up_before_a_step() -> None:
    keyed = KeyedEmbedding(_DIM, 40, initial=_INITIAL, sparse=True)
    make = _SPARSE["Adagrad"]
    lives, optimizer = _Lives(keyed, make), make([keyed.weight])
    for number, keys in enumerate(_batches(2)):
        loss = _loss(keyed(keys), keys)
        lives.follow(keys)
        loss.backward()
        _loss(lives.table(lives.rows_of(keys)), keys).backward()
        if number % 3 == 2:
            for own_optimizer in (optimizer, lives.optimizer):
                own_optimizer.step()
                own_optimizer.zero_grad()
            _compare(lives, optimizer)
    assert keyed.slots.steps == 10
    assert keyed.counts.evicted > 5


@pytest.mark.parametrize("sparse", [True, False])
def test_a_gradient_that_is_set_to_zero_late_is_not_that_of_the_next_key(sparse: bool) -> None:
    # The loop looks the next batch up, and only then sets the gradient of the last one to zero.
    keyed = KeyedEmbedding(_DIM, 24, initial=_INITIAL, sparse=sparse)
    make = _SPARSE["Adagrad"]
    lives, optimizer = _Lives(keyed, make), make([keyed.weight])
    for keys in _batches(3):
        losses = [_loss(keyed(keys), keys)]
        lives.follow(keys)
        losses.append(_loss(lives.table(lives.rows_of(keys)), keys))
        for loss, own_optimizer in zip(losses, (optimizer, lives.optimizer), strict=True):
            own_optimizer.zero_grad(set_to_none=False)
            loss.backward()
            own_optimizer.step()
        _compare(lives, optimizer)
    assert keyed.counts.evicted > 5


@pytest.mark.parametrize("sparse", [True, False])
def test_an_evicted_row_takes_its_old_gradient_along(sparse: bool) -> None:
    keyed = KeyedEmbedding(_DIM, 1, initial=_INITIAL, sparse=sparse)
    optimizer = SGD([keyed.weight], lr=1.0)
    keyed(torch.tensor([7])).sum().backward()
    optimizer.step()
    keyed(torch.tensor([8]))  # the gradient of key 7 is still there
    optimizer.step()
    keyed.eval()
    expected = _INITIAL("", torch.tensor([8]), _DIM, torch.float32)
    assert torch.equal(keyed(torch.tensor([8])), expected)


def test_a_step_that_the_scaler_skips_is_no_step_of_the_clock() -> None:
    keyed = KeyedEmbedding(_DIM, 24, initial=_INITIAL)
    make = _DENSE["Adam"]
    lives, optimizer = _Lives(keyed, make), make([keyed.weight])
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    skipped = 0
    for number, keys in enumerate(_batches(4)):
        optimizer.zero_grad()
        lives.optimizer.zero_grad()
        factor = float("inf") if number in (3, 4, 9) else 1.0
        loss = _loss(keyed(keys), keys) * factor
        lives.follow(keys)
        expected = _loss(lives.table(lives.rows_of(keys)), keys) * factor
        before = keyed.slots.steps
        for part, own_optimizer, scaler in zip(
            (loss, expected), (optimizer, lives.optimizer), scalers, strict=True
        ):
            scaler.scale(part).backward()
            scaler.step(own_optimizer)
            scaler.update()
        skipped += keyed.slots.steps == before
        _compare(lives, optimizer)
    assert skipped == 3
    assert keyed.counts.evicted > 5


def test_a_closure_may_look_keys_up() -> None:
    keyed = KeyedEmbedding(_DIM, 24, initial=_INITIAL, sparse=True)
    make = _SPARSE["Adagrad"]
    lives, optimizer = _Lives(keyed, make), make([keyed.weight])
    for keys in _batches(5):

        def closure(keys: Tensor = keys) -> float:
            optimizer.zero_grad()
            loss = _loss(keyed(keys), keys)
            loss.backward()
            return loss.item()

        optimizer.step(closure)
        lives.follow(keys)
        lives.optimizer.zero_grad()
        _loss(lives.table(lives.rows_of(keys)), keys).backward()
        lives.optimizer.step()
        _compare(lives, optimizer)
    assert keyed.counts.evicted > 5


def test_evaluation_between_batches_changes_nothing() -> None:
    tables = [KeyedEmbedding(_DIM, 24, initial=_INITIAL, sparse=True) for _ in range(2)]
    optimizers = [_SPARSE["SparseAdam"]([table.weight]) for table in tables]
    for number, keys in enumerate(_batches(6)):
        for table, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            if table is tables[1]:
                table.eval()
                read = table(torch.arange(-50, 50) * 2**58 - 7)
                assert not read.requires_grad
                table.train()
                with torch.inference_mode(number % 2 == 0), torch.no_grad():
                    table(torch.arange(100))
            _loss(table(keys), keys).backward()
            optimizer.step()
    states = [table.state_dict() for table in tables]
    assert torch.equal(states[0]["weight"], states[1]["weight"])
    extra: list[Any] = [state["_extra_state"] for state in states]
    for name, values in extra[0].pop("row_states").items():
        assert torch.equal(values, extra[1]["row_states"][name])
    del extra[1]["row_states"]
    assert extra[0] == extra[1]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("sparse", [True, False])
def test_bags_are_those_of_torch(mode: Any, sparse: bool) -> None:
    if mode == "max" and sparse:
        pytest.skip("torch has no sparse gradient of maxima")
    generator = torch.Generator().manual_seed(7)
    keyed = KeyedEmbeddingBag(_DIM, 65, mode=mode, initial=_INITIAL, sparse=sparse)
    plain = nn.EmbeddingBag(66, _DIM, mode=mode, sparse=sparse, padding_idx=0)
    with torch.no_grad():
        plain.weight.zero_()
    optimizers = [Adagrad(module.parameters(), lr=0.3) for module in (keyed, plain)]
    for number in range(12):
        keys = torch.randint(0, 10, (20,), generator=generator) + 5 * number
        offsets = torch.tensor([0, 3, 3, 11], dtype=torch.int32 if number % 2 else torch.int64)
        weights = torch.rand(20, generator=generator)
        sample_weights = weights.requires_grad_() if mode == "sum" and number % 3 else None
        if number % 2:
            keys = keys.int()
        known = keyed.has_row(keys)
        out = keyed(keys, offsets, sample_weights)
        slots = keyed.slots.find(keys.long())
        with torch.no_grad():
            new = torch.unique(slots[~known])
            plain.weight[new] = keyed.weight[new]
        expected_weights = None if sample_weights is None else weights.detach().requires_grad_()
        expected = plain(slots, offsets.long(), expected_weights)
        assert torch.equal(out, expected)
        for bags, optimizer in zip((out, expected), optimizers, strict=True):
            optimizer.zero_grad()
            bags.square().sum().backward()
            optimizer.step()
        assert torch.equal(keyed.weight, plain.weight)
        if expected_weights is not None:
            assert sample_weights is not None and sample_weights.grad is not None
            assert expected_weights.grad is not None
            assert torch.equal(sample_weights.grad, expected_weights.grad)


def test_bags_of_a_matrix_are_its_rows() -> None:
    keyed = KeyedEmbeddingBag(_DIM, 9, mode="sum", initial=_INITIAL)
    keys = torch.tensor([[5, -5], [2**63 - 1, 5]])
    expected = _INITIAL("", keys.view(-1), _DIM, torch.float32).view(2, 2, _DIM).sum(1)
    assert torch.equal(keyed(keys), expected)


@pytest.mark.parametrize("is_training", [True, False])
def test_gradients_of_sample_weights_are_of_the_rows_at_the_lookup(is_training: bool) -> None:
    initial = Uniform(low=1, high=2)
    keyed = KeyedEmbeddingBag(1, 4, mode="sum", initial=initial)
    optimizer = SGD([keyed.weight], lr=0.0)
    keyed(torch.tensor([[5, 6]]))
    optimizer.step()
    keyed.train(is_training)
    weights = torch.ones(1, 3, requires_grad=True)
    bags = keyed(torch.tensor([[5, 6, 9]]), None, weights)
    values = initial("", torch.tensor([5, 6, 9]), 1, torch.float32).view(1, 3)
    values[0, 2] *= is_training  # else key 9 has no row
    keyed.train()
    # Not in training, the rows of 5 and 6 leave before the backward pass.
    keyed(torch.tensor([[7] if is_training else [7, 8, 10, 11]]))
    bags.sum().backward()
    assert weights.grad is not None
    assert torch.equal(weights.grad, values)


# torch hides the warning by a filter that does not help where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_model_trains_as_the_model_does() -> None:
    torch.manual_seed(1)
    layer = nn.Linear(_DIM, 1)
    tables = [KeyedEmbedding(_DIM, 24, initial=_INITIAL, sparse=True) for _ in range(2)]
    models: list[Any] = [nn.Sequential(table, layer) for table in tables]
    models[1] = torch.compile(models[1], backend="eager")
    optimizers = [_SPARSE["Adagrad"]([table.weight]) for table in tables]
    for keys in _batches(8, count=16):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(keys).square().sum().backward()
            optimizer.step()
    assert tables[1].counts.evicted > 0
    assert torch.equal(tables[0].keys(), tables[1].keys())
    assert torch.equal(tables[0].weight, tables[1].weight)


@pytest.mark.parametrize("kind", [KeyedEmbedding, KeyedEmbeddingBag])
def test_a_plain_table_has_the_rows_of_a_vocabulary(kind: Any) -> None:
    keyed = kind(_DIM, 9, initial=_INITIAL, sparse=True)
    keyed(torch.tensor([[5, 2**63 - 1, -5]]))
    vocabulary = torch.tensor([-5, 77, 5, -5])
    plain = keyed.to_table(vocabulary)
    assert plain.sparse and plain.weight.requires_grad
    keyed.eval()
    places = torch.arange(4)
    if kind is KeyedEmbedding:
        assert torch.equal(plain(places), keyed(vocabulary))
    else:
        assert torch.equal(plain(places[:, None]), keyed(vocabulary[:, None]))
    with pytest.raises(SettingsError, match="one or more keys in a row"):
        keyed.to_table(vocabulary[:0])


def test_first_values_are_those_of_the_key_whatever_the_slot() -> None:
    small, large = (KeyedEmbedding(_DIM, rows, initial=_INITIAL, name="a") for rows in (2, 90))
    optimizer = SGD([small.weight], lr=0.0)
    for batch in ([4, 3], [-9, 7]):
        small(torch.tensor(batch))
        optimizer.step()
    large(torch.arange(50))
    keys = torch.tensor([7, -9])
    assert torch.equal(small(keys), large(keys))
    expected = _INITIAL("a", keys, _DIM, torch.float32)
    assert torch.equal(small(keys), expected)
