"""TorchRec's train pipelines, which take batches ahead, stopped and restarted on two ranks."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from tests.torchrec_model import MISSING
from tests.torchrec_ranks import play
from tests.unit.trainer_plugin.test_torchrec import same

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.nightly("loops"),
    pytest.mark.xdist_group("torchrec"),
]

#: How batches are counted, and the class of the pipeline.
LOOPS = [
    ("batches", "TrainPipelineSparseDist"),
    ("step", "TrainPipelineSparseDist"),
    ("batches", "TrainPipelineBase"),
    ("pipelined", "TrainPipelineSparseDistLite"),
]
BATCHES, STOP = list(range(10)), 5
#: TorchRec 1.5 has no `TrainPipelineSparseDistLite`, and no pipelines that move rows.
LACKS_LATER = MISSING is None and version("torchrec").startswith("1.5.")
NEEDS_LATER = pytest.mark.skipif(LACKS_LATER, reason="a pipeline came with TorchRec 1.6")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """A plain loop; each pipeline stopped and restarted; then what is refused."""
    folder = tmp_path_factory.mktemp("pipelines")

    def at(run: str, play: str = "piped", **own: Any) -> dict[str, Any]:
        places = {"run": str(folder / run), "staging": str(folder / f"staging-{run}")}
        return {"play": play, "ranks": 2, **places, **own}

    plays = [at("plain", how="batches", pipeline="")]
    for number, (how, pipeline) in enumerate(LOOPS[:-1] if LACKS_LATER else LOOPS):
        loop = {"how": how, "pipeline": pipeline}
        plays += [at(str(number), **loop, stop_after=STOP), at(str(number), **loop)]
    if not LACKS_LATER:
        plays.append(at("refused", "pipelines_refused"))
    return play(plays, folder)


@pytest.mark.parametrize(
    "number",
    [*range(len(LOOPS) - 1), pytest.param(len(LOOPS) - 1, marks=NEEDS_LATER)],
    ids=[" ".join(loop) for loop in LOOPS],
)
def test_a_stopped_pipeline_ends_as_a_plain_loop(number: int, played: list[list[Any]]) -> None:
    plain, (stopped, restarted) = played[0], played[1 + 2 * number : 3 + 2 * number]
    for rank in range(2):
        assert plain[rank]["trained"] == BATCHES
        assert stopped[rank]["trained"] == BATCHES[:STOP] and stopped[rank]["done"] == STOP
        assert restarted[rank]["begun"] == 4 and restarted[rank]["trained"] == BATCHES[4:]
        assert restarted[rank]["done"] == len(BATCHES)
        for part in ("tables", "dense", "optimizer", "fused"):
            assert same(restarted[rank][part], plain[rank][part]), part


@NEEDS_LATER
def test_pipelines_that_move_rows_or_ask_in_mid_step_are_refused(played: list[list[Any]]) -> None:
    refused = played[-1][0]
    for kind in ("TrainPipelineSparseDistEmbStash", "TrainPipelineSparseDistOptStash"):
        assert f"a {kind}: found a pipeline that moves rows" in refused[kind]
    assert "found a module of a DMPCollection" in refused["inside"]
    assert "in the middle of a step" in refused["plain"]
    assert "checkpoints.pipelined(pipeline)" in refused["plain"]
