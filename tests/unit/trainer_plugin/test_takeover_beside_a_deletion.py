"""A start beside a retention that has just announced what it deletes (format §6.6)."""

from __future__ import annotations

from pathlib import Path

import pytest

from recpoint import Seed
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run import going, leases
from recpoint.catalog.run.deletions import announce
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import NothingToRestore, RetentionRefused
from recpoint.format.naming import MANIFEST_KEY, ManifestName
from recpoint.format.records import CheckpointRef
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.restore.together import restore_together
from tests.retained_run import filled
from tests.training_builder import Place, checkpointer, simple_training, train


@pytest.fixture(autouse=True)
def waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(going, "_WAIT_SECONDS", 0.0)


@pytest.fixture
def trained(place: Place) -> Run:
    training = simple_training(3)
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 4)
    return Run.open(open_store(place.run))


@pytest.mark.parametrize("how", ["whole", "parts", "seed"])
def test_a_start_is_refused_what_goes(trained: Run, place: Place, how: str, tmp_path: Path) -> None:
    newest, older = trained.live_line()[:2]
    announce(trained, (MANIFEST_KEY.of(*older),))
    another = Place(run=str(tmp_path / "another"), staging=tmp_path / "another-staging")
    starting = checkpointer(simple_training(5), another if how == "seed" else place)
    with pytest.raises(RetentionRefused, match="it is being deleted"):
        if how == "whole":
            starting.restore(step=older.step)
        elif how == "parts":
            starting.restore(step=older.step, partial={"dense": ["*"]})
        else:
            starting.restore(seed=Seed(trained.url, dense=["*"], step=older.step))
    starting.close(final=False)
    assert trained.generation_numbers() == [1] and trained.live_line()[0] == newest


def test_a_start_that_names_none_passes_over_what_goes(trained: Run, place: Place) -> None:
    newest, older = trained.live_line()[:2]
    announce(trained, (MANIFEST_KEY.of(*newest),))
    starting = checkpointer(simple_training(5), place)
    report = starting.restore()
    starting.close(final=False)
    assert report is not None and report.restored.step == older.step
    assert [skipped.name for skipped in report.skipped] == [newest]
    assert trained.live_line()[0] == older


@pytest.mark.parametrize("step", [None, 50])
def test_ranks_together_pass_over_what_goes(tmp_path: Path, step: int | None) -> None:
    run = filled(open_store(str(tmp_path / "run")))
    announce(run, (MANIFEST_KEY.of(50, 1),))

    def restore_one(before: int | None, name: ManifestName | None = None) -> CheckpointRef | None:
        assert name is not None
        to = MemoryTarget()
        return restore(run, to, Selection.of(name), leased=True).restored

    def claim() -> CheckpointRef | None:
        with leases.reading(run, purpose="restore"):
            return restore_together(
                Ranks(),
                run,
                restore_one,
                Selection(step=step),
            ).restored

    if step is None:
        restored = claim()
        assert restored is not None and restored.step == 40
    else:
        with pytest.raises(NothingToRestore, match="it is being deleted"):
            claim()
        assert run.generation_numbers() == [1]
