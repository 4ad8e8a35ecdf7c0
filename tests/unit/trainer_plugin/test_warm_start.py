"""Starting a run from a checkpoint that another tool wrote: tables, row states, dense layers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.optim import SGD, Adagrad, Adam, AdamW, SparseAdam

from recpoint import Checkpointer, Lookahead, Seed
from recpoint.catalog.foreign import contents
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.embeddings.cache.lookup_hooks import cache_of
from recpoint.errors import IncompatibleModel, MalformedObject, NothingToRestore, SettingsError
from tests import cached_training
from tests.flat_settings import arguments
from tests.training_builder import (
    DIM,
    ROWS,
    Batches,
    Place,
    Recommender,
    Training,
    checkpointer,
    seed_everything,
    train,
)

#: torch warns that it saves in a single process, and recpoint that all rows of a table are stored.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning",
    "ignore::recpoint.embeddings.tables.optimizers.FullyDirtyTables",
)

EVERYTHING: dict[str, Any] = {"tables": ["*"], "dense": ["*"]}


def training(kind: str, seed: int) -> Training:
    seed_everything(seed)
    model = Recommender(sparse=kind == "sparse adam")
    rest = [*model.norm.parameters(), *model.top.parameters()]
    tables = [model.users.weight, model.items.weight]
    optimizers: dict[str, Any] = {
        "adagrad": lambda: [Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.2)],
        "adamw": lambda: [AdamW(model.parameters(), lr=0.01, amsgrad=True)],
        "momentum": lambda: [SGD(model.parameters(), lr=0.1, momentum=0.9)],
        "sparse adam": lambda: [SparseAdam(tables, lr=0.01), Adam(rest, lr=0.01)],
        "sgd": lambda: [SGD(model.parameters(), lr=0.1)],
    }
    return Training(model, optimizers[kind](), Batches(seed))


def trained(kind: str) -> Training:
    source = training(kind, 1)
    for _ in range(3):
        source.batch()
    return source


def save(form: str, source: Training, folder: Path) -> str:
    """Write the checkpoint of a job that knows nothing of recpoint; return its path."""
    model, optimizers = source.model, source.optimizers
    if form == "torch":
        saved = {
            "net": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
        torch.save(saved, folder / "a.pt")
        return str(folder / "a.pt")
    if form == "named":
        tensors, state = get_state_dict(model, optimizers)
        save_distributed({"model": tensors, "optimizer": state}, checkpoint_id=folder / "d")
    else:
        saved = {"model": model.state_dict()} | {
            f"optimizer{number}": optimizer.state_dict()
            for number, optimizer in enumerate(optimizers)
        }
        save_distributed(saved, checkpoint_id=folder / "d")
    return str(folder / "d")


def states(one: Training) -> dict[str, dict[str, Any]]:
    names = {id(p): name for name, p in one.model.named_parameters()}
    return {
        names[id(parameter)]: dict(state)
        for optimizer in one.optimizers
        for parameter, state in optimizer.state.items()
    }


def assert_same(one: Training, two: Training) -> None:
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, two.model.state_dict()[name]), name
    first, second = states(one), states(two)
    assert first.keys() == second.keys()
    for name, state in first.items():
        assert list(state) == list(second[name]), name
        for key, value in state.items():
            assert type(value) is type(second[name][key]), (name, key)
            equal = torch.equal if isinstance(value, Tensor) else lambda a, b: a == b
            assert equal(value, second[name][key]), (name, key)


@pytest.mark.parametrize("form", ["torch", "named", "numbered"])
@pytest.mark.parametrize("kind", ["adagrad", "adamw", "momentum", "sparse adam"])
def test_training_goes_on_bit_for_bit(kind: str, form: str, place: Place, tmp_path: Path) -> None:
    source, new = trained(kind), training(kind, 9)
    path = save(form, source, tmp_path)
    with place.agent(), checkpointer(new, place) as ckpt:
        report = ckpt.restore(seed=Seed(path, **EVERYTHING, optimizer_states="carry"))
        assert report is None and ckpt.batches_done == 0
        assert_same(source, new)
        new.reader.load_state_dict(source.reader.state_dict())
        seed_everything(4)
        train(new, ckpt, 2)
    seed_everything(4)
    for _ in range(2):
        source.batch()
    assert_same(source, new)
    run = Run.open(open_store(place.run))
    assert run.manifest(2, 1).kind == "full"

    # Started again, it goes on where it was, even if the other checkpoint has gone.
    again = training(kind, 5)
    Path(path).rename(tmp_path / "gone")
    with place.agent(), checkpointer(again, place) as ckpt:
        report = ckpt.restore(seed=Seed(path, **EVERYTHING, optimizer_states="carry"))
        assert report is not None and ckpt.batches_done == 2
        assert_same(source, again)


def test_renamed_parts_of_safetensors_files_leave_the_optimizer_alone(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "recpoint")
    tensors = {
        "transformer.emb_users.weight": torch.randn(ROWS, DIM),
        "transformer.norm.weight": torch.randn(2 * DIM),
        "transformer.norm.bias": torch.randn(2 * DIM),
        "transformer.other": torch.randn(3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    new = training("adagrad", 9)
    before = {name: tensor.clone() for name, tensor in new.model.state_dict().items()}
    seed = Seed(
        str(tmp_path),
        tables=["users"],
        dense=["norm.weight", "norm.bias"],
        names={"emb_*": "*"},
    )
    with place.agent(), checkpointer(new, place) as ckpt:
        ckpt.restore(seed=seed)
        after = new.model.state_dict()
        assert torch.equal(after["users.weight"], tensors["transformer.emb_users.weight"])
        assert torch.equal(after["norm.bias"], tensors["transformer.norm.bias"])
        for name in ("items.weight", "top.weight", "norm.running_mean"):
            assert torch.equal(after[name], before[name])
        assert all(bool((state["sum"] == 0.2).all()) for state in states(new).values())
        train(new, ckpt, 2)
    assert "table 'users' from 'transformer.emb_users.weight'" in caplog.text
    assert "left out: 'transformer.other'" in caplog.text


def test_tables_are_taken_by_name(place: Place, tmp_path: Path) -> None:
    source, new = trained("adagrad"), training("adagrad", 9)
    path = save("torch", source, tmp_path)
    before = new.model.items.weight.detach().clone()
    seed = Seed(path, tables={"users": "net.users.weight"}, dense={"top.bias": "top.bias"})
    with place.agent(), checkpointer(new, place) as ckpt:
        ckpt.restore(seed=seed)
    assert torch.equal(new.model.users.weight, source.model.users.weight)
    assert torch.equal(new.model.top.bias, source.model.top.bias)
    assert torch.equal(new.model.items.weight, before)


def test_averaged_weights_beside_the_model_have_to_be_named(place: Place, tmp_path: Path) -> None:
    source, averaged = trained("sgd").model, training("sgd", 3).model
    path = tmp_path / "a.pt"
    torch.save({"net": source.state_dict(), "ema": averaged.state_dict()}, path)
    with pytest.raises(IncompatibleModel, match="both under 'ema.' and under 'net.'"):
        checkpointer(training("sgd", 9), place).restore(seed=Seed(str(path), **EVERYTHING))
    new = training("sgd", 9)
    with place.agent(), checkpointer(new, place) as ckpt:
        ckpt.restore(seed=Seed(str(path), **EVERYTHING, names={"ema.*": "*"}))
    assert torch.equal(new.model.users.weight, averaged.users.weight)


class Larger(Recommender):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS + 1, DIM)
        self.top = nn.Linear(2 * DIM, 2)
        self.head = nn.Linear(2, 1)


def test_all_that_does_not_fit_is_named_at_once(place: Place, tmp_path: Path) -> None:
    path = save("torch", trained("adagrad"), tmp_path)
    model = Larger()
    new = Training(model, [Adagrad(model.parameters())], Batches(1))
    before = [tensor.clone() for tensor in model.state_dict().values()]
    with pytest.raises(IncompatibleModel) as refused:
        checkpointer(new, place).restore(
            seed=Seed(
                path,
                tables=["users", "itmes"],
                dense=["*"],
                names={"emb.*": "*"},
                optimizer_states="carry",
            )
        )
    for message in (
        f"table 'users' is float32[{ROWS + 1}, 6] in the model and float32[{ROWS}, 6] in the",
        "nothing in the model matches 'itmes' (near it: 'items')",
        "'top.weight' is float32[2, 12] in the model and float32[1, 12]",
        "'head.weight': 'net.head.weight' is not in the checkpoint",
        "no entry matches 'emb.*'",
        "6 numbered parameters under 'optimizers.0.' in the checkpoint, and 8 parameters of",
        "It also has 'net.items.weight'",
        "recpoint import",
    ):
        assert message in str(refused.value)
    assert all(map(torch.equal, before, model.state_dict().values()))


@pytest.mark.parametrize(
    ("stored", "kind", "message"),
    [
        ("sgd", "adagrad", "['step', 'sum']"),
        ("adagrad", "adamw", "['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq']"),
        ("sparse adam", "adagrad", "2 optimizers with numbered parameters in the checkpoint"),
    ],
)
def test_state_of_another_optimizer_is_refused(
    stored: str, kind: str, message: str, place: Place, tmp_path: Path
) -> None:
    path = save("torch", trained(stored), tmp_path)
    if stored == "sgd":
        torch.save({"net": trained("sgd").model.state_dict()}, path)
        message = "the optimizer state 'step', 'sum' of 'users.weight' is not in the checkpoint"
    elif stored == "adagrad":
        message = "the optimizer state 'exp_avg', 'exp_avg_sq', 'max_exp_avg_sq' of 'users.weight'"
    new = training(kind, 9)
    with pytest.raises(IncompatibleModel) as refused:
        checkpointer(new, place).restore(seed=Seed(path, **EVERYTHING, optimizer_states="carry"))
    assert message in str(refused.value)


class Own(SGD):
    """An optimizer of the user's."""


