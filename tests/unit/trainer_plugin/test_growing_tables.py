"""`recpoint.grow`: a table gets more rows between two batches, and training goes on."""

from __future__ import annotations

import copy
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.optim import SGD, Adagrad, Adam, Optimizer, Rprop

import recpoint
from recpoint import Checkpointer, Continuous, OneShot
from recpoint.catalog.staging.area import StagedRun
from recpoint.embeddings import Uniform
from recpoint.errors import IncompatibleModel, SettingsError
from recpoint.trainer_plugin.state import rng
from tests.grown_training import (
    GROW,
    MORE_ROWS,
    OPTIMIZERS,
    RULE,
    enlarged,
    kinds,
    look_up_users,
    same,
    tensors,
    training,
)
from tests.training_builder import (
    DIM,
    ROWS,
    Place,
    Training,
    checkpointer,
    reject,
    train,
    until,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::recpoint.embeddings.tables.optimizers.FullyDirtyTables"
)


def grow(trained: Training, rows: int = MORE_ROWS, initial: Any = RULE) -> None:
    """Grow the table `users`, of which batches look up all rows from then on."""
    recpoint.grow(trained.model, trained.optimizers, "users", rows, initial=initial)
    look_up_users(trained, rows)


def has_outcomes(checkpoints: Checkpointer, count: int) -> bool:
    """Whether the outcomes of at least so many checkpoints are known."""
    return checkpoints.stats.committed + checkpoints.stats.failed >= count


def batches(trained: Training, count: int) -> Training:
    for _ in range(count):
        trained.batch()
    return trained


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_rows_had_been_added_by_hand(place: Place, name: str) -> None:
    by_hand = batches(training(ROWS, name), 3)
    generators = rng.capture()
    larger = enlarged(by_hand, name)
    rng.restore(generators)
    look_up_users(larger, MORE_ROWS)
    batches(larger, 4)

    grown = training(ROWS, name)
    weight = grown.model.users.weight
    with place.agent(), checkpointer(grown, place, when_busy="wait") as ckpt:
        ckpt.restore()
        train(grown, ckpt, 3)
        bound_bytes, host_bytes = ckpt.memory_bound_bytes, ckpt.host_memory_bound_bytes
        grow(grown)
        assert grown.model.users.weight is weight
        assert grown.model.users.num_embeddings == MORE_ROWS
        train(grown, ckpt, 1)
        assert ckpt.memory_bound_bytes - bound_bytes >= 61 * DIM * 4
        assert ckpt.host_memory_bound_bytes - host_bytes == ckpt.memory_bound_bytes - bound_bytes
        assert ckpt.observe().staging_bound_bytes == ckpt.memory_bound_bytes
        train(grown, ckpt, 3)
    assert same(tensors(grown), tensors(larger))
    assert kinds(place) == [(2, "full"), (4, "full"), (6, "increment"), (7, "increment")]

    again = training(MORE_ROWS, name, seed=9)
    with place.agent(), checkpointer(again, place) as ckpt:
        ckpt.restore()
        assert ckpt.batches_done == 7
        assert same(tensors(again), tensors(larger))
        ckpt.close(final=False)


def live(place: Place, rows: int, last: int, *, finishes: bool = True) -> Training:
    """Train with `rows` rows of users at first, grow the table at batch 4, and go on."""
    trained = training(rows)
    look_up_users(trained, ROWS)
    with (
        place.agent(),
        checkpointer(trained, place, grow=GROW, when_busy="wait", interval_batches=3) as ckpt,
    ):
        ckpt.restore()
        while ckpt.batches_done < last:
            if ckpt.batches_done >= 4:
                grow(trained, initial=None)
            train(trained, ckpt, 1)
        if not finishes:
            ckpt.close(final=False)
    place.persist_all()
    return trained


@pytest.mark.parametrize("rows_at_start", [ROWS, MORE_ROWS])
def test_a_run_that_ends_before_the_full_after_growth_resumes_with_the_same_values(
    place: Place, rows_at_start: int
) -> None:
    whole = live(Place(f"{place.run}-whole", place.staging), ROWS, 10)
    live(place, ROWS, 5, finishes=False)
    assert kinds(place) == [(3, "full")]
    resumed = live(place, rows_at_start, 10)
    assert same(tensors(resumed), tensors(whole))
    assert kinds(place)[1:] == [(6, "full"), (9, "increment"), (10, "increment")]


