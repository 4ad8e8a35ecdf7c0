"""Rows that no batch has changed: fulls of fewer bits leave them out, and restores have them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from recpoint import Consecutive, Lookahead
from recpoint.catalog.check.validate import validate
from recpoint.catalog.persist import first_rows
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.embeddings import Uniform
from recpoint.embeddings.home.memory import MemoryHome
from recpoint.format.manifest import Manifest
from tests.cached_training import INITIAL, ITEMS, USERS, Batches, cached_model, rows_of_plain
from tests.grown_training import GROW, MORE_ROWS, RULE, first_run, tensors, training
from tests.training_builder import DIM, ROWS, Place, checkpointer, train
from tests.unit.trainer_plugin.test_cached_checkpoints import OPTIMIZERS, SMALL, Both, checkpointing
from tests.unit.trainer_plugin.test_parts_of_servers import served

SETTINGS: dict[str, Any] = {"bits": 4, "quantizer": "asymmetric", "when_busy": "wait"}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_rows, "_CHUNK_COST_BYTES", 0)


def manifests(place: Place) -> list[Manifest]:
    run = Run.open(open_store(place.run))
    return [run.manifest(*name) for name in reversed(run.live_line())]


def schemes(manifest: Manifest) -> Counter[str]:
    rows: Counter[str] = Counter()
    for entry in manifest.chunks:
        if entry.scheme is not None:
            rows[entry.scheme] += entry.row_count or 0
    return rows


def require_first_values(both: Both, place: Place, rows: int) -> None:
    """Require that so many rows at least have their first values, bit for bit."""
    plain = rows_of_plain(both.model, both.optimizers[0])
    equal = 0
    for name, count in (("users", USERS), ("items", ITEMS)):
        first = INITIAL(name, torch.arange(count), plain.arrays[name][0].shape[1], torch.float32)
        equal += int((plain.arrays[name][0] == first).all(dim=1).sum())
    assert equal >= rows
    run = Run.open(open_store(place.run))
    assert all(validate(run, name, level="full").passed for name in run.live_line())


@pytest.mark.parametrize("home", ["cache", "servers"])
@pytest.mark.parametrize("name", ["adagrad", "sgd"])
def test_a_full_leaves_out_the_untrained_rows_of_a_cache(
    place: Place, home: str, name: str
) -> None:
    settings = SETTINGS | {"interval_batches": 3, "at_servers": home == "servers"}
    with served(2) as rows_at:
        both = Both(name, SMALL, rows_at if home == "servers" else MemoryHome())
        with checkpointing(both, place, **settings) as ckpt:
            both.train(ckpt, 6)
    full, increment = manifests(place)
    assert (full.kind, increment.kind) == ("full", "increment")
    untrained = schemes(full)["first"]
    assert untrained > 50 and sum(schemes(full).values()) == USERS + ITEMS
    assert schemes(increment)["first"] == 0

    again = Both(name, None)
    with checkpointing(again, place, **SETTINGS):
        require_first_values(again, place, untrained - increment.dirty_rows)

    # A script with another rule restores the same rows, because the checkpoint has its own rule.
    other = Both(name, SMALL, MemoryHome())
    other.model, _ = cached_model(SMALL, MemoryHome(), initial=Uniform(seed=99))
    other.reader = Lookahead(Batches(), other.model, window=10)
    other.optimizers = OPTIMIZERS[name](other.model)
    with checkpointing(other, place, **SETTINGS):
        assert other.rows.differences(again.rows) == []


def test_a_restored_training_leaves_them_out_again(place: Place) -> None:
    settings = SETTINGS | {"interval_batches": 2, "policy": Consecutive(full_every=2)}
    for batches in (2, 4):
        both = Both("adagrad", SMALL, MemoryHome())
        with checkpointing(both, place, **settings) as ckpt:
            both.train(ckpt, batches)
    fulls = [manifest for manifest in manifests(place) if manifest.kind == "full"]
    assert len(fulls) == 2 and all(schemes(full)["first"] > 50 for full in fulls)


def test_a_lossless_full_has_all_rows(place: Place) -> None:
    both = Both("adagrad", SMALL, MemoryHome())
    with checkpointing(both, place, interval_batches=3, when_busy="wait") as ckpt:
        both.train(ckpt, 3)
    assert schemes(manifests(place)[0]) == {"exact": USERS + ITEMS}


def test_new_rows_of_a_grown_table(place: Place) -> None:
    first_run(place, "adagrad")
    grown = training(MORE_ROWS, "adagrad", seed=9)
    with place.agent(), checkpointer(grown, place, grow=GROW, **SETTINGS) as ckpt:
        ckpt.restore()
        train(grown, ckpt, 2)
    full = next(manifest for manifest in manifests(place)[::-1] if manifest.kind == "full")
    assert 0 < schemes(full)["first"] <= MORE_ROWS - ROWS
    again = training(MORE_ROWS, "adagrad", seed=11)
    with place.agent(), checkpointer(again, place) as ckpt:
        ckpt.restore()
        ckpt.close(final=False)
    rows = torch.arange(ROWS, MORE_ROWS)
    first = RULE("users", rows, DIM, torch.float32)
    users = tensors(again)["users.weight"][rows]
    assert int((users == first).all(dim=1).sum()) >= schemes(full)["first"]