def test_an_optimizer_that_is_not_known_carries_nothing(place: Place, tmp_path: Path) -> None:
    path = save("torch", trained("sgd"), tmp_path)
    new = training("sgd", 9)
    new.optimizers = [Own(new.model.parameters(), lr=0.1)]
    with pytest.raises(IncompatibleModel, match="Own, whose state is not known"):
        checkpointer(new, place).restore(seed=Seed(path, **EVERYTHING, optimizer_states="carry"))


def test_a_damaged_file_is_refused_before_anything_changes(place: Place, tmp_path: Path) -> None:
    path = Path(save("torch", trained("sgd"), tmp_path))
    path.write_bytes(path.read_bytes()[:-1000])
    new = training("sgd", 9)
    before = [tensor.clone() for tensor in new.model.state_dict().values()]
    with pytest.raises(MalformedObject, match=r"a\.pt"):
        checkpointer(new, place).restore(seed=Seed(str(path), **EVERYTHING))
    assert all(map(torch.equal, before, new.model.state_dict().values()))


def test_settings_of_runs_and_files_are_not_mixed(place: Place, tmp_path: Path) -> None:
    path = save("torch", trained("sgd"), tmp_path)
    with pytest.raises(SettingsError, match="no choice"):
        checkpointer(training("sgd", 9), place).restore(seed=Seed(path, **EVERYTHING, step=3))
    for names in ({"a.*": "b"}, {"*.*": "*.*"}, {"a": 3}, ["a"]):
        with pytest.raises(SettingsError, match="names"):
            Seed(path, **EVERYTHING, names=names)  # type: ignore[arg-type]
    other = Seed(str(tmp_path / "none"), tables=["users"], names={"a": "b"})
    with pytest.raises(SettingsError, match="no checkpoint of another tool"):
        checkpointer(training("sgd", 9), place).restore(seed=other)


