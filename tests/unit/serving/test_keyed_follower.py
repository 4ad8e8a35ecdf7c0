"""A follower serves keyed tables by key: in tables, in models, to threads, from damaged runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recpoint import Follower, KeyedEmbedding, KeyedEmbeddingBag, LeastUsed, grow
from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE
from recpoint.catalog.run.run import Run
from recpoint.embeddings import local
from recpoint.errors import IncompatibleModel
from recpoint.format.naming import ManifestName
from recpoint.serving.keyed_table import RowsByKey
from recpoint.serving.version import Version
from tests.catalog_builder import Table, build, new_run, publish
from tests.keyed_run import KEYS, KeyedTrainer
from tests.keyed_training import DIM, KeyedTraining, keyed_checkpointer
from tests.training_builder import Place, until


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = new_run(tmp_path / "run")
    run.claim(None)
    return run


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "run"), tmp_path / "staging")


def require_rows(version: Version, trainer: KeyedTrainer) -> None:
    """Require the rows of one checkpoint for all keys, and zeros for keys that have none."""
    name = ManifestName(version.checkpoint.step, version.checkpoint.generation)
    expected, zeros = trainer.rows_at[name], torch.zeros(3)
    rows = version.lookup("users", KEYS)
    assert torch.equal(rows, torch.stack([expected.get(key, zeros) for key in KEYS.tolist()]))
    table = version.tables["users"]
    assert isinstance(table, RowsByKey)
    assert table.has_row(KEYS).tolist() == [key in expected for key in KEYS.tolist()]


@pytest.mark.parametrize(("bits", "quantized"), [(None, False), (4, False), (4, True)])
def test_serves_rows_of_keys_that_come_move_and_go(
    run: Run, bits: int | None, quantized: bool
) -> None:
    trainer = KeyedTrainer(run, bits=bits)
    follower = Follower(run.url, quantized=quantized)
    for _ in range(20):
        trainer.commit()
        if trainer.step == 15:
            trainer.grow(5)
        if trainer.step % 5 == 3:
            continue  # two increments come at once
        assert follower.poll()
        with follower.reading() as version:
            require_rows(version, trainer)
    follower.pin(2)
    assert follower.poll()
    follower.unpin()
    with follower.reading() as version:
        assert version.step == 2
        require_rows(version, trainer)
    assert follower.poll()
    with follower.reading() as version:
        require_rows(version, trainer)


def test_threads_look_keys_up_in_one_version_while_others_are_read(run: Run) -> None:
    trainer = KeyedTrainer(run)
    trainer.commit()
    follower = Follower(run.url)
    follower.poll()
    seen: set[int] = set()
    errors: list[BaseException] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            try:
                with follower.reading() as version:
                    for _ in range(3):
                        require_rows(version, trainer)
                    seen.add(version.step)
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        while trainer.step < 30 or (len(seen) < 4 and trainer.step < 300):
            trainer.commit("full" if trainer.step % 7 == 6 else "increment")
            follower.poll()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert errors == [] and len(seen) >= 4


def test_other_dtypes_are_no_keys(run: Run) -> None:
    trainer = KeyedTrainer(run)
    trainer.commit()
    follower = Follower(run.url)
    follower.poll()
    with follower.reading() as version:
        key = next(key for key in trainer.rows if abs(key) < 2**31)
        narrow = version.lookup("users", torch.tensor([key], dtype=torch.int32))
        assert torch.equal(narrow[0], trainer.rows[key])
        with pytest.raises(TypeError, match=r"found keys of torch\.float32"):
            version.lookup("users", torch.tensor([1.0]))


@pytest.mark.parametrize(
    ("keys", "last_use", "text"),
    [
        ([0, 5, 7, 5], [-1, 3, 3, 3], "a key of its own for each row"),
        ([4, 5, 7, 0], [3, 3, 3, -1], "none for row 0"),
    ],
    ids=["two slots of a key", "a key in row 0"],
)
@pytest.mark.parametrize("incremental", [False, True])
def test_damaged_keys_are_passed_over(
    run: Run, keys: list[int], last_use: list[int], text: str, incremental: bool
) -> None:
    def commit(step: int, states: list[list[int]], parent: Any = None) -> Any:
        values = torch.full((len(states[0]), 3), float(step))
        values[0] = 0.0
        table = Table(
            "users",
            values,
            states=tuple(torch.tensor(state) for state in states),
            state_names=(KEY, LAST_USE),
        )
        dirty = None if parent is None else [torch.arange(table.rows)]
        return publish(
            run, build(run, [table], step=step, generation=1, parent=parent, dirty=dirty)
        )

    good = commit(1, [[0, 5, 6, 7], [-1, 1, 1, -1]])
    follower = Follower(run.url)
    follower.poll()
    newest = commit(2, [keys, last_use], good if incremental else None)
    assert not follower.poll()
    assert text in str(follower.status.skipped)
    with follower.reading() as version:
        served = version.lookup("users", torch.tensor([5, 6, 7, 0]))
        assert served[:, 0].tolist() == [1, 1, 0, 0]
    commit(3, [[0, 9, 8, 5], [-1, 3, 3, 3]], newest if incremental else None)
    assert follower.poll()
    with follower.reading() as version:
        served = version.lookup("users", torch.tensor([5, 6, 7, 8, 9, 0]))
        assert served[:, 0].tolist() == [3, 0, 0, 3, 3, 0]


class _WithBags(nn.Module):
    """Keyed embeddings and bags under two names, and a plain table."""

    def __init__(self, **rules: Any) -> None:
        super().__init__()
        self.users = KeyedEmbedding(DIM, 20, name="users", **rules)
        self.bags = KeyedEmbeddingBag(DIM, 25, mode="mean", name="bags", **rules)
        self.again = self.users
        self.items = nn.Embedding(9, DIM)
        self.top = nn.Linear(DIM, 1)

    def forward(self, keys: Tensor) -> Tensor:
        rows = self.users(input=keys) + self.again(keys) + self.items(keys % 9)
        bags = self.bags(keys.view(2, -1)) + self.bags(keys, torch.tensor([0, 4]))
        scores: Tensor = self.top(rows + bags.sum(0))
        return scores.squeeze(1)


def _training(**rules: Any) -> KeyedTraining:
    training = KeyedTraining(20, **rules)
    model: Any = _WithBags(**rules)
    training.model = model
    tables = [model.users.weight, model.bags.weight, model.items.weight]
    training.optimizers = [
        torch.optim.Adagrad(tables, lr=0.1),
        torch.optim.SGD(model.top.parameters(), lr=0.1),
    ]
    return training


def _requests() -> Iterator[Tensor]:
    for first in (0, 5, 30):  # the last: keys that come later, or never
        keys = torch.arange(first, first + 6)
        yield torch.where(keys % 5 == 0, -(2**63) + keys, keys)


def _scores(model: nn.Module) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        scores = [model(keys) for keys in _requests()]
    model.train()
    return scores


@pytest.mark.parametrize(
    ("bits", "quantized", "compiled"),
    [("lossless", False, False), ("lossless", False, True), ("lossless", True, False)],
)
def test_a_model_predicts_as_the_trainer_does(
    place: Place, bits: Any, quantized: bool, compiled: bool
) -> None:
    training = _training(evict=LeastUsed())
    served: nn.Module = _WithBags()
    if compiled:
        compiled_model = torch.compile(served, backend="eager")
        assert isinstance(compiled_model, nn.Module)
        served = compiled_model
    follower = Follower(place.run, model=served, quantized=quantized)
    with keyed_checkpointer(training, place, bits=bits, interval_batches=9) as ckpt:
        ckpt.restore()
        for step in (9, 18, 27, 36):
            while ckpt.batches_done < step:
                training.batch()
                ckpt.step()
            if step == 27:
                grow(training.model, training.optimizers[0], "users", 30)
            until(lambda: place.persist_all() > 0)
            until(lambda: ckpt.stats.lag_batches == 0)
            assert follower.poll()
            with follower.reading() as version:
                assert version.step == step
                scores = [version(keys) for keys in _requests()]
            for score, expected in zip(scores, _scores(training.model), strict=True):
                assert isinstance(score, Tensor) and torch.equal(score, expected)
    assert training.model.users.counts.evicted > 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_that_were_trained_in_a_cache_are_served(place: Place, device: str) -> None:
    training = KeyedTraining(14, home=local())
    served = nn.Module()
    served.users = KeyedEmbedding(DIM, 14, name="users", device=device)
    served.items, served.top = nn.Embedding(9, DIM), nn.Linear(DIM, 1)
    follower = Follower(place.run, model=served)
    with keyed_checkpointer(training, place, interval_batches=9) as ckpt:
        ckpt.restore()
        for step in (9, 18):
            while ckpt.batches_done < step:
                training.batch()
                ckpt.step()
            until(lambda: place.persist_all() > 0)
            until(lambda: ckpt.stats.lag_batches == 0)
            assert follower.poll()
            table = training.model.users.eval()
            for keys in _requests():
                with follower.reading() as version, torch.no_grad():
                    assert version.model is not None
                    looked_up = version.model.get_submodule("users")(keys)
                    assert torch.equal(looked_up, table(keys))
                    assert torch.equal(looked_up, version.lookup("users", keys))
            table.train()
    assert training.model.users.counts.evicted > 0


class _Scaled(KeyedEmbedding):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 100 * super().forward(input)


def _hooked() -> nn.Module:
    table = KeyedEmbedding(DIM, 3)
    table.register_forward_hook(lambda _module, _args, rows: 100 * rows)
    return nn.Sequential(table)


@pytest.mark.parametrize(
    ("served", "text"),
    [
        (KeyedEmbedding(DIM, 3), "the model itself"),
        (nn.Sequential(_Scaled(DIM, 3)), "a _Scaled with a forward of its own"),
        (_hooked(), "forward hooks"),
    ],
    ids=["itself", "another forward", "hooks"],
)
def test_what_lookups_by_key_would_leave_out_is_refused(
    tmp_path: Path, served: nn.Module, text: str
) -> None:
    modules = [*served.modules()]
    with pytest.raises(IncompatibleModel, match=text):
        Follower(str(tmp_path), model=served)
    assert modules == [*served.modules()], "nothing is replaced"


@pytest.mark.parametrize(
    ("served", "text"),
    [
        (nn.Embedding(12, 3), "has rows by number in the model and keys"),
        (KeyedEmbedding(4, 12), "4 values of torch.float32 a row in the model and 3"),
        (KeyedEmbedding(3, 12, dtype=torch.float64), r"torch\.float64 a row"),
    ],
    ids=["not keyed", "dim", "dtype"],
)
def test_another_table_is_refused(run: Run, served: nn.Module, text: str) -> None:
    KeyedTrainer(run).commit()
    follower = Follower(run.url, model=nn.ModuleDict({"users": served}))
    with pytest.raises(IncompatibleModel, match=text):
        follower.poll()


def test_a_table_without_keys_is_not_served_by_key(run: Run) -> None:
    publish(run, build(run, [Table("users", torch.zeros(12, 3))], step=1, generation=1))
    served = nn.ModuleDict({"users": KeyedEmbedding(3, 11)})
    with pytest.raises(IncompatibleModel, match="rows by number in the checkpoint"):
        Follower(run.url, model=served).poll()