def test_a_run_that_ends_after_the_full_resumes_with_all_rows_and_a_loop_that_grows_again(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    whole = live(Place(f"{place.run}-whole", place.staging), ROWS, 10)
    live(place, ROWS, 7, finishes=False)
    with pytest.raises(IncompatibleModel, match=f"rows {ROWS} in the model, {MORE_ROWS}") as caught:
        live(place, ROWS, 10)
    assert "recpoint.grow(model, optimizers, 'users', 264" in str(caught.value)
    caplog.clear()
    with caplog.at_level(logging.INFO, "recpoint"):
        resumed = live(place, MORE_ROWS, 10)
    assert "rows now" not in caplog.text
    assert same(tensors(resumed), tensors(whole))
    assert [kind for _, kind in kinds(place)] == ["full", "full", "increment", "increment"]


def test_a_model_grows_before_its_restore(place: Place) -> None:
    """Into a checkpoint with all rows, and from one with fewer."""
    live(place, ROWS, 7, finishes=False)
    first = live(Place(f"{place.run}-2", place.staging), ROWS, 3)
    for where, batches_done, rows in ((place, 6, MORE_ROWS), (f"{place.run}-2", 3, MORE_ROWS)):
        where = where if isinstance(where, Place) else Place(where, place.staging)
        trained = training(ROWS, seed=8)
        with where.agent(), checkpointer(trained, where, when_busy="wait") as ckpt:
            grow(trained)
            ckpt.restore()
            assert ckpt.batches_done == batches_done
            assert len(trained.model.users.weight) == rows
            if batches_done == 3:
                assert same(tensors(trained), tensors(enlarged(first, "adagrad")))
            train(trained, ckpt, 2)
        assert kinds(where)[-1][1] == ("increment" if batches_done == 6 else "full")


@pytest.mark.parametrize("policy", [OneShot(), Continuous()])
def test_the_next_checkpoint_is_a_full_until_one_is_stored(place: Place, policy: Any) -> None:
    """Also if the first is rejected, and if a checkpoint from before the growth is."""
    trained = training(ROWS)
    run = StagedRun(place.run_directory)
    with checkpointer(trained, place, jobs=3, policy=policy, interval_batches=1) as ckpt:
        ckpt.restore()
        for batch, stores in enumerate((True, False, False, True, True)):
            train(trained, ckpt, 1)
            until(lambda: bool(run.staged_jobs()))
            if batch == 1:
                grow(trained)
            if stores:
                place.persist_all()
            else:
                reject(run.staged_jobs()[0], "StagingError")
            until(partial(has_outcomes, ckpt, batch + 1))
        ckpt.close(final=False)
    assert kinds(place) == [(1, "full"), (4, "full"), (5, "increment")]
    again = training(MORE_ROWS, seed=9)
    with place.agent(), checkpointer(again, place, policy=policy) as ckpt:
        ckpt.restore()
        assert same(tensors(again), tensors(trained))
        ckpt.close(final=False)


def test_a_window_that_is_open_is_void(place: Place) -> None:
    trained = training(ROWS, "sparse adam")
    settings = {"copy_fulls_ahead": 12, "interval_batches": 6, "policy": OneShot()}
    with place.agent(), checkpointer(trained, place, when_busy="wait", **settings) as ckpt:
        ckpt.restore()
        train(trained, ckpt, 3)
        grow(trained)
        train(trained, ckpt, 3)
        assert ckpt.stats.copied is not None
        assert ckpt.stats.copied.why_plain == "a table was given more rows"
        ckpt.close(final=False)
    again = training(MORE_ROWS, "sparse adam", seed=9)
    with place.agent(), checkpointer(again, place) as ckpt:
        ckpt.restore()
        assert same(tensors(again), tensors(trained))
        ckpt.close(final=False)


def test_old_marks_are_no_marks_of_new_rows_and_increments_hold_new_rows(place: Place) -> None:
    """Rows that are looked up after the growth are in later increments, and only they are."""
    trained = training(ROWS, "sparse adam")
    with place.agent(), checkpointer(trained, place, when_busy="wait", jobs=3) as ckpt:
        ckpt.restore()
        train(trained, ckpt, 2)
        grow(trained)
        train(trained, ckpt, 4)
        marked = ckpt._parts.trackers["users"]
        assert marked.rows == MORE_ROWS and not marked.all_rows and marked.surprise is None
        ids = torch.arange(MORE_ROWS - 20, MORE_ROWS)
        trained.model.users(ids).sum().backward()
        for optimizer in trained.optimizers:
            optimizer.step()
        assert bool(marked.is_marked(ids).all())
        ckpt.mark("users", torch.tensor([MORE_ROWS - 1]))
        ckpt.delete_rows("users", torch.tensor([MORE_ROWS - 1]))
        ckpt.step()
    again = training(MORE_ROWS, "sparse adam", seed=9)
    with place.agent(), checkpointer(again, place) as ckpt:
        ckpt.restore()
        assert same(tensors(again), tensors(trained))
        ckpt.close(final=False)


class Plain:
    """A model of one table, trained without a Checkpointer."""

    def __init__(self, make: Any, *, sparse: bool = False, **form: Any) -> None:
        torch.manual_seed(3)
        self.users = nn.Embedding(20, 4, sparse=sparse, **form)
        self.model = nn.ModuleDict({"users": self.users})
        self.weight = self.users.weight
        self.optimizer: Optimizer | None = make([self.weight]) if make else None
        self.optimizers = [] if self.optimizer is None else [self.optimizer]

    def backward(self, *ids: int) -> Tensor:
        loss: Tensor = (self.users(torch.tensor(ids)) ** 2).sum()
        loss.backward()
        return loss

    def grow(self, rows: int = 30, **given: Any) -> None:
        recpoint.grow(self.model, self.optimizers, "users", rows, **({"initial": RULE} | given))


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_that_wait_for_a_step_are_applied_by_it(sparse: bool) -> None:
    """As with accumulation. The loss that the script still has keeps an old graph alive."""
    weights = []
    for grows_at in (0, 1):
        plain = Plain(lambda p: Adagrad(p, lr=0.1, initial_accumulator_value=0.5), sparse=sparse)
        hooked: list[torch.Size] = []
        plain.weight.register_hook(lambda gradient, hooked=hooked: hooked.append(gradient.shape))
        if grows_at == 0:
            plain.grow()
        losses = [plain.backward(1, 2)]
        if grows_at == 1:
            plain.grow()
        losses.append(plain.backward(2, 3))
        assert plain.optimizer is not None
        plain.optimizer.step()
        assert hooked[-1] == (30, 4) and len(losses) == 2
        weights.append(plain.weight.detach().clone())
        assert torch.equal(plain.weight[20:], RULE("users", torch.arange(20, 30), 4, torch.float32))
        assert torch.equal(
            plain.optimizer.state[plain.weight]["sum"][20:], torch.full((10, 4), 0.5)
        )
        plain.backward(25)
    assert torch.equal(*weights)


def test_a_frozen_table_and_a_scaler_and_a_scheduler_go_on() -> None:
    frozen = Plain(None)
    frozen.weight.requires_grad_(False)
    frozen.grow()
    assert frozen.users(torch.tensor([29])).shape == (1, 4)

    plain = Plain(lambda p: SGD(p, lr=0.1))
    assert plain.optimizer is not None
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scheduler = torch.optim.lr_scheduler.StepLR(plain.optimizer, 1)
    for ids in ((1, 2), (2, 29)):
        if 29 in ids:
            plain.grow()
        plain.optimizer.zero_grad(set_to_none=False)
        scaler.scale((plain.users(torch.tensor(ids)) ** 2).sum()).backward()
        scaler.step(plain.optimizer)
        scaler.update()
        scheduler.step()
    assert plain.weight.grad is not None and plain.weight.grad.shape == (30, 4)
    first = RULE("users", torch.tensor([29]), 4, torch.float32)
    assert torch.allclose(plain.weight[29], first[0] * (1 - 0.02))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.EmbeddingBag(20, 4, mode="sum", include_last_offset=True, padding_idx=3),
        lambda: nn.Embedding(20, 4, padding_idx=-1, max_norm=0.1),
        lambda: nn.Embedding(20, 4, padding_idx=-1, max_norm=0.1, dtype=torch.float64),
        lambda: nn.Embedding(20, 4, padding_idx=-1, max_norm=0.1, dtype=torch.bfloat16),
    ],
)
def test_forms_of_embeddings_keep_their_meaning(make: Any) -> None:
    model = nn.ModuleDict({"users": make()})
    module: Any = model["users"]
    padding = module.padding_idx
    recpoint.grow(model, SGD(model.parameters(), lr=0.1), "users", 30, initial=RULE)
    assert module.padding_idx == padding and module.num_embeddings == 30
    bag = (torch.tensor([29, padding]), torch.tensor([0, 2]))
    is_bag = isinstance(module, nn.EmbeddingBag)
    looked_up = module(*bag) if is_bag else module(bag[0])
    first = RULE("users", torch.tensor([29]), 4, torch.float32)
    if is_bag:
        assert torch.equal(looked_up, first)
    else:
        assert looked_up[0].norm() <= 0.101 and looked_up.dtype is module.weight.dtype
        looked_up.sum().backward()
        assert module.weight.grad.shape == (30, 4)
        assert torch.equal(looked_up[1], module.weight[19])
    copied = copy.deepcopy(model)
    copied.load_state_dict(model.state_dict())