CACHED: dict[str, Any] = {
    "adagrad": lambda m: [Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.2)],
    "sparse adam": lambda m: [
        SparseAdam([m.users.weight, m.items.weight], lr=0.01),
        SGD(m.top.parameters(), lr=0.1),
    ],
}


@pytest.mark.parametrize("states", ["carry", "drop"])
@pytest.mark.parametrize("kind", CACHED)
def test_cached_tables_begin_with_all_rows(
    kind: str, states: Any, place: Place, tmp_path: Path
) -> None:
    sparse = kind == "sparse adam"
    source = cached_training.plain_model(sparse=sparse)
    optimizers = CACHED[kind](source)
    reader = cached_training.Batches()
    for _, batch in zip(range(3), reader, strict=False):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(source(batch), batch["target"]).backward()
        for optimizer in optimizers:
            optimizer.step()
    saved = {"net": source.state_dict(), "opt": [o.state_dict() for o in optimizers]}
    torch.save(saved, tmp_path / "a.pt")

    model, cache = cached_training.cached_model({"users": 30, "items": 40}, sparse=sparse)
    own_optimizers = CACHED[kind](model)
    assert cache_of(model) is cache
    ahead = Lookahead(cached_training.Batches(), model, window=10)
    seed = Seed(str(tmp_path / "a.pt"), tables=["*"], dense=["*"], optimizer_states=states)
    settings = {"run": place.run, "directory": place.staging, "interval_batches": 2}
    ckpt = Checkpointer(
        model,
        own_optimizers,
        reader=ahead,
        **arguments({**settings, "handle_sigterm": False, "announce": False}),
    )
    with place.agent(), ckpt:
        ckpt.restore(seed=seed)
        found = cached_training.rows_of_cache(cache)
        expected = cached_training.rows_of_plain(source, optimizers[0])
        if states == "drop":
            fresh: dict[str, tuple[Tensor, ...]] = {
                name: (arrays[0], *(torch.full_like(a, 0.0 if sparse else 0.2) for a in arrays[1:]))
                for name, arrays in expected.arrays.items()
            }
            expected = cached_training.Rows(fresh)
        assert not found.differences(expected)
        for batch in ckpt.batches(total=2):
            for optimizer in own_optimizers:
                optimizer.zero_grad()
            nn.functional.mse_loss(model(batch), batch["target"]).backward()
            for optimizer in own_optimizers:
                optimizer.step()
    run = Run.open(open_store(place.run))
    assert run.manifest(2, 1).kind == "full"


