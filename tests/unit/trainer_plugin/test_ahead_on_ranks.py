"""Rows that ranks copy ahead are staged byte for byte as plain cuts would have staged them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.ahead_ranks import WINDOW, ahead_ranks
from tests.forked import ForkedProcess
from tests.polling import PATIENCE_SECONDS
from tests.torchrec_model import BAGS, MISSING, ROWS
from tests.torchrec_ranks import play

#: On a busy machine, a plan may come after the cut, which is then a plain one.
MAY_BE_LATE = {
    None,
    "it was not planned in time",
    "too few rows were copied before: open its window earlier",
}


def ranks(folder: Path, cases: Sequence[str]) -> list[dict[str, Any]]:
    """Return what each of two ranks told of these cases."""
    processes = [
        ForkedProcess(target=ahead_ranks, args=(str(folder), rank, list(cases)), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0
    return [json.loads((folder / f"told-{rank}").read_text()) for rank in range(2)]


def test_ranks_look_ahead_together_or_not_at_all(tmp_path: Path) -> None:
    for rank in ranks(tmp_path, ["refused"]):
        assert (
            f"Lookahead.window: found {WINDOW} on rank 1, None on rank 0"
            in rank["refused"]["error"]
        )


@pytest.mark.nightly("loops")
def test_staged_bytes_of_ranks_equal_those_of_plain_cuts(tmp_path: Path) -> None:
    cases = [
        "sparse",
        "dense",
        "cumulative",
        "wrong",
        "epochs",
        "otherwise",
        "no slot",
        "late slot",
    ]
    owner, other = ranks(tmp_path, cases)
    for case in cases:
        for rank in (owner, other):
            assert rank[case]["different"] == [], case
            assert set(rank[case]["kinds"]) == {"full", "increment"}, case
        if case == "no slot":
            *without, last = owner[case]["reasons"]
            assert last is None and all("no slot was free" in reason for reason in without)
        else:
            # Rank 1 stores no rows, so it has none to copy.
            assert other[case]["before"] == [0] * len(owner[case]["before"])
            assert set(owner[case]["reasons"]) <= MAY_BE_LATE, case
            assert any(owner[case]["before"]), case


@pytest.mark.nightly("loops")
def test_a_window_for_an_increment_is_void_if_ranks_agree_on_a_full(tmp_path: Path) -> None:
    owner, other = ranks(tmp_path, ["other kind", "seconds"])
    kinds = owner["other kind"]
    assert kinds["different"] == other["other kind"]["different"] == []
    assert kinds["kinds"] == ["full", "full", "increment"]
    assert kinds["reasons"][1] == "the ranks agreed on another kind of checkpoint"
    assert {kinds["reasons"][0], kinds["reasons"][2]} <= MAY_BE_LATE
    (line,) = owner["seconds"]["lines"]
    assert "found an interval in seconds" in line and other["seconds"]["lines"] == []


@pytest.mark.nightly("loops")
def test_a_rank_that_ends_first_keeps_no_other_waiting(tmp_path: Path) -> None:
    asked, _ = ranks(tmp_path, ["alone"])
    assert "ranks no longer tell each other" in asked["alone"]["error"]


#: How each table is sharded, the pipeline that trains, the number of ranks, and whether there are
#: fulls only, which are copied in pieces.
SHARDED = [
    ("row_wise", "", 2, False),
    ("column_wise", "", 2, False),
    ("data_parallel", "", 2, False),
    ("row_wise", "TrainPipelineSparseDist", 2, False),
    ("table_wise", "TrainPipelineSparseDist", 2, False),
    ("column_wise", "TrainPipelineSparseDist", 1, False),
    # Last, because a process that copies in pieces goes on to do so.
    ("row_wise", "", 2, True),
    ("column_wise", "TrainPipelineSparseDist", 2, True),
]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.nightly("loops")
@pytest.mark.xdist_group("torchrec")
def test_torchrec_tables_are_copied_ahead(tmp_path: Path) -> None:
    plays = [
        {
            "play": "looked_ahead",
            "ranks": count,
            "kinds": dict.fromkeys((*BAGS, *ROWS), kind),
            "run": str(tmp_path / str(number)),
            "pipeline": pipeline,
            "in_pieces": in_pieces,
        }
        for number, (kind, pipeline, count, in_pieces) in enumerate(SHARDED)
    ]
    for (kind, pipeline, *_), by_rank in zip(SHARDED, play(plays, tmp_path), strict=True):
        for rank, result in enumerate(by_rank):
            assert result["different"] == [], (kind, pipeline)
            assert set(result["reasons"]) <= MAY_BE_LATE, (kind, pipeline)
            if kind != "data_parallel" or rank == 0:
                assert any(result["before"]), (kind, pipeline)
