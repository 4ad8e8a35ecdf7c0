"""Several ranks train a keyed table: all have the same keys, rows and next evictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from tests.forked import ForkedProcess
from tests.keyed_ranks import Life, keyed_ranks, trained
from tests.polling import PATIENCE_SECONDS


def told(folder: Path, count: int, lives: list[Life]) -> list[list[dict[str, Any]]]:
    """Return what each rank told of these lives."""
    folder.mkdir()
    processes = [
        ForkedProcess(target=keyed_ranks, args=(str(folder), rank, count, lives), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0
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