class Pair(nn.Module):
    """Two tables of one shape."""

    def __init__(self, seed: int, names: Sequence[str] = ("a", "b")) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name in names:
            self.add_module(name, nn.Embedding(20, 4))

    def weights(self) -> list[nn.Parameter]:
        return list(self.parameters())


def job(model: Any, optimizers: list[torch.optim.Optimizer]) -> Training:
    return Training(model, optimizers, Batches(1))


def pair_trained(optimizers: Callable[[Any], list[torch.optim.Optimizer]]) -> Training:
    model: Any = Pair(1)
    source = job(model, optimizers(model))
    for _ in range(2):
        model.a(torch.arange(9)).sum().backward()
        model.b(torch.arange(5)).square().sum().backward()
        for optimizer in source.optimizers:
            optimizer.step()
    return source


def one_adagrad(model: Any) -> list[torch.optim.Optimizer]:
    return [Adagrad(model.parameters())]


def two_adagrads(model: Any) -> list[torch.optim.Optimizer]:
    return [Adagrad([weight]) for weight in model.parameters()]


def carried(saved: Any, new: Training, place: Place, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "a.pt")
    seed = Seed(str(tmp_path / "a.pt"), tables=["*"], optimizer_states="carry")
    ckpt = checkpointer(new, place)
    try:
        ckpt.restore(seed=seed)
    finally:
        ckpt.close(final=False)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_states_become_what_torch_makes_of_them(
    dtype: torch.dtype, fused: bool, place: Place, tmp_path: Path
) -> None:
    def optimizers(model: Any) -> list[torch.optim.Optimizer]:
        return [Adagrad(model.parameters(), fused=fused)]

    source = pair_trained(optimizers)
    state = copy.deepcopy(source.optimizers[0].state_dict())
    for values in state["state"].values():
        values["sum"] = values["sum"].to(dtype)
    state["state"][0]["step"] = state["state"][0]["step"].double()
    state["state"][1]["step"] = 2
    by_torch, new = Pair(9), Pair(9)
    by_torch.load_state_dict(source.model.state_dict())
    expected = job(by_torch, optimizers(by_torch))
    expected.optimizers[0].load_state_dict(copy.deepcopy(state))
    own = job(new, optimizers(new))
    carried({"net": source.model.state_dict(), "opt": state}, own, place, tmp_path)
    assert_same(expected, own)
    for name, values in states(expected).items():
        assert {key: value.dtype for key, value in values.items()} == {
            key: value.dtype for key, value in states(own)[name].items()
        }