def test_a_compiled_model_looks_up_new_rows() -> None:
    plain = Plain(lambda p: SGD(p, lr=0.1), sparse=True)
    compiled = torch.compile(plain.users, backend="eager")
    compiled(torch.tensor([1, 2])).sum().backward()
    plain.grow()
    looked_up = compiled(torch.tensor([1, 29]))
    assert torch.equal(looked_up, plain.weight[[1, 29]])
    looked_up.sum().backward()
    assert plain.weight.grad is not None and plain.weight.grad.shape == (30, 4)


class _Wrapper:
    """Wraps an optimizer as Lightning does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


def test_the_optimizer_inside_a_wrapper_is_found() -> None:
    plain = Plain(lambda p: Adam(p, lr=0.1))
    plain.backward(1)
    assert plain.optimizer is not None
    plain.optimizer.step()
    for optimizers in (_Wrapper(plain.optimizer), [_Wrapper(plain.optimizer)]):
        rows = len(plain.weight) + 5
        recpoint.grow(plain.model, optimizers, "users", rows, initial=RULE)  # type: ignore[arg-type]
        assert plain.optimizer.state[plain.weight]["exp_avg"].shape == (rows, 4)


def _shared(plain: Plain) -> None:
    plain.weight.share_memory_()


def _part(plain: Plain) -> None:
    plain.weight.data = torch.zeros(40, 4)[:20]


def _in_backward(plain: Plain) -> None:
    plain.weight._in_backward_optimizers = []  # type: ignore[attr-defined]


def _nothing(plain: Plain) -> None:
    return None


def _adam(parameters: Any) -> Optimizer:
    return Adam(parameters, lr=0.1)


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "fewer rows": (_adam, _nothing, {"rows": 19}, "found rows=19, and a table of 20 rows"),
    "no number": (_adam, _nothing, {"rows": 30.0}, "found rows=30.0"),
    "no rule": (_adam, _nothing, {"initial": None}, "no rule for the values of new rows"),
    "a number": (_adam, _nothing, {"initial": 0.5}, "initial=0.5"),
    "a shape": (_adam, _nothing, {"initial": lambda *_: torch.zeros(10, 3)}, "shape (10, 3)"),
    "no optimizer": (None, _nothing, {}, "no optimizer that trains it"),
    "Rprop": (lambda p: Rprop(p, lr=0.1), _nothing, {}, "the row state 'prev' of Rprop"),
    "momentum": (
        lambda p: SGD(p, lr=0.1, momentum=0.9),
        _nothing,
        {},
        "the optimizer state 'momentum_buffer' of SGD, which is kept whole",
    ),
    "shared": (_adam, _shared, {}, "memory other processes share"),
    "a part": (_adam, _part, {}, "a part of a larger tensor"),
    "in backward": (_adam, _in_backward, {}, "steps in the backward pass"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_grow_is_refused_by_name_and_stays(case: str) -> None:
    make, prepare, given, text = REFUSED[case]
    plain = Plain(make, sparse=case == "momentum")
    if plain.optimizer is not None:
        plain.backward(1, 2)
        plain.optimizer.step() if case not in ("shared", "a part") and make is not _adam else None
    prepare(plain)
    weight_before = plain.weight.detach().clone()
    with pytest.raises(SettingsError) as caught:
        plain.grow(**given)
    assert text in str(caught.value) and "users" in str(caught.value)
    assert torch.equal(plain.weight, weight_before)


def test_other_callers_are_refused_by_name(tmp_path: Any) -> None:
    plain = Plain(_adam)
    for model, table, text in (
        (plain.model, "user", "one of ['users']"),
        (3, "users", "a torch.nn.Module"),
    ):
        with pytest.raises(SettingsError) as caught:
            recpoint.grow(model, plain.optimizers, table, 30, initial=RULE)  # type: ignore[arg-type]
        assert text in str(caught.value)
    with torch.inference_mode(), pytest.raises(SettingsError, match="inference_mode"):
        plain.grow()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(plain.model)
        with pytest.raises(SettingsError, match="DistributedDataParallel"):
            recpoint.grow(wrapped, plain.optimizers, "users", 30, initial=RULE)
        with Checkpointer(wrapped, plain.optimizers, run=str(tmp_path), interval_batches=9) as _:
            with pytest.raises(SettingsError, match="DistributedDataParallel"):
                plain.grow()
    finally:
        dist.destroy_process_group()


def test_a_checkpointers_rules_optimizers_and_calls_are_respected(place: Place) -> None:
    trained = training(ROWS, "sparse adam")
    with checkpointer(trained, place, grow=GROW) as ckpt:
        ckpt.restore()
        users, items, target = next(trained.reader)

        def refusal(**given: Any) -> str:
            arguments: Any = {"optimizers": trained.optimizers, "initial": RULE} | given
            with pytest.raises(SettingsError) as caught:
                recpoint.grow(trained.model, table="users", rows=MORE_ROWS, **arguments)
            return str(caught.value)

        assert "one rule" in refusal(initial=Uniform(seed=4))
        assert "optimizers without the SparseAdam" in refusal(optimizers=trained.optimizers[1:])
        output = trained.model(users, items)
        assert "a forward pass in training mode whose backward pass" in refusal()
        nn.functional.mse_loss(output, target).backward()
        for optimizer in trained.optimizers:
            optimizer.step()
        with torch.no_grad():
            trained.model(users, items)
        with ThreadPoolExecutor(1) as reader:
            assert "another thread than the optimizer steps" in reader.submit(refusal).result()
        grow(trained)
        ckpt.close(final=False)
    grow(trained, rows=MORE_ROWS + 5, initial=Uniform(seed=4))  # its Checkpointer has ended


def test_a_table_grows_again_by_a_lambda_in_a_loop(place: Place) -> None:
    trained = training(ROWS)
    with place.agent(), checkpointer(trained, place, when_busy="wait") as ckpt:
        ckpt.restore()
        for rows in (ROWS, ROWS + 1, ROWS + 1, ROWS + 40):
            grow(trained, rows, lambda _, ids, dim, dtype: torch.ones(len(ids), dim, dtype=dtype))
            train(trained, ckpt, 1)
        assert bool((trained.optimizers[0].state[trained.model.users.weight]["sum"] > 0).all())
    again = training(ROWS + 40, seed=9)
    with place.agent(), checkpointer(again, place) as ckpt:
        ckpt.restore()
        assert same(tensors(again), tensors(trained))
        ckpt.close(final=False)
