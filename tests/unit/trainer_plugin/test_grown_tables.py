"""Tables that have more rows than their checkpoint: old rows come back, new ones begin anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adam, Optimizer, Rprop

from recpoint import Continuous, Follower, Intermittent, OneShot, Options, Seed
from recpoint.catalog.check.check import check
from recpoint.catalog.check.validate import validate
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.embeddings import Uniform
from recpoint.errors import IncompatibleModel, SettingsError
from recpoint.trainer_plugin.policy import Policy
from recpoint.trainer_plugin.state import rng
from tests.consolidation import merge
from tests.grown_training import (
    GROW,
    MORE_ROWS,
    OPTIMIZERS,
    RULE,
    AllUsers,
    MakeOptimizers,
    Model,
    enlarged,
    first_run,
    kinds,
    same,
    tensors,
    training,
)
from tests.retained_run import retain
from tests.training_builder import (
    DIM,
    ROWS,
    Place,
    Training,
    checkpointer,
    seed_everything,
    train,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::recpoint.embeddings.tables.optimizers.FullyDirtyTables"
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_rows_had_been_added_by_hand(place: Place, name: str) -> None:
    first = first_run(place, name)
    expected = enlarged(first, name)
    grown = training(MORE_ROWS, name, seed=9)
    with place.agent(), checkpointer(grown, place, grow=GROW, when_busy="wait") as ckpt:
        ckpt.restore()
        assert ckpt.batches_done == 5
        assert same(tensors(grown), tensors(expected))
        generators = rng.capture()
        train(grown, ckpt, 4)
    rng.restore(generators)
    for _ in range(4):
        expected.batch()
    assert same(tensors(grown), tensors(expected))
    assert kinds(place)[-2:] == [(7, "full"), (9, "increment")]
    # A later start finds a checkpoint with all rows: it asks no rule.
    for settings in ({}, {"grow": {"users": Uniform(seed=99)}}):
        second = training(MORE_ROWS, name, seed=11)
        with place.agent(), checkpointer(second, place, **settings) as ckpt:
            ckpt.restore()
            assert ckpt.batches_done == 9
            assert same(tensors(second), tensors(grown))
            ckpt.close(final=False)
    assert kinds(place)[-2:] == [(7, "full"), (9, "increment")]


@pytest.mark.parametrize("policy", [OneShot(), Intermittent(), Continuous()])
def test_the_first_checkpoint_after_growth_is_a_full_in_each_policy(
    place: Place, policy: Policy
) -> None:
    first_run(place, policy=policy)
    grown = training(MORE_ROWS, seed=9)
    settings = {"grow": GROW, "policy": policy, "bits": 8, "when_busy": "wait"}
    with place.agent(), checkpointer(grown, place, **settings) as ckpt:
        ckpt.restore()
        train(grown, ckpt, 4)
    assert [kind for step, kind in kinds(place) if step > 5] == ["full", "increment"]


def test_a_trainer_that_ends_before_its_first_checkpoint_grows_again(place: Place) -> None:
    first_run(place)
    lives = []
    for seed in (9, 10):
        grown = training(MORE_ROWS, seed=seed)
        with place.agent(), checkpointer(grown, place, grow=GROW, when_busy="wait") as ckpt:
            ckpt.restore()
            lives.append(tensors(grown))
            train(grown, ckpt, 1)
            ckpt.close(final=False)
    assert same(*lives)
    assert kinds(place)[-1] == (5, "increment")


def test_going_back_to_a_checkpoint_from_before_the_growth_grows_again(place: Place) -> None:
    first = first_run(place)
    for step, checkpoints in ((None, [(7, "full"), (8, "increment")]), (5, [(7, "full")])):
        grown = training(MORE_ROWS, seed=9)
        with place.agent(), checkpointer(grown, place, grow=GROW, when_busy="wait") as ckpt:
            ckpt.restore(step)
            assert ckpt.batches_done == 5
            assert same(tensors(grown), tensors(enlarged(first, "adagrad")))
            train(grown, ckpt, 3 if step is None else 2)
        assert kinds(place)[-len(checkpoints) :] == checkpoints


def test_the_new_padding_row_is_zero(place: Place) -> None:
    first_run(place)
    grown = training(MORE_ROWS, seed=9, padding=MORE_ROWS - 1)
    with place.agent(), checkpointer(grown, place, grow=GROW, when_busy="wait") as ckpt:
        ckpt.restore()
        assert not grown.model.users.weight[-1].any()
        assert grown.model.users.weight[-2].any()
        ckpt.close(final=False)


def refusal(
    grown: Training, place: Place, start: dict[str, Any] | None = None, **given: Any
) -> str:
    """Return the error of a restore that must leave the model unchanged."""
    before = tensors(grown)
    with pytest.raises((IncompatibleModel, SettingsError)) as caught:
        checkpointer(grown, place, **given).restore(**(start or {}))
    assert same(tensors(grown), before)
    return str(caught.value)


def test_what_cannot_grow_is_refused_by_name(place: Place) -> None:
    first_run(place)
    larger = training(MORE_ROWS)
    rows_text = f"table 'users': rows {MORE_ROWS} in the model, {ROWS} in the checkpoint"
    unnamed = refusal(larger, place)
    assert rows_text in unnamed
    assert 'Options(grow={"users": recpoint.embeddings.Uniform(seed=0)})' in unnamed
    assert 'Options(grow={"users"' in refusal(larger, place, grow={"items": RULE})
    smaller = refusal(training(ROWS - 1), place, grow=GROW)
    assert f"rows {ROWS - 1} in the model, {ROWS} in the checkpoint" in smaller
    assert "Options" not in smaller
    for parts in ({"partial": {"tables": ["users"]}}, {"seed": Seed(place.run, tables=["users"])}):
        where = place if "partial" in parts else Place(f"{place.run}2", place.staging)
        text = refusal(larger, where, parts, grow=GROW)
        assert rows_text in text
        assert "restore the whole checkpoint with Options(grow=...)" in text
    no_table = refusal(larger, place, grow={"user": RULE})
    assert "Options(grow=...): 'user'" in no_table
    assert "'items', 'users'" in no_table


@pytest.mark.parametrize(
    ("grow", "setting"),
    [
        (["users"], "Options.grow: found ['users']"),
        ({"users": 0.5}, "Options.grow['users']: found 0.5"),
        ({3: RULE}, "Options.grow: found 3"),
    ],
)
def test_rules_are_checked_when_they_are_given(grow: Any, setting: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Options(grow=grow)
    assert setting in str(caught.value)


def test_a_rule_of_another_shape_is_refused(place: Place) -> None:
    first_run(place)

    def narrow(table: str, ids: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(len(ids), dim - 1, dtype=dtype)

    grown = training(MORE_ROWS)
    with pytest.raises(SettingsError, match="initial"):
        checkpointer(grown, place, grow={"users": narrow}).restore()


def test_a_rule_that_draws_leaves_the_generators_as_the_checkpoint_has_them(place: Place) -> None:
    first_run(place)

    def drawn(table: str, ids: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        torch.manual_seed(int(ids[0]))
        return torch.rand(len(ids), dim, dtype=dtype)

    after = []
    for rule in (RULE, drawn):
        grown = training(MORE_ROWS, seed=9)
        with place.agent(), checkpointer(grown, place, grow={"users": rule}) as ckpt:
            ckpt.restore()
            after.append(torch.get_rng_state())
            ckpt.close(final=False)
    assert torch.equal(*after)


class CountsRows(SGD):
    """Keeps the number of its row in a state of each row."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["number"] = torch.arange(float(len(parameter)))


