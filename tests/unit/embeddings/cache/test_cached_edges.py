"""Edge cases of training through a cache; results are those of training without one."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad

from recpoint import Lookahead
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.install import cached, read_rows
from recpoint.embeddings.cache.lookup_hooks import cache_of
from recpoint.embeddings.home.homes import local
from recpoint.embeddings.home.initial import fill
from recpoint.errors import SettingsError
from tests.cached_training import (
    INITIAL,
    ITEMS,
    USERS,
    Batches,
    Model,
    as_bits,
    cached_model,
    lookahead,
    plain_model,
    rows_of_cache,
    rows_of_plain,
    train,
)

SMALL = {"users": 30, "items": 40}


def pair(slots: dict[str, int] | int = SMALL, **form: Any) -> tuple[Model, Model, Cache]:
    """A plain model and one in a cache."""
    model, cache = cached_model(slots, **form)
    for name in ("is_meta", "row_local"):
        form.pop(name, None)
    return plain_model(**form), model, cache


def same(plain: Model, own: Any, cache: Cache) -> None:
    assert rows_of_plain(plain, own).differences(rows_of_cache(cache)) == []


def stepped(model: Model, optimizer: torch.optim.Optimizer, *losses: Tensor) -> None:
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def loss_of(model: Model, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch), batch["target"])


def test_another_models_optimizer_is_not_looked_at_after_its_step() -> None:
    _, cache = cached_model(SMALL)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    other = SGD([weight], lr=0.5)
    other.register_step_post_hook(lambda optimizer, *_: vars(optimizer).pop("param_groups"))
    other.step()
    assert weight.tolist() == [0.5, 0.5]
    cache.close()


class Counted(Adagrad):
    """Counts the steps of each row after the step of its base, whose hooks are called before."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                counts = self.state[parameter].setdefault("row_steps", torch.zeros_like(parameter))
                counts += (parameter.grad != 0).float()
        return loss


def test_what_a_step_changes_after_that_of_its_base_is_noticed() -> None:
    Adagrad([torch.zeros(1)])  # torch has the base's step call hooks, too
    plain, model, cache = pair(row_local=(Counted,))
    own, optimizer = (Counted(m.parameters(), lr=0.5) for m in (plain, model))
    for batch in Batches(4):
        stepped(plain, own, loss_of(plain, batch))
    for batch in lookahead(Batches(4), model, 2):
        stepped(model, optimizer, loss_of(model, batch))
    assert "row_steps" in cache.tables["users"].slots.states
    same(plain, own, cache)


# --- readers and epochs --------------------------------------------------------------------------


def test_epochs_end_and_begin() -> None:
    plain, model, cache = pair()
    own, optimizer = (SGD(m.parameters(), lr=0.5) for m in (plain, model))
    readers: list[Any] = [Batches(7), lookahead(Batches(7), model, 5)]
    for _ in range(4):
        losses: list[list[float]] = [[], []]
        for number, (m, o) in enumerate(((plain, own), (model, optimizer))):
            for batch in readers[number]:
                loss = loss_of(m, batch)
                stepped(m, o, loss)
                losses[number].append(loss.item())
        assert losses[0] == losses[1] and len(losses[0]) == 7
        assert cache.stats.window == 0  # nothing is planned beyond the end
        same(plain, own, cache)
    assert cache.stats.misses == 0


def test_an_epoch_that_is_left_early() -> None:
    plain, model, cache = pair()
    own, optimizer = (SGD(m.parameters(), lr=0.5) for m in (plain, model))
    assert train(plain, own, Batches(), batches=5) == train(
        model, optimizer, lookahead(Batches(), model, 9), batches=5
    )
    ahead = lookahead(Batches(seed=2), model, 9)
    for reader, m, o in ((Batches(seed=2), plain, own), (ahead, model, optimizer)):
        train(m, o, reader, batches=3)
        train(m, o, reader, batches=3)
    same(plain, own, cache)


def test_a_table_that_fits_wholly_is_never_written() -> None:
    plain, model, cache = pair({"users": USERS, "items": 10 * ITEMS})
    assert cache.tables["items"].slots.capacity == ITEMS
    own, optimizer = (Adagrad(m.parameters(), lr=0.1) for m in (plain, model))
    train(plain, own, Batches(), batches=80)
    train(model, optimizer, lookahead(Batches(), model, 300), batches=80)
    same(plain, own, cache)
    assert cache.stats.written_rows == cache.stats.misses == 0
    held = sum(len(rows.oracle.held()[0]) for rows in cache.tables.values())
    assert cache.stats.fetched_rows == held


