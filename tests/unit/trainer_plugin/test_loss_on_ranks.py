"""Two ranks measure their own batches, agree on one price, and train as without measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.kernels.lookup_counts import values
from recpoint.trainer_plugin.loss.pace import MeasuringPace
from recpoint.trainer_plugin.loss.price import LossPair, PriceSearch, TrialSums
from recpoint.trainer_plugin.loss.rank_sums import RankMeasurements
from tests.forked import ForkedProcess
from tests.loss_ranks import INTERVAL, ROWS, RankClicks, loss_ranks
from tests.polling import PATIENCE_SECONDS


def told(folder: Path, cases: list[str], ranks: int = 2) -> list[dict[str, Any]]:
    """Return what each rank told of these cases."""
    processes = [
        ForkedProcess(target=loss_ranks, args=(str(folder), rank, cases, ranks), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0
    return [torch.load(folder / f"told-{rank}", weights_only=False) for rank in range(ranks)]


def test_ranks_measure_and_agree_on_one_price(tmp_path: Path) -> None:
    first, second = (of_rank["measured"] for of_rank in told(tmp_path, ["measured"]))
    assert first["changed_by_measuring"] == second["changed_by_measuring"] == []
    assert first["states"] == second["states"]
    assert first["stride"] == second["stride"]
    figures = first["figures"]
    assert figures.error is None and figures.price is not None
    assert figures.price == second["figures"].price
    # Only the first batch is measured before the ranks agree; then both measure the same ones.
    measured = [state["measured"] for state in first["states"]]
    assert measured[0] == 2 and all(number % 2 == 0 for number in measured)
    assert measured[-1] > 2 + 2 * INTERVAL
    run = Run.open(open_store(str(tmp_path / "measured" / "loss" / "run")))
    name = run.manifest_names()[-1]
    stored = run.manifest(*name).loss
    assert stored == first["record"] == second["record"]
    assert stored is not None and stored.price == figures.price.hex()


@pytest.mark.parametrize("case", ("own loop", "unequal calls"))
def test_ranks_measure_in_loops_of_their_own(tmp_path: Path, case: str) -> None:
    first, second = (of_rank[case] for of_rank in told(tmp_path, [case]))
    assert first["changed_by_measuring"] == second["changed_by_measuring"] == []
    assert first["states"] == second["states"] and first["stride"] == second["stride"]
    assert first["figures"].error is None
    assert first["states"][-1]["measured"] > 2  # how many more, the clock says


def test_ranks_count_the_rows_that_any_has_looked_up(tmp_path: Path) -> None:
    first, second = (of_rank["counted"] for of_rank in told(tmp_path, ["counted"]))
    assert first["changed_by_measuring"] == second["changed_by_measuring"] == []
    assert torch.equal(first["counts"]["items"], second["counts"]["items"])
    readers = [RankClicks(rank) for rank in range(2)]
    # The gradients of all ranks are added up, so each row counts once a step.
    steps = [
        torch.cat([next(reader)[0].flatten() for reader in readers]).unique()
        for _ in range(2 * INTERVAL)
    ]
    lookups = torch.bincount(torch.cat(steps), minlength=ROWS)
    is_exact = lookups <= 16
    counted = values(first["counts"]["items"])
    assert bool(is_exact.any()) and torch.equal(counted[is_exact], lookups[is_exact].float())


def test_a_wrapped_model_of_one_process_is_measured(tmp_path: Path) -> None:
    (alone,) = (of_rank["alone"] for of_rank in told(tmp_path, ["alone"], ranks=1))
    assert alone["changed_by_measuring"] == []
    assert alone["figures"].error is None and alone["figures"].batches > INTERVAL // 2


def test_all_ranks_stop_if_one_cannot_measure(tmp_path: Path) -> None:
    first, second = (of_rank["error on one"] for of_rank in told(tmp_path, ["error on one"]))
    assert second["figures"].error == "MemoryError: no memory"
    assert first["figures"].error == "another rank cannot measure, see its log"
    assert first["figures"].price is second["figures"].price is None
    assert first["record"] == second["record"]


def test_what_ranks_cannot_measure_is_refused_by_name(tmp_path: Path) -> None:
    for of_rank in told(tmp_path, ["refused"]):
        refusals = of_rank["refused"]
        assert "Loss: found [0.002, 0.5] on rank 1" in refusals["other increase"]
        assert "SyncBatchNorm" in refusals["SyncBatchNorm"]
        assert "'layers', a DistributedDataParallel" in refusals["DistributedDataParallel"]
        assert "not all ranks hold whole" in refusals["own table"]


def pair(number: int) -> LossPair:
    return LossPair(loss=1.0 + 0.01 * (number % 5), even=1e-4 + 1e-6 * (number % 3), odd=2e-4)


def test_sums_of_ranks_are_those_of_one_process() -> None:
    searches = [PriceSearch(1e-3, lambda: None) for _ in range(3)]
    ranks = [RankMeasurements() for _ in range(2)]
    for number in range(20):
        searches[-1].add(pair(number))
        ranks[number % 2].add(pair(number))
    integers = [
        rank.integers(has_error=False, may_raise=number == 0, first_price=2.0**-number, stride=3)
        for number, rank in enumerate(ranks)
    ]
    for search, rank in zip(searches, ranks, strict=False):
        agreed = rank.agree(integers)
        assert (agreed.has_error, agreed.has_failed, agreed.stride) == (False, False, 3)
        search.merge(agreed.sums)
        assert rank.first_price == 0.5 and rank.may_raise
        assert search.measured == searches[-1].measured == 20
        assert search.even == pytest.approx(searches[-1].even)
        assert search.awaits_first_price
        # The next agreement has nothing of this one.
        left = rank.integers(has_error=True, may_raise=True, first_price=None, stride=1)
        assert rank.agree([left, left]).sums == TrialSums()
        assert rank.first_price is None


def test_a_loss_that_fails_on_one_rank_fails_on_all() -> None:
    ranks = [RankMeasurements() for _ in range(2)]
    ranks[1].fail()
    integers = [
        rank.integers(has_error=False, may_raise=True, first_price=None, stride=stride)
        for rank, stride in zip(ranks, (4, 9), strict=True)
    ]
    assert all(rank.agree(integers)[1:3] == (True, 9) for rank in ranks)


def test_ranks_measure_at_one_stride() -> None:
    seconds = [0.0]
    pace = MeasuringPace(0.02, in_step=True, clock=lambda: seconds[0])
    measured: list[int] = []

    def train(batches: range) -> None:
        for batch in batches:
            if pace.is_due():
                with pace.measuring():
                    seconds[0] += 3.0
                measured.append(batch)
            seconds[0] += 1.0

    train(range(1, 60))
    assert measured == [1]
    assert pace.wanted_stride == 3 * 49
    pace.stride = 150
    train(range(60, 1000))
    assert measured == [1, 150, 300, 450, 600, 750, 900]
    assert pace.measured_share <= 0.021
