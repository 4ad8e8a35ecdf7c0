"""Retention killed at its steps, and beside a trainer that commits and readers that restore.

Real processes, real SIGKILL, on a local disk and, after requests, on the real S3 server.
`make test` kills at a fixed sample of the steps; `make nightly` at all of them (`RUNS.md`).
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run import pins
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format import naming
from recpoint.testing.seaweed import SeaweedServer
from tests.fault.kill_points import LONGEST_LIFE_SECONDS, Death, at_steps, ended
from tests.fault.lives import begin
from tests.fault.retention_lives import (
    filled,
    pin_life,
    reader_life,
    retain_life,
    retain_once,
    retention_life,
    trainer_life,
)
from tests.polling import until
from tests.stored_run import StoredRun

BY_NIGHT = pytest.mark.nightly("kills")


class _Place:
    """Where runs live, and what leads processes there."""

    def __init__(self, folder: Path, environment: dict[str, str], bucket: str | None) -> None:
        self.folder = folder
        self.environment = environment
        self._bucket = bucket

    @property
    def is_local(self) -> bool:
        return self._bucket is None

    def run_url(self, name: str) -> str:
        if self._bucket is None:
            return str(self.folder / f"run-{name}")
        return f"s3://{self._bucket}/{self.folder.name}/run-{name}"


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> _Place:
    """A place on a local disk, and one on the real S3 server."""
    if request.param == "local":
        return _Place(tmp_path, {}, None)
    server: SeaweedServer = request.getfixturevalue("s3_environment")
    return _Place(tmp_path, server.environment(), server.bucket)


def keys(run: Run) -> set[str]:
    return {info.key for info in run.store.list()}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["local", pytest.param("s3", marks=BY_NIGHT)], indirect=True)
def test_a_retention_killed_at_any_step(place: _Place) -> None:
    # On S3 a link less: each kind of request is there, and some of them again and again.
    start = StoredRun(filled(place.run_url("start"), links=3 if place.is_local else 2))

    def attempt(death: Death) -> bool:
        run = start.copy_to(place.run_url(str(death.die)))
        code = ended(begin(retain_life, place.environment, url=run.url, **death._asdict()))
        assert code in (0, -signal.SIGKILL)
        # Whatever it had come to: what is left restores, and the newest is untouched.
        assert all(health.restorable for health in check(run).checkpoints)
        assert restore(run, MemoryTarget()).restored.step == 40
        for _ in range(2):
            retain_once(run, 1)
        newest = run.manifest(40, 1)
        assert check(run, level="full").ok
        assert keys(run) == {
            naming.RUN_KEY,
            naming.PLAN_KEY,
            naming.GENERATION_KEY.of(1),
            naming.MANIFEST_KEY.of(40, 1),
            *(chunk.key for chunk in newest.chunks),
        }
        assert not list(run.store.list_unfinished())
        return code != 0

    assert at_steps(attempt, place.folder / "steps") >= (40 if place.is_local else 29)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["local", pytest.param("s3", marks=BY_NIGHT)], indirect=True)
def test_a_pin_killed_at_any_step_is_there_or_not_and_harms_nothing(place: _Place) -> None:
    run = filled(place.run_url("start"))
    retain_once(run, 1)  # marks 10, 20 and 30
    start = StoredRun(run)

    def attempt(death: Death) -> bool:
        run = start.copy_to(place.run_url(str(death.die)))
        code = ended(begin(pin_life, place.environment, url=run.url, **death._asdict()))
        assert code in (0, -signal.SIGKILL)
        pinned = bool(pins.pinned(run))
        assert pinned or code != 0
        for _ in range(2):
            retain_once(run, 1)
        left = [name.step for name in run.manifest_names()]
        assert left == ([10, 20, 40] if pinned else [40])
        assert check(run, level="full").ok
        return code != 0

    assert at_steps(attempt, place.folder / "steps") >= (4 if place.is_local else 3)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["local", pytest.param("s3", marks=BY_NIGHT)], indirect=True)
def test_beside_a_trainer_and_readers_nothing_is_lost(place: _Place) -> None:
    url, done = place.run_url("beside"), place.folder / "done"
    run = Run.create(open_store(url))
    run.claim(None)
    count = 24 if place.is_local else 12
    stopped = {"url": url, "until": str(done)}
    evidence = [place.folder / f"reader-{number}.json" for number in range(2)]
    others = [
        begin(retention_life, place.environment, **stopped),
        *(begin(reader_life, place.environment, **stopped, evidence=str(at)) for at in evidence),
    ]
    trainer = begin(trainer_life, place.environment, url=url, checkpoints=count)
    trainer.join(LONGEST_LIFE_SECONDS)
    assert trainer.exitcode == 0
    until(lambda: len(run.manifest_names()) <= 4, seconds=LONGEST_LIFE_SECONDS)
    done.touch()
    for process in others:
        process.join(LONGEST_LIFE_SECONDS)
        assert process.exitcode == 0
    for at in evidence:
        restores = json.loads(at.read_text())
        assert restores
        for one in restores:
            assert one["leased"] and not one["skipped"]
            assert one["step"] >= one["newest_before"]
    for _ in range(2):
        retain_once(run, 2)
    assert check(run, level="full").ok
    # The last two, and the full and the increment that they stand on.
    assert [name.step for name in run.manifest_names()] == [*range(count - 3, count + 1)]
    chunks = {chunk.key for name in run.manifest_names() for chunk in run.manifest(*name).chunks}
    assert {key for key in keys(run) if key.startswith("chunks/")} == chunks
    assert restore(run, MemoryTarget()).restored.step == count
