"""A loss is measured on tables that TorchRec has sharded, and they train as without it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.torchrec_model import BAGS, MISSING, ROWS
from tests.torchrec_ranks import play
from tests.unit.trainer_plugin.test_torchrec import each, same

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.nightly("loops"),
    pytest.mark.xdist_group("torchrec"),
]

MIXED = each("row_wise") | {"t1": "column_wise", "t2": "table_wise", "s1": "table_wise"}
BAG = "bags.embedding_bags."
#: How tables are sharded, on how many ranks, what trains them, in which pipeline, and by which
#: `Precision.tables`.
CASES: dict[str, dict[str, Any]] = {
    "one rank": {"ranks": 1, "kinds": each("table_wise"), "tables": {f"{BAG}t1": "lossless"}},
    "mixed": {"ranks": 2, "kinds": MIXED},
    "on one rank": {"ranks": 2, "kinds": MIXED | dict.fromkeys(("t0", "s0", "t1"), "table_wise")},
    "elementwise": {"ranks": 2, "kinds": each("column_wise"), "optimizer": "Adagrad"},
    "replicated": {"ranks": 2, "kinds": each("data_parallel"), "optimizer": "Adagrad"},
    "pipeline": {"ranks": 2, "kinds": MIXED, "pipeline": "TrainPipelineSparseDist"},
    "lite pipeline": {"ranks": 2, "kinds": MIXED, "pipeline": "TrainPipelineSparseDistLite"},
    "base pipeline": {"ranks": 2, "kinds": MIXED, "pipeline": "TrainPipelineBase"},
    "not sharded": {"ranks": 1, "kinds": None},
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("losses")
    plays = []
    for number, case in enumerate([*CASES.values(), {"play": "measured_refused", "ranks": 1}]):
        places = {"run": str(folder / f"run-{number}"), "staging": str(folder / f"s-{number}")}
        plays.append({"play": "measured", **places, **case})
    return dict(zip([*CASES, "refused"], play(plays, folder), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_tables_train_the_same_and_their_loss_is_that_of_rounded_rows(
    case: str, played: dict[str, list[Any]]
) -> None:
    ranks = played[case]
    for results in ranks:
        for part in ("tables", "dense", "optimizer", "fused", "generator"):
            assert same(results["measured"][part], results["plain"][part]), part
        loss, plain = results["loss"]
        assert loss == plain
        change, rounded = results["change"]
        assert change == pytest.approx(rounded, abs=1e-6 * plain) and abs(rounded) > 1e-5 * plain
        figures = results["figures"]
        assert figures.error is None and figures.batches >= 2 * len(ranks)
        assert figures.batches == ranks[0]["figures"].batches
        assert results["is_last"]
        for key, (error, priced) in results["errors"].items():
            # Few rows of a width are given the next wider one, so errors may be smaller.
            assert error <= priced + 1e-9 and math.isfinite(priced), key
    looked_up = {key.split("[")[0] for results in ranks for key in results["looked_up"]}
    lossless = set(CASES[case].get("tables", ()))
    names = {f"{BAG}{name}" for name in BAGS} - lossless
    if not case.endswith("pipeline") and case != "replicated":
        names |= {f"rows.embeddings.{name}" for name in ROWS}
    assert looked_up == names


def test_what_says_no_importance_is_refused_by_name(played: dict[str, list[Any]]) -> None:
    (refused,) = played["refused"]
    assert "the fused optimizer exact_sgd" in refused["fused SGD"]
    assert "TorchRec without squared gradients" in refused["SGD of torch"]


def test_pipelines_that_cannot_be_measured_are_refused_by_name(
    played: dict[str, list[Any]],
) -> None:
    (refused,) = played["refused"]
    assert "call pipeline = checkpoints.pipelined(pipeline)" in refused["batches"]
    assert "pipeline_postproc=True" in refused["postproc"]
