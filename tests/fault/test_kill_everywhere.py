"""SIGKILL at writes, fsyncs, renames, links, uploads, commits and deletions, one after another.

Whatever was killed, wherever: the run goes on to the very bits of a run that was never interrupted,
everything committed restores, and a sweep leaves nothing that no manifest names.

With a run on a local disk they die at each of their steps. With one on S3 they die after each
request that changes what is stored: steps in the staging area are the same ones again.

`make test` kills at a fixed sample of the steps; `make nightly` at all of them (`RUNS.md`).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import locks
from recpoint.catalog.staging.agent_lock import AgentLock, agent_lock_path
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.format import naming
from recpoint.testing.seaweed import SeaweedServer
from tests.fault.kill_points import (
    FAULTS_EVERY,
    LONGEST_LIFE_SECONDS,
    NEVER,
    Death,
    act_of,
    at_steps,
    ended,
    sampled,
)
from tests.fault.lives import (
    BESIDES_ON_S3,
    STEPS,
    agent_life,
    begin,
    cancelling_life,
    sweep_life,
    table_digest,
    trainer_life,
)
from tests.forked import ForkedProcess
from tests.polling import until
from tests.stored_run import StoredRun

BY_NIGHT = pytest.mark.nightly("kills")


class _Place:
    """Where one kind of run lives: a store, a staging area, and what leads processes there."""

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str],
        bucket: str | None,
        staging: str = "staging",
    ) -> None:
        self.folder = folder
        self.staging = str(folder / staging)
        self.environment = environment
        self._bucket = bucket
        self._besides = frozenset[str]() if bucket is None else BESIDES_ON_S3

    def apart(self, name: str) -> _Place:
        """The same store, and a staging area that no other agent serves."""
        return _Place(self.folder, self.environment, self._bucket, f"staging-{name}")

    @property
    def is_local(self) -> bool:
        return self._bucket is None

    def run_url(self, name: str) -> str:
        if self._bucket is None:
            return str(self.folder / f"run-{name}")
        return f"s3://{self._bucket}/{self.folder.name}/run-{name}"

    def train(self, url: str, death: Death = NEVER) -> ForkedProcess:
        return begin(
            trainer_life,
            self.environment,
            url=url,
            staging=self.staging,
            evidence=str(self.evidence(url)),
            besides=self._besides,
            **death._asdict(),
        )

    def evidence(self, url: str) -> Path:
        return self.folder / f"{url.rsplit('/', 1)[1]}.json"

    @contextmanager
    def agent(self, death: Death = NEVER) -> Iterator[ForkedProcess]:
        process = begin(
            agent_life,
            self.environment,
            staging=self.staging,
            besides=self._besides,
            **death._asdict(),
        )
        try:
            yield process
        finally:
            process.terminate()
            process.join(LONGEST_LIFE_SECONDS)


@pytest.fixture(params=["local", "s3"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> _Place:
    """A place on a local disk, and one on the real S3 server."""
    if request.param == "local":
        return _Place(tmp_path, {}, None)
    server: SeaweedServer = request.getfixturevalue("s3_environment")
    return _Place(tmp_path, server.environment(), server.bucket)


def _uninterrupted(place: _Place) -> dict[str, Any]:
    url = place.run_url("uninterrupted")
    with place.agent():
        assert ended(place.train(url)) == 0
    return _came_out(place, url)


def _came_out(place: _Place, url: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(place.evidence(url).read_text())
    return found


def _require_whole(place: _Place, url: str, truth: dict[str, Any]) -> None:
    """The run ended as if nothing had happened, all of it restores, and nothing lies about."""
    assert _came_out(place, url) == truth
    run = Run.open(open_store(url))
    _require_sound(run, truth)
    directory = StagedRun.of(place.staging, run.url).path
    # What the agent is writing at this moment has such a name for as long as that takes.
    until(lambda: not [path for path in directory.rglob(".tmp-*") if path.is_file()])
    left = [path for path in directory.rglob("*") if path.is_file()]
    names = [str(path.relative_to(directory)) for path in left]
    assert {path.parent.name for path in left} <= {directory.name, "slots"}, names


def _require_sound(run: Run, truth: dict[str, Any]) -> None:
    """All of it restores, and a sweep leaves nothing that no manifest names."""
    target = MemoryTarget()
    assert restore(run, target).restored.step == STEPS
    assert table_digest(target.tables["goods"].values) == truth["goods"]
    execute(run, plan_sweep(run, grace_seconds=0, keep=()))
    assert check(run, level="full").ok
    named = {naming.RUN_KEY}
    for name in run.manifest_names():
        named.update(chunk.key for chunk in run.manifest(*name).chunks)
    # The lease of a killed trainer stays until it has expired.
    records = (
        naming.GENERATION_KEY.parse,
        naming.MANIFEST_KEY.parse,
        naming.END_KEY.parse,
        naming.LEASE_KEY.parse,
    )
    for info in run.store.list():
        is_record = any(parse(info.key) for parse in records)
        assert is_record or info.key in named, f"{info.key} is an orphan"
    assert not list(run.store.list_unfinished())


@pytest.mark.slow
@pytest.mark.parametrize("place", [pytest.param("local", marks=BY_NIGHT), "s3"], indirect=True)
def test_a_trainer_killed_at_any_step(place: _Place) -> None:
    truth = _uninterrupted(place)

    def attempt(death: Death) -> bool:
        url = place.run_url(str(death.die))
        code = ended(place.train(url, death))
        if code == 0:
            return False
        assert code == -signal.SIGKILL
        assert ended(place.train(url)) == 0
        _require_whole(place, url, truth)
        return True

    with place.agent() as agent:
        steps = at_steps(attempt, place.folder / "steps")
        assert agent.is_alive()
    assert steps >= (40 if place.is_local else 6)


@pytest.mark.slow
def test_a_trainer_killed_at_any_step_of_a_cancel(tmp_path: Path) -> None:
    place = _Place(tmp_path, {}, None)
    truth = _uninterrupted(place)

    def cancel(place: _Place, url: str, **how: Any) -> int:
        with AgentLock(place.staging):  # an agent that is there and has not come to it yet
            return ended(begin(cancelling_life, {}, url=url, staging=place.staging, **how))

    counted = tmp_path / "steps"
    assert cancel(place, place.run_url("counted"), count_into=str(counted)) == 0
    names = [line.split("\t")[2] for line in counted.read_text().splitlines()]
    first = names.index("mkdir cancels")
    assert len(names) - first >= 5, names[first:]

    def attempt(number: int) -> None:
        own, url = place.apart(str(number)), place.run_url(str(number))
        assert cancel(own, url, die=first + number) == -signal.SIGKILL
        with own.agent():
            # A trainer waits for what is staged only where an agent will do it.
            until(lambda: locks.is_held(agent_lock_path(own.staging)))
            assert ended(own.train(url)) == 0
        _require_whole(own, url, truth)

    # The acts of a cancel are those of an agent and a trainer, which die at each kind of them here.
    acts = [act_of(name) for name in names[first:]]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(attempt, range(1, len(acts) + 1) if FAULTS_EVERY else sampled(acts)))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["local", pytest.param("s3", marks=BY_NIGHT)], indirect=True)
def test_an_agent_killed_at_any_step(place: _Place) -> None:
    truth = _uninterrupted(place)

    def attempt(death: Death) -> bool:
        own, url = place.apart(str(death.die)), place.run_url(str(death.die))
        with own.agent(death) as mortal:
            trainer = own.train(url)
            connection.wait([trainer.sentinel, mortal.sentinel], LONGEST_LIFE_SECONDS)
            if not mortal.is_alive():
                with own.agent():
                    assert ended(trainer) == 0
        # The step may be one that it takes when training is over.
        assert mortal.exitcode in (0, -signal.SIGKILL)
        killed = mortal.exitcode != 0
        if killed:  # the one after it may have been ended before it had cleaned
            last = begin(agent_life, own.environment, staging=own.staging, once=True)
            assert ended(last) == 0
        assert ended(trainer) == 0
        _require_whole(own, url, truth)
        return killed

    assert at_steps(attempt, place.folder / "steps") >= (40 if place.is_local else 11)


@pytest.mark.slow
def test_a_sweep_killed_at_any_step(place: _Place) -> None:
    truth = _uninterrupted(place)
    trained = StoredRun(Run.open(open_store(place.run_url("uninterrupted"))))
    orphans = [
        naming.row_chunk_key(3, 1, f"{number:032x}", rank=0, table=0, number=0)
        for number in range(3)
    ]

    def attempt(death: Death) -> bool:
        run = trained.copy_to(place.run_url(str(death.die)))
        for key in orphans:
            run.store.put(key, b"left by a killed agent")
        code = ended(begin(sweep_life, place.environment, url=run.url, **death._asdict()))
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            assert not {info.key for info in run.store.list()} & set(orphans)
        _require_sound(run, truth)
        return code != 0

    assert at_steps(attempt, place.folder / "steps") >= 3