class OwnAdam(Adam):
    """May begin its row states with anything."""


STATES: dict[str, tuple[MakeOptimizers, str]] = {
    "not zero": (
        lambda m: [Rprop(m.parameters(), lr=0.1)],
        "the row state 'step_size', which Rprop makes in a step",
    ),
    "averaged later": (
        lambda m: [ASGD(m.parameters(), lr=0.1, t0=1)],
        "the row state 'ax', which ASGD makes in a step",
    ),
    "of an unknown class": (
        lambda m: [OwnAdam(m.parameters(), lr=0.1)],
        "the row state 'exp_avg', which OwnAdam makes in a step",
    ),
    "different in each row": (
        lambda m: [CountsRows(m.parameters(), lr=0.1)],
        "the row state 'number', whose new rows have another form or different values here",
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_a_row_state_whose_beginning_is_not_known_is_refused(place: Place, case: str) -> None:
    make, text = STATES[case]
    first_run(place, make)
    assert f"table 'users' grows, and has {text}" in refusal(
        training(MORE_ROWS, make), place, grow=GROW
    )


def _raises(*_: object) -> Tensor:
    raise KeyError("no rule")


@pytest.mark.parametrize("rule", [_raises, lambda *_: [0.0], lambda *_: torch.zeros(1, DIM + 1)])
def test_a_rule_that_fails_leaves_the_model_as_it_was(place: Place, rule: Any) -> None:
    first_run(place)
    grown = training(MORE_ROWS, seed=5)
    before = {name: value.clone() for name, value in grown.model.state_dict().items()}
    with (
        pytest.raises((KeyError, SettingsError)),
        checkpointer(grown, place, grow={"users": rule}) as ckpt,
    ):
        ckpt.restore()
    assert all(torch.equal(v, before[n]) for n, v in grown.model.state_dict().items())


def test_a_row_state_that_was_made_before_the_restore_begins_as_it_is(place: Place) -> None:
    def make(model: Model) -> list[Optimizer]:
        optimizer = OwnAdam(model.parameters(), lr=0.1)
        weight = model.users.weight
        names = ("exp_avg", "exp_avg_sq")
        optimizer.state[weight].update({name: torch.full_like(weight, 0.5) for name in names})
        optimizer.state[weight]["step"] = torch.tensor(0.0)
        return [optimizer]

    first = first_run(place, make)
    grown = training(MORE_ROWS, make)
    with place.agent(), checkpointer(grown, place, grow=GROW, when_busy="wait") as ckpt:
        ckpt.restore()
        state = tensors(grown)["users.weight: exp_avg"]
        assert torch.equal(state[: ROWS * DIM], tensors(first)["users.weight: exp_avg"])
        assert bool((state[ROWS * DIM :] == 0.5).all())
        ckpt.close(final=False)


def test_a_state_that_is_stored_whole_is_refused(place: Place) -> None:
    def make(model: Model) -> list[Optimizer]:
        tables = [model.users.weight, model.items.weight]
        return [SGD(tables, lr=0.1, momentum=0.9), SGD(model.top.parameters(), lr=0.1)]

    def sparse(rows: int) -> Training:
        seed_everything(1)
        model = Model(rows, sparse=True)
        return Training(model, make(model), AllUsers(1))  # type: ignore[arg-type]

    first = sparse(ROWS)
    with place.agent(), checkpointer(first, place) as ckpt:
        ckpt.restore()
        train(first, ckpt, 3)
    assert "its optimizer state 'momentum_buffer', [203, 6], is stored whole" in refusal(
        sparse(MORE_ROWS), place, grow=GROW
    )


@pytest.mark.parametrize("bits", ["lossless", 8])
def test_a_run_whose_table_grew_is_followed_validated_merged_and_retained(
    place: Place, bits: Any
) -> None:
    first = first_run(place, bits=bits)
    follower = Follower(place.run, quantized=bits == 8)
    served = Follower(place.run, model=Model(ROWS, sparse=False))
    assert follower.poll()
    assert served.poll()
    grown = training(MORE_ROWS, seed=9)
    with place.agent(), checkpointer(grown, place, grow=GROW, when_busy="wait", bits=bits) as ckpt:
        ckpt.restore()
        train(grown, ckpt, 7)

    assert follower.poll()
    with follower.reading() as version:
        looked_up = version.lookup("users", torch.arange(MORE_ROWS))
    trained = grown.model.users.weight.detach()
    assert torch.allclose(looked_up, trained, rtol=0, atol=0.0 if bits == "lossless" else 0.05)
    # A model of the old size keeps its version, and the error says what differs.
    with pytest.raises(IncompatibleModel, match=f"'users' is float32.*{ROWS}.*{MORE_ROWS}"):
        served.poll()
    with served.reading() as version:
        looked_up = version.lookup("users", torch.arange(ROWS))
        assert looked_up.shape == first.model.users.weight.shape

    run = Run.open(open_store(place.run))
    assert [kind for step, kind in kinds(place) if step > 5] == ["full", *["increment"] * 3]
    for name in run.live_line():
        assert validate(run, name).result == "passed"
    newest = run.manifest(*run.live_line()[0])
    assert merge(run, newest).outcome == "created"
    retain(run)
    retain(run)
    assert min(name.step for name in run.manifest_names()) == 7
    assert check(run, level="full").ok
    again = training(MORE_ROWS, seed=12)
    with place.agent(), checkpointer(again, place) as ckpt:
        ckpt.restore()
        assert same(tensors(again), tensors(grown)) or bits == 8
        ckpt.close(final=False)