def test_as_many_slots_as_one_batch_has_rows() -> None:
    needed = {"users": 0, "items": 0}
    for number in range(40):
        for name in needed:
            count = len(torch.unique(Batches().batch(number)[name]))
            needed[name] = max(needed[name], count)
    plain, model, cache = pair(needed)
    own, optimizer = (SGD(m.parameters(), lr=0.5) for m in (plain, model))
    train(plain, own, Batches(), batches=40)
    train(model, optimizer, lookahead(Batches(), model, 20), batches=40)
    same(plain, own, cache)
    _, model, _ = pair({**needed, "items": needed["items"] - 1})
    with pytest.raises(SettingsError, match=f"at least {needed['items']}"):
        train(model, SGD(model.parameters(), lr=0.5), lookahead(Batches(), model, 20), batches=40)


def test_a_view_that_is_made_before_the_first_write_back() -> None:
    """The home thread lays out a table's records when it first writes rows back."""
    gate = threading.Event()
    gate.set()

    def initial(table: str, ids: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        assert gate.wait(60)
        return torch.zeros(len(ids), dim, dtype=dtype)

    model = nn.ModuleDict({"users": nn.Embedding(9, 2, sparse=True, device="meta")})
    cached(model, local(), 4, initial=initial)
    cache = cache_of(model)
    assert cache is not None
    assert cache.plan({"users": torch.tensor([0, 1])}, is_next=True)
    cache.begin_batch()
    model["users"](torch.tensor([0, 1])).sum().backward()
    optimizer = SGD(model.parameters(), lr=1.0)
    optimizer.step()
    cache.end_batch()
    gate.clear()  # the home thread waits for first values; rows 0 and 1 leave after that
    assert cache.plan({"users": torch.tensor([2, 3])})
    assert cache.plan({"users": torch.tensor([4, 5])})
    view = cache.view()
    values = torch.full((9, 2), 7.0)
    view.fetch("users", None, [values])
    view.begin()
    gate.set()
    view.finish()
    expected = torch.zeros(9, 2)
    expected[:2] = -1.0
    assert torch.equal(values, expected)


# --- ids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "window"), [(80, 60), (80, 8), (600, 8)])
def test_a_window_that_does_not_fit_is_told_once(
    slots: int, window: int, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model, cache = pair(slots)
    own, optimizer = (Adagrad(m.parameters(), lr=0.1) for m in (plain, model))
    train(plain, own, Batches(), batches=40)
    train(model, optimizer, lookahead(Batches(), model, window), batches=40)
    same(plain, own, cache)
    assert cache.stats.misses == 0
    said = [one.getMessage() for one in caplog.records if "the slots have room" in one.message]
    wanted = min(window + 1, max(16, window // 2))
    assert len(said) == (slots < 600)
    assert all(f"are to be fetched {wanted} batches ahead" in one for one in said)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_types_and_shapes_of_ids(dtype: torch.dtype, sparse: bool) -> None:
    plain, model, cache = pair(sparse=sparse)
    own, optimizer = (SGD(m.parameters(), lr=0.5) for m in (plain, model))
    shapes: list[tuple[int, ...]] = [(), (0,), (5,), (0, 3), (2, 3), (2, 0, 3), (2, 2, 2)]
    for shape in shapes:
        ids = torch.randint(0, USERS, shape).to(dtype)
        one, other = model.users(ids), plain.users(ids)
        assert torch.equal(one, other)
        stepped(plain, own, (other**2).sum())
        stepped(model, optimizer, (one**2).sum())
        same(plain, own, cache)
    strided = torch.randint(0, USERS, (6, 2)).to(dtype)[:, 1]
    assert torch.equal(model.users(strided), plain.users(strided))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("is_last_included", [False, True])
def test_bags_with_offsets(is_last_included: bool, padding: int | None, sparse: bool) -> None:
    plain, model, cache = pair(sparse=sparse, padding=padding)
    own, optimizer = (Adagrad(m.parameters(), lr=0.1) for m in (plain, model))
    for m in (plain, model):
        m.items.include_last_offset = is_last_included
    drawn = torch.Generator().manual_seed(3)
    for count in (0, 1, 12, 12, 12):
        ids = torch.randint(0, 9 if count == 12 else ITEMS, (count,), generator=drawn)
        offsets = torch.tensor([0, 0, count // 2] + ([count] if is_last_included else []))
        for dtype in (torch.int32, torch.int64):
            one, other = (m.items(ids.to(dtype), offsets.to(dtype)) for m in (model, plain))
            assert torch.equal(one, other) and len(one) == 3
            stepped(plain, own, (other**2).sum())
            stepped(model, optimizer, (one**2).sum())
            same(plain, own, cache)
    assert padding is None or model.items.padding_idx == cache.tables["items"].slots.padding


def test_weights_in_bags_without_the_padding_row() -> None:
    plain, model, cache = pair(padding=3)
    own, optimizer = (Adagrad(m.parameters(), lr=0.1) for m in (plain, model))
    drawn = torch.Generator().manual_seed(3)
    for _ in range(4):
        ids = torch.randint(4, 12, (4, 3), generator=drawn)
        weights = torch.rand(4, 3, generator=drawn)
        out, expected = (m.items(ids, per_sample_weights=weights) for m in (model, plain))
        assert torch.equal(out, expected)
        stepped(plain, own, (expected**2).sum())
        stepped(model, optimizer, (out**2).sum())
        same(plain, own, cache)


def test_a_bag_of_padding_alone_and_a_lookup_that_fails() -> None:
    plain, model, cache = pair(padding=0)
    ids = torch.zeros(4, 2, dtype=torch.int64)
    assert torch.equal(model.items(ids), plain.items(ids))
    assert torch.equal(model.users(ids), plain.users(ids))
    parameter = model.items.weight
    with pytest.raises(ValueError, match="offsets"):
        model.items(torch.tensor([1, 2, 0]))  # torch's own refusal, after ids became slots
    assert model.items.weight is parameter
    assert model.items.padding_idx == cache.tables["items"].slots.padding


def test_deleted_padding_rows_are_zero() -> None:
    model = plain_model(padding=0)
    with torch.no_grad():
        model.users.weight[0] = 7.0  # a script may do so
    cached(model, local(), SMALL)
    cache = cache_of(model)
    assert cache is not None
    zero = torch.tensor([0])
    assert torch.equal(model.users(zero), torch.full((1, 6), 7.0))
    cache.zero_rows("users", zero)
    assert torch.equal(model.users(zero), torch.zeros(1, 6))
    assert torch.equal(read_rows(model, "users", ids=zero)["values"], torch.zeros(1, 6))


# --- models --------------------------------------------------------------------------------------


def test_lookups_in_eval_mode() -> None:
    plain, model, cache = pair()
    own, optimizer = (SGD(m.parameters(), lr=0.5) for m in (plain, model))
    ahead = lookahead(Batches(), model, 5)
    train(plain, own, Batches(), batches=5)
    train(model, optimizer, ahead, batches=5)
    # Gradients are on in eval mode; lookups whose outputs are gone hold no slots.
    plain.eval(), model.eval()
    for number in range(40):
        batch = Batches(seed=4).batch(number)
        assert torch.equal(model(batch), plain(batch))
    plain.train(), model.train()
    same(plain, own, cache)


def test_two_models_with_caches_of_their_own() -> None:
    plain, first, cache = pair(sparse=True)
    second, other = cached_model({"users": 16, "items": 48}, sparse=True)
    own = [Adagrad(m.parameters(), lr=0.1) for m in (plain, first)]
    different = SGD(second.parameters(), lr=0.5)
    train(plain, own[0], Batches(), batches=20)
    ahead, ahead_too = lookahead(Batches(), first, 5), lookahead(Batches(), second, 9)
    one, two = iter(ahead), iter(ahead_too)
    for _ in range(20):
        batch, batch_too = next(one), next(two)
        losses = loss_of(first, batch), loss_of(second, batch_too)
        stepped(second, different, losses[1])
        stepped(first, own[1], losses[0])
    same(plain, own[0], cache)
    alone = plain_model(sparse=True)
    optimizer = SGD(alone.parameters(), lr=0.5)
    train(alone, optimizer, Batches(), batches=20)
    same(alone, optimizer, other)


def test_copies_of_a_cached_model_are_refused() -> None:
    _, model, _ = pair()
    with pytest.raises(SettingsError, match="a copy of the model"):
        copy.deepcopy(model)


def test_a_frozen_table_changes_nothing() -> None:
    plain = plain_model()
    model = plain_model()
    plain.users.weight.requires_grad_(False)
    model.users.weight.requires_grad_(False)
    cached(model, local(), SMALL)
    cache = cache_of(model)
    assert cache is not None
    own, optimizer = (
        SGD([p for p in m.parameters() if p.requires_grad], lr=0.5) for m in (plain, model)
    )
    losses = train(plain, own, Batches(), batches=60)
    assert train(model, optimizer, lookahead(Batches(), model, 9), batches=60) == losses
    same(plain, own, cache)
    found = read_rows(model, "users")["values"]
    assert torch.equal(found, plain_model().users.weight)
    assert not cache.tables["users"].slots.changed.any()


# --- optimizers and gradients --------------------------------------------------------------------


def of_plain() -> dict[str, Any]:
    plain = plain_model()
    own = Adagrad(plain.parameters(), lr=0.1)
    train(plain, own, Batches(), batches=3)
    return own.state_dict()


def of_slots() -> dict[str, Any]:
    model, _ = cached_model(SMALL)
    own = Adagrad(model.parameters(), lr=0.1)
    train(model, own, lookahead(Batches(), model, 5), batches=3)
    return own.state_dict()


@pytest.mark.parametrize("has_trained", [False, True])
@pytest.mark.parametrize("states", [of_plain, of_slots])
def test_states_that_are_loaded_are_refused(
    states: Callable[[], dict[str, Any]], has_trained: bool
) -> None:
    model, cache = cached_model(SMALL)
    optimizer = Adagrad(model.parameters(), lr=0.1)
    reader = lookahead(Batches(), model, 5)
    if has_trained:
        train(model, optimizer, reader, batches=3)
    before = rows_of_cache(cache)
    optimizer.load_state_dict(states())
    with pytest.raises(SettingsError, match="cached table 'users'.*row states of Adagrad.*restore"):
        train(model, optimizer, reader, batches=1)
    assert before.differences(rows_of_cache(cache)) == []


def test_another_optimizer_with_states_is_refused() -> None:
    model, _ = cached_model(SMALL)
    reader = lookahead(Batches(), model, 5)
    train(model, Adagrad(model.parameters(), lr=0.1), reader, batches=3)
    with pytest.raises(SettingsError, match="row states of Adagrad"):
        train(model, Adagrad(model.parameters(), lr=0.1), reader, batches=1)


def test_gradients_that_are_clipped_by_value() -> None:
    plain, model, cache = pair()
    own, optimizer = (SGD(m.parameters(), lr=0.5) for m in (plain, model))
    reader = iter(Batches())
    for batch in lookahead(Batches(), model, 9):
        for m, o, given in ((plain, own, next(reader)), (model, optimizer, batch)):
            (10 * loss_of(m, given)).backward()
            nn.utils.clip_grad_value_(m.parameters(), 0.01)
            o.step()
            o.zero_grad()
    same(plain, own, cache)


@pytest.mark.parametrize("sparse", [False, True])
def test_steps_with_closures(sparse: bool) -> None:
    """As Lightning makes them: the closure looks up, and computes the gradients."""
    plain, model, cache = pair({"users": 12, "items": 30}, sparse=sparse)
    own, optimizer = (Adagrad(m.parameters(), lr=0.1) for m in (plain, model))
    reader = iter(Batches())
    for batch in lookahead(Batches(), model, 9):
        for m, o, given in ((plain, own, next(reader)), (model, optimizer, batch)):

            def closure(m: Model = m, o: Any = o, given: Any = given) -> Tensor:
                o.zero_grad()
                loss = loss_of(m, given)
                loss.backward()
                return loss

            o.step(closure=closure)
    same(plain, own, cache)
    assert cache.stats.written_rows > 100


@pytest.mark.parametrize("sparse", [False, True])
def test_many_steps_that_are_skipped_hold_no_slots(sparse: bool) -> None:
    """As automatic mixed precision does until it has found its scale."""
    plain, model, cache = pair({"users": 10, "items": 26}, sparse=sparse)
    own, optimizer = (SGD(m.parameters(), lr=0.5) for m in (plain, model))
    reader = iter(Batches())
    for number, batch in enumerate(lookahead(Batches(), model, 9)):
        for m, o, given in ((plain, own, next(reader)), (model, optimizer, batch)):
            loss_of(m, given).backward()
            if number > 25:
                o.step()
            o.zero_grad()
    same(plain, own, cache)


def test_a_table_whose_output_is_not_used_holds_no_slots() -> None:
    _, model, cache = pair({"users": 10, "items": 26})
    optimizer = SGD(model.parameters(), lr=0.5)
    for batch in lookahead(Batches(), model, 9):
        model.users(batch["users"])
        stepped(model, optimizer, model.items(batch["items"]).sum())
    assert cache.stats.misses == 0 and not cache.tables["users"].slots.changed.any()


@pytest.mark.parametrize("sparse", [False, True])
def test_a_backward_pass_one_batch_later(sparse: bool) -> None:
    plain, model, cache = pair({"users": 16, "items": 52}, sparse=sparse)
    own, optimizer = (SGD(_tables(m), lr=0.5) for m in (plain, model))

    def trained(model: Model, optimizer: SGD, reader: Any) -> None:
        before = None
        for batch in reader:
            users, items = model.users(batch["users"]), model.items(batch["items"])
            loss = (users * items).sum()
            if before is not None:
                stepped(model, optimizer, before)
            before = loss

    trained(plain, own, Batches())
    trained(model, optimizer, lookahead(Batches(), model, 9))
    same(plain, own, cache)


def test_a_graph_that_runs_twice() -> None:
    plain, model, cache = pair({"users": 10, "items": 26})
    own, optimizer = (SGD(_tables(m), lr=0.5) for m in (plain, model))
    ids = torch.arange(6)
    kept = None
    for m, o in ((plain, own), (model, optimizer)):
        kept = torch.sin(m.users(ids)).sum()
        for _ in range(2):
            kept.backward(retain_graph=True)
            o.step()
            o.zero_grad()
    same(plain, own, cache)
    assert kept is not None
    train(model, SGD(model.parameters(), lr=0.5), lookahead(Batches(), model, 5), batches=20)
    with pytest.raises(SettingsError, match="another backward pass of a lookup"):
        kept.backward()


@pytest.mark.parametrize("sparse", [False, True])
def test_a_gradient_is_not_applied_twice(sparse: bool) -> None:
    _, model, _ = pair(sparse=sparse)
    optimizer = SGD(model.parameters(), lr=0.5)
    batch = Batches().batch(0)
    loss_of(model, batch).backward()
    optimizer.step()
    with pytest.raises(SettingsError, match="applied.*zero_grad"):
        optimizer.step()
    with pytest.raises(SettingsError, match="applied.*zero_grad"):
        loss_of(model, batch).backward()
    optimizer.zero_grad(set_to_none=False)
    stepped(model, optimizer, loss_of(model, batch))


def test_a_step_that_fails_holds_nobody_up() -> None:
    class Failing(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise OverflowError

    model, cache = cached_model(SMALL, row_local=(Failing,))
    optimizer = Failing(model.parameters(), lr=0.5)
    loss_of(model, Batches().batch(0)).backward()
    with pytest.raises(OverflowError):
        optimizer.step()
    with torch.no_grad():
        model(Batches().batch(5))  # rows have to come for it
    read_rows(model, "users")
    cache.close()


def test_views_may_overlap() -> None:
    """The rows of an earlier view are saved until it has them, also with a later one there."""
    plain, model, cache = pair({"users": USERS, "items": ITEMS})
    own, optimizer = (SGD(m.parameters(), lr=0.5) for m in (plain, model))
    reader, ahead = Batches(), lookahead(Batches(), model, 5)
    train(plain, own, reader, batches=3)
    train(model, optimizer, ahead, batches=3)
    taken = []
    for _ in range(2):
        view = cache.view()
        out = torch.empty(USERS, 6)
        view.fetch("users", None, [out])
        taken.append((view, out, plain.users.weight.detach().clone()))
        train(plain, own, reader, batches=3)
        train(model, optimizer, ahead, batches=3)
    for view, out, then in taken:
        view.begin()
        view.finish()
        assert torch.equal(as_bits(out), as_bits(then))


def _tables(model: Model) -> list[Tensor]:
    return [model.users.weight, model.items.weight]


def test_hints_that_are_wrong_cost_time_only() -> None:
    plain, model, cache = pair()
    own, optimizer = (SGD(m.parameters(), lr=0.5) for m in (plain, model))
    reader = Lookahead(
        Batches(), model, ids=lambda batch: {"users": torch.tensor([-5, USERS, 2**60])}, window=5
    )
    assert train(plain, own, Batches(), batches=20) == train(model, optimizer, reader, batches=20)
    same(plain, own, cache)
    assert cache.stats.misses > 0


def test_tables_on_the_meta_device_begin_as_filled_ones() -> None:
    model, _ = cached_model(SMALL, padding=2)
    plain = Model(padding=2)
    fill(plain, INITIAL)
    for name, values in rows_of_plain(plain, SGD(plain.parameters(), lr=0.1)).arrays.items():
        assert torch.equal(read_rows(model, name)["values"], values[0])


def test_an_epoch_whose_first_batch_failed_begins_again() -> None:
    """It does not end at once, as if it had no batch."""
    model, cache = cached_model({"users": 2, "items": 100})
    reader = Batches(3)
    ahead = Lookahead(reader, model, window=2)
    for _ in range(3):
        with pytest.raises(SettingsError, match="'users'"):
            next(iter(ahead))
        assert reader.position == 1
    cache.close()


# --- what a training does around a cache ---------------------------------------------------------


def test_a_state_dict_is_not_loaded() -> None:
    _, model, _ = pair()
    state = model.state_dict()
    with pytest.raises(SettingsError, match="cached table 'users'.*load_state_dict"):
        model.load_state_dict(state)


@pytest.mark.parametrize("slots", [SMALL, {"users": USERS, "items": ITEMS}])
def test_an_optimizer_from_before_the_cache_trains_nothing(slots: dict[str, int]) -> None:
    model = plain_model()
    optimizer = SGD(model.parameters(), lr=0.5)
    cached(model, local(), slots)
    with pytest.raises(SettingsError, match="before cached"):
        train(model, optimizer, lookahead(Batches(), model, 5), batches=3)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_table_that_is_trained_later(sparse: bool) -> None:
    plain = plain_model(sparse=sparse)
    plain.users.weight.requires_grad_(False)
    model = plain_model(sparse=sparse)
    model.users.weight.requires_grad_(False)
    cached(model, local(), SMALL)
    cache = cache_of(model)
    assert cache is not None
    optimizers = [Adagrad(m.parameters(), lr=0.1) for m in (plain, model)]
    readers: list[Any] = [Batches(), lookahead(Batches(), model, 6)]
    for one, optimizer, reader in zip((plain, model), optimizers, readers, strict=True):
        train(one, optimizer, reader, batches=10)
        one.users.weight.requires_grad_(True)
        optimizer.zero_grad()
        for number, batch in zip(range(20), reader, strict=False):
            loss_of(one, batch).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    same(plain, optimizers[0], cache)


def test_rows_stay_for_the_gradient_of_weights() -> None:
    """A frozen bag needs its rows in a backward pass that trains the weights of its samples."""
    bag = nn.EmbeddingBag(200, 4, mode="sum")
    model = copy.deepcopy(bag)
    for one in (bag, model):
        one.weight.requires_grad_(False)
    cached(model, local(), 24)
    ids = torch.arange(200).view(-1, 4)
    found = []
    for one in (bag, model):
        weights = torch.ones(4, requires_grad=True)
        outputs = [one(part[None], per_sample_weights=weights[None]) for part in ids[:5]]
        torch.stack([output.square().sum() for output in outputs]).sum().backward()
        found.append(weights.grad)
    assert found[0] is not None and found[1] is not None
    assert torch.equal(as_bits(found[0]), as_bits(found[1]))


_FAILING = """
import time
import torch
import torch.optim.sgd as module
from recpoint.embeddings.home import memory
from tests.cached_training import Batches, cached_model, lookahead, train

class Slow(memory.MemoryHome):
    def fetch(self, *given):
        time.sleep(0.1)
        return super().fetch(*given)

steps = 0
sgd = module.sgd

def failing(*given, **named):
    global steps
    steps += 1
    if steps == 5:
        time.sleep(0.5)
        raise RuntimeError("out of memory")
    sgd(*given, **named)

module.sgd = failing
model, _ = cached_model({"users": 60, "items": 60}, Slow())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(model, optimizer, lookahead(Batches(), model, 8), batches=9)
"""


def test_a_process_whose_step_fails_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _FAILING], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1 and "out of memory" in ended.stderr, ended.stderr