@pytest.mark.parametrize(
    "step",
    ["seven", 2.5, -1, float("nan"), float("inf"), 1 << 60]
    + [torch.tensor([1.0, 2.0]), torch.tensor(2), torch.tensor(float("nan"))],
)
def test_a_count_of_steps_that_is_none_is_refused_by_name(
    step: Any, place: Place, tmp_path: Path
) -> None:
    source, new = pair_trained(one_adagrad), Pair(9)
    state = copy.deepcopy(source.optimizers[0].state_dict())
    state["state"][1]["step"] = step
    with pytest.raises(IncompatibleModel, match=r"state 'step' of 'b\.weight' is .* no whole"):
        carried(
            {"net": source.model.state_dict(), "opt": state},
            job(new, one_adagrad(new)),
            place,
            tmp_path,
        )
    assert all(map(torch.equal, new.weights(), Pair(9).weights()))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_numbered_optimizers_that_fit_in_two_orders_are_refused(
    order: tuple[int, int], place: Place, tmp_path: Path
) -> None:
    source, new = pair_trained(two_adagrads), Pair(9)
    saved = {"net": source.model.state_dict()}
    saved |= {f"o{number}": source.optimizers[number].state_dict() for number in order}
    with pytest.raises(IncompatibleModel, match="fit the optimizers here in another order, too"):
        carried(saved, job(new, two_adagrads(new)), place, tmp_path)
    assert all(map(torch.equal, new.weights(), Pair(9).weights()))


def test_an_optimizer_without_state_takes_no_other_ones_place(place: Place, tmp_path: Path) -> None:
    def mixed(model: Any) -> list[torch.optim.Optimizer]:
        return [SGD([model.a.weight], lr=0.1), Adagrad([model.b.weight])]

    source, new = pair_trained(mixed), Pair(9)
    saved = [optimizer.state_dict() for optimizer in source.optimizers]
    own = job(new, mixed(new))
    with pytest.raises(IncompatibleModel, match="in another order, too"):
        carried({"net": source.model.state_dict(), "opt": saved[::-1]}, own, place, tmp_path)
    carried({"net": source.model.state_dict(), "opt": saved}, own, place, tmp_path)
    assert_same(source, own)


def test_the_log_says_which_number_went_to_which_parameter(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "recpoint")
    source, new = pair_trained(one_adagrad), Pair(9)
    saved = {"net": source.model.state_dict(), "opt": source.optimizers[0].state_dict()}
    own = job(new, one_adagrad(new))
    carried(saved, own, place, tmp_path)
    assert_same(source, own)
    assert "by order alone, under 'opt.': 0 is 'a.weight', 1 is 'b.weight'" in caplog.text


def test_named_parameters_may_come_in_any_order(place: Place, tmp_path: Path) -> None:
    def named(model: Any) -> list[torch.optim.Optimizer]:
        return [Adagrad([entry]) for entry in model.named_parameters()]

    source, new = pair_trained(named), Pair(9)  # torch takes names since 2.6
    saved = [optimizer.state_dict() for optimizer in source.optimizers]
    own = job(new, two_adagrads(new))
    carried({"net": source.model.state_dict(), "opt": saved[::-1]}, own, place, tmp_path)
    assert_same(source, own)


def test_an_exact_name_is_no_pattern(place: Place, tmp_path: Path) -> None:
    source, new, before = Pair(1, ("a*", "ab")), Pair(9, ("a*", "ab")), Pair(9, ("a*", "ab"))
    torch.save(source.state_dict(), tmp_path / "a.pt")
    training = job(new, [SGD(new.parameters(), lr=0.1)])
    checkpointer(training, place).restore(seed=Seed(str(tmp_path / "a.pt"), tables=["a*"]))
    assert torch.equal(new.weights()[0], source.weights()[0])
    assert torch.equal(new.weights()[1], before.weights()[1])


@pytest.mark.parametrize("tables", [["a"], {"a": "a"}])
def test_only_what_is_wanted_says_which_copy_of_the_model_counts(
    tables: Any, place: Place, tmp_path: Path
) -> None:
    source, new = Pair(1), Pair(9)
    saved = {"net": {"a.weight": source.weights()[0]}, "ema": source.state_dict()}
    torch.save(saved, tmp_path / "a.pt")
    training = job(new, [SGD(new.parameters(), lr=0.1)])
    with pytest.raises(IncompatibleModel, match="are both under 'ema.' and under 'net.'"):
        checkpointer(training, place).restore(seed=Seed(str(tmp_path / "a.pt"), tables=tables))


