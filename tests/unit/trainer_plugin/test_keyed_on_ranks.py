"""Several ranks train a keyed table: all have the same keys, rows and next evictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recpoint.catalog.restore.keyed_rows import LAST_USE
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from tests.forked import ForkedProcess
from tests.keyed_ranks import Life, keyed_ranks, trained
from tests.polling import PATIENCE_SECONDS


def exit_codes(folder: Path, count: int, lives: list[Life]) -> list[int | None]:
    """Have ranks go through lives; return with which codes they end."""
    folder.mkdir()
    processes = [
        ForkedProcess(target=keyed_ranks, args=(str(folder), rank, count, lives), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_SECONDS)
    return [process.exitcode for process in processes]


def told(folder: Path, count: int, lives: list[Life]) -> list[list[dict[str, Any]]]:
    """Return what each rank told of these lives."""
    assert exit_codes(folder, count, lives) == [0] * count
    return [torch.load(folder / f"told-{rank}", weights_only=False) for rank in range(count)]


def bits(state: dict[str, Any]) -> list[object]:
    tensors = [*state["row_states"].values(), *state["arrays"], state["sketch"], state["top"]]
    return [state["counts"], state["steps"], [tensor.tolist() for tensor in tensors]]


def keys_of(state: dict[str, Any]) -> list[object]:
    tensors = [*state["row_states"].values(), state["sketch"]]
    return [state["counts"], state["steps"], [tensor.tolist() for tensor in tensors]]


def test_ranks_have_the_keys_of_one_process_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    whole, halves, alone = (str(tmp_path / name) for name in ("whole", "halves", "alone"))
    lives = [
        Life(whole, 22),
        Life(halves, 11),
        Life(halves, 22, window=4),
        Life(str(tmp_path / "sparse"), 2, sparse=True),
        Life(str(tmp_path / "differs"), 2, differs=True),
    ]
    first, second = told(tmp_path / "ranks", 2, lives)
    assert [bits(state) for state in first[:3]] == [bits(state) for state in second[:3]]
    assert bits(first[2]) == bits(first[0])
    (use,) = Run.open(open_store(f"{halves}/run")).manifest(22, 2).keyed or ()
    counts = first[2]["counts"]
    assert (use.used, use.inserted, use.evicted, use.refused) == counts
    assert first[0]["counts"].evicted > 3 and first[0]["counts"].refused > 9
    single = trained(Life(alone, 22))
    assert keys_of(first[0]) == keys_of(single)
    for array, expected in zip(first[0]["arrays"], single["arrays"], strict=True):
        assert torch.allclose(array, expected, atol=1e-5)
    for states in (first, second):
        assert "sparse=True in DistributedDataParallel" in states[3]["errors"][0]
        joined, *differing = states[4]["errors"]
        assert "within DistributedDataParallel.join()" in joined
        assert len(differing) == 3
        assert all("other tables, steps, numbers of slots or keys" in text for text in differing)


@pytest.mark.nightly("loops")
def test_one_process_restores_into_three_ranks_and_back(tmp_path: Path) -> None:
    run, alone = str(tmp_path / "run"), str(tmp_path / "alone")
    stored = trained(Life(run, 8))
    ranks = told(tmp_path / "begin", 3, [Life(run, 8), Life(run, 16)])
    assert all(bits(states[0]) == bits(stored) for states in ranks)
    assert bits(ranks[0][1]) == bits(ranks[1][1]) == bits(ranks[2][1])
    last = trained(Life(run, 22))
    assert keys_of(last) == keys_of(trained(Life(alone, 22)))


def test_ranks_that_share_a_cache_go_on_bit_for_bit(tmp_path: Path) -> None:
    whole, halves = str(tmp_path / "whole"), str(tmp_path / "halves")
    form: dict[str, Any] = {"sparse": True, "cached_rows": 13, "window": 3}
    lives = [Life(whole, 22, **form), Life(halves, 11, **form), Life(halves, 22, **form)]
    first, second = told(tmp_path / "ranks", 2, lives)
    assert [bits(state) for state in first] == [bits(state) for state in second]
    assert bits(first[2]) == bits(first[0])
    assert first[0]["counts"].evicted > 3 and first[0]["counts"].refused > 9
    single = trained(Life(str(tmp_path / "alone"), 22))
    assert keys_of(first[0]) == keys_of(single)
    for array, expected in zip(first[0]["arrays"], single["arrays"], strict=True):
        assert torch.allclose(array, expected, atol=1e-5)


SHARED: dict[str, Any] = {"sparse": True, "cached_rows": 13, "window": 3}


@pytest.mark.nightly("loops")
@pytest.mark.parametrize("form", [{}, {"at_servers": True, "sparse": False}])
def test_a_shared_cache_goes_on_after_a_rank_was_killed(
    tmp_path: Path, form: dict[str, Any]
) -> None:
    whole, run = str(tmp_path / "whole"), str(tmp_path / "run")
    settings = SHARED | form
    uninterrupted = told(tmp_path / "first", 2, [Life(whole, 22, **settings)])
    told(tmp_path / "begin", 2, [Life(run, 11, **settings)])
    codes = exit_codes(tmp_path / "killed", 2, [Life(run, 22, dies=15, **settings)])
    assert codes[1] == -9 and codes[0] not in (0, None)
    resumed = told(tmp_path / "resumed", 2, [Life(run, 22, **settings)])
    assert bits(resumed[0][0]) == bits(resumed[1][0]) == bits(uninterrupted[0][0])


@pytest.mark.nightly("loops")
def test_rows_of_keys_come_back_from_parity(tmp_path: Path) -> None:
    lives = [Life(str(tmp_path / f"run-{kills}"), 14, kills=kills, **SHARED) for kills in (0, 7)]
    first, second = told(tmp_path / "ranks", 2, lives)
    assert bits(first[0]) == bits(first[1]) == bits(second[1])


@pytest.mark.nightly("loops")
def test_other_numbers_of_ranks_restore_a_shared_cache(tmp_path: Path) -> None:
    run, alone = str(tmp_path / "run"), str(tmp_path / "alone")
    stored = trained(Life(run, 8))
    three = told(tmp_path / "three", 3, [Life(run, 8, **SHARED), Life(run, 13, **SHARED)])
    assert all(bits(states[0]) == bits(stored) for states in three)
    two = told(tmp_path / "two", 2, [Life(run, 13, **SHARED), Life(run, 18, **SHARED)])
    assert all(bits(states[0]) == bits(three[0][1]) for states in two)
    whole = trained(Life(run, 18))
    assert bits(whole) == bits(two[0][1])
    last = trained(Life(run, 22))
    assert keys_of(last) == keys_of(trained(Life(alone, 22)))


@pytest.mark.nightly("loops")
@pytest.mark.parametrize("capacity_rows", [12, 30])
def test_another_capacity_of_a_shared_cache(tmp_path: Path, capacity_rows: int) -> None:
    run, other = str(tmp_path / "run"), str(tmp_path / "other")
    for folder in (run, other):
        trained(Life(folder, 11))
    form = {**SHARED, "capacity_rows": capacity_rows}
    two = told(tmp_path / "two", 2, [Life(run, 16, **form)])
    assert bits(two[0][0]) == bits(two[1][0])
    single = trained(Life(other, 16, capacity_rows=capacity_rows))
    assert keys_of(two[0][0]) == keys_of(single)
    is_used = single["row_states"][LAST_USE] >= 0
    for array, expected in zip(two[0][0]["arrays"], single["arrays"], strict=True):
        assert torch.allclose(array[is_used], expected[is_used], atol=1e-5)
