"""TorchRec's main pipeline, killed in each phase of a batch, on two and four ranks."""

from __future__ import annotations

from itertools import product
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

PHASES = ("distribution", "lookup", "step")
CUTS = tuple(product((2, 4), ("row_wise", "column_wise", "table_wise")))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str, str], list[Any]]:
    """(ranks, kind, phase) -> what each rank of the last life returned; "": the plain loop."""
    folder = tmp_path_factory.mktemp("killed")
    plays: dict[tuple[int, str, str], dict[str, Any]] = {}
    for (ranks, kind), phase in product(CUTS, ("", *PHASES)):
        run = f"{ranks}-{kind}-{phase}"
        common = {
            "play": "piped",
            "ranks": ranks,
            "how": "batches",
            "pipeline": "TrainPipelineSparseDist" if phase else "",
            "kind": kind,
            "run": str(folder / run),
            "staging": str(folder / f"of-{run}"),
        }
        if phase:
            plays[ranks, kind, f"killed in {phase}"] = {**common, "die_at": phase}
        plays[ranks, kind, phase] = common
    return dict(zip(plays, play(list(plays.values()), folder), strict=True))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("ranks", "kind"), CUTS)
def test_a_killed_pipeline_ends_as_a_plain_loop(
    ranks: int, kind: str, phase: str, played: dict[tuple[int, str, str], list[Any]]
) -> None:
    assert played[ranks, kind, f"killed in {phase}"] == [None] * ranks
    for plain, restarted in zip(played[ranks, kind, ""], played[ranks, kind, phase], strict=True):
        # Batch 6 was not done, so the newest checkpoint that was committed is of batch 2 or 4.
        assert restarted["begun"] in (2, 4)
        assert restarted["trained"] == plain["trained"][restarted["begun"] :]
        assert restarted["done"] == plain["done"] == 10
        for part in ("tables", "dense", "optimizer", "fused"):
            assert same(restarted[part], plain[part]), part