def test_a_table_that_cannot_be_read_is_refused_before_another_changes(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "PIECE_BYTES", 64)
    monkeypatch.setattr(contents, "_WINDOW_BYTES", 128)
    new = Pair(9)
    saved = {"a.weight": torch.ones(20, 4), "b.weight": torch.ones(4, 20).t()}
    torch.save(saved, tmp_path / "a.pt")
    training = job(new, [SGD(new.parameters(), lr=0.1)])
    with pytest.raises(MalformedObject, match=r"tensor\.contiguous"):
        checkpointer(training, place).restore(seed=Seed(str(tmp_path / "a.pt"), tables=["*"]))
    assert all(map(torch.equal, new.weights(), Pair(9).weights()))


def test_a_path_where_nothing_lies_is_named(place: Place, tmp_path: Path) -> None:
    seed = Seed(str(tmp_path / "typo.pt"), tables=["*"])
    with pytest.raises(NothingToRestore, match="no file or directory at that path, and no run"):
        checkpointer(training("sgd", 9), place).restore(seed=seed)
    assert not (tmp_path / "typo.pt").exists()


def test_all_tables_of_a_cache_are_loaded_or_none(place: Place, tmp_path: Path) -> None:
    torch.save(cached_training.plain_model().state_dict(), tmp_path / "a.pt")
    model, _ = cached_training.cached_model({"users": 30, "items": 40})
    ckpt = Checkpointer(
        model,
        CACHED["adagrad"](model),
        reader=Lookahead(cached_training.Batches(), model, window=10),
        **arguments({"run": place.run, "directory": place.staging, "interval_batches": 2}),
    )
    with ckpt, pytest.raises(IncompatibleModel, match="all tables of a cache are loaded"):
        ckpt.restore(seed=Seed(str(tmp_path / "a.pt"), tables=["users"]))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_checkpoint_of_lightning(place: Place, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from tests.lightning_builder import Manual, Samples

    module = Manual()
    trainer = lightning.Trainer(
        max_epochs=1,
        logger=False,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(Samples(), batch_size=8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    model = module.net
    new = training("sgd", 9)
    tables = [new.model.users.weight, new.model.items.weight]
    rest = [*new.model.norm.parameters(), *new.model.top.parameters()]
    new.optimizers = [Adagrad(tables, lr=0.1), Adam(rest, lr=0.01)]
    seed = Seed(str(tmp_path / "a.ckpt"), **EVERYTHING, optimizer_states="carry")
    with place.agent(), checkpointer(new, place) as ckpt:
        ckpt.restore(seed=seed)
        optimizers: Any = module.optimizers()
        source = Training(model, [o.optimizer for o in optimizers], Batches(1))
        assert_same(source, new)
        train(new, ckpt, 2)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_lightnings_callback_begins_with_lightnings_checkpoint(
    place: Place, tmp_path: Path
) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from recpoint import LightningCallback
    from tests.lightning_builder import Manual, fit, loader

    seen: dict[str, Any] = {}

    class Looks(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen["model"] = {name: t.clone() for name, t in module.state_dict().items()}
            seen["states"] = [
                [{key: t.clone() for key, t in state.items()} for state in optimizer.state.values()]
                for optimizer in trainer.optimizers
            ]

    source = fit(Manual(), loader(), validate=False, max_epochs=1)
    source.save_checkpoint(tmp_path / "a.ckpt")
    seed = Seed(str(tmp_path / "a.ckpt"), **EVERYTHING, optimizer_states="carry")
    callback = LightningCallback(
        run=place.run, staging=place.staging, interval_batches=4, restore={"seed": seed}
    )
    with place.agent():
        fit(Manual(), loader(), Looks(), callback, validate=False, max_epochs=1)
    expected = source.lightning_module.state_dict()
    assert seen["model"].keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in seen["model"].items())
    for optimizer, states in zip(source.optimizers, seen["states"], strict=True):
        assert len(states) == len(optimizer.state) > 0
        for state, stored in zip(states, optimizer.state.values(), strict=True):
            assert all(torch.equal(tensor, stored[key]) for key, tensor in state.items())
    run = Run.open(open_store(place.run))
    assert run.manifest(min(name.step for name in run.live_line()), 1).kind == "full"
