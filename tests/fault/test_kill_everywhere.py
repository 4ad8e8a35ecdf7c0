"""SIGKILL at every write, fsync, rename, link, upload, commit and deletion, one after another.

Whatever was killed, wherever: the run goes on to the very bits of a run that was never interrupted,
everything committed restores, and a sweep leaves nothing that no manifest names.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from recpoint.catalog.check import check
from recpoint.catalog.restore import MemoryTarget, restore
from recpoint.catalog.run import Run
from recpoint.catalog.staged import run_directory
from recpoint.catalog.store import open_store
from recpoint.catalog.sweep import execute, plan_sweep
from recpoint.format import naming
from recpoint.testing.seaweed import SeaweedServer
from tests.fault.lives import (
    STEPS,
    agent_life,
    begin,
    sweep_life,
    table_digest,
    trainer_life,
)

_LONGEST_LIFE_SECONDS = 120.0
# Far more steps than any of these lives takes: a life that never ends is a failure, not a loop.
_MOST_STEPS = 400


class _Place:
    """Where one kind of run lives: a store, a staging area, and what leads processes there."""

    def __init__(self, folder: Path, environment: dict[str, str], bucket: str | None) -> None:
        self.folder = folder
        self.staging = str(folder / "staging")
        self.environment = environment
        self._bucket = bucket
        self._runs = 0

    def new_run(self) -> str:
        self._runs += 1
        if self._bucket is None:
            return str(self.folder / f"run-{self._runs}")
        return f"s3://{self._bucket}/{self.folder.name}/run-{self._runs}"

    def train(self, url: str, *, die: int | None = None) -> Any:
        return begin(
            trainer_life,
            self.environment,
            url=url,
            staging=self.staging,
            evidence=str(self.evidence(url)),
            die=die,
        )

    def evidence(self, url: str) -> Path:
        return self.folder / f"{url.rsplit('/', 1)[1]}.json"

    @contextmanager
    def agent(self, *, prefect: str = "off", die: int | None = None) -> Iterator[Any]:
        process = begin(
            agent_life, self.environment, staging=self.staging, prefect=prefect, die=die
        )
        try:
            yield process
        finally:
            if process.is_alive():
                os.kill(process.pid, signal.SIGTERM)
            process.join(_LONGEST_LIFE_SECONDS)


@pytest.fixture(params=["local", "s3"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> _Place:
    """A place on a local disk, and one on the real S3 server."""
    if request.param == "local":
        return _Place(tmp_path, {}, None)
    server: SeaweedServer = request.getfixturevalue("s3_environment")
    return _Place(tmp_path, server.environment(), server.bucket)


def _ended(process: Any) -> int:
    process.join(_LONGEST_LIFE_SECONDS)
    assert process.exitcode is not None, "it neither ended nor died"
    return int(process.exitcode)


def _uninterrupted(place: _Place) -> dict[str, Any]:
    url = place.new_run()
    with place.agent():
        assert _ended(place.train(url)) == 0
    return _came_out(place, url)


def _came_out(place: _Place, url: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(place.evidence(url).read_text())
    return found


def _require_whole(place: _Place, url: str, truth: dict[str, Any]) -> None:
    """The run ended as if nothing had happened, all of it restores, and nothing lies about."""
    assert _came_out(place, url) == truth
    run = Run.open(open_store(url))
    target = MemoryTarget()
    assert restore(run, target).restored.step == STEPS
    assert table_digest(target.tables["goods"].values) == truth["goods"]
    execute(run, plan_sweep(run, grace_seconds=0, keep=()))
    assert check(run, level="full").ok
    named = {naming.RUN_KEY}
    for name in run.manifest_names():
        named.update(chunk.key for chunk in run.manifest(*name).chunks)
    for info in run.store.list():
        is_record = naming.parse_generation_key(info.key) or naming.parse_manifest_key(info.key)
        assert is_record or info.key in named, f"{info.key} is an orphan"
    assert not list(run.store.list_unfinished())
    directory = run_directory(place.staging, run.url)
    left = [path for path in directory.rglob("*") if path.is_file()]
    names = [str(path.relative_to(directory)) for path in left]
    assert {path.parent.name for path in left} <= {directory.name, "slots"}, names
    assert not [path for path in left if path.name.startswith(".tmp-")]


@pytest.mark.slow
def test_a_trainer_killed_at_any_step(place: _Place) -> None:
    truth = _uninterrupted(place)
    with place.agent() as agent:
        for die in range(1, _MOST_STEPS):
            url = place.new_run()
            code = _ended(place.train(url, die=die))
            if code == 0:
                break
            assert code == -signal.SIGKILL
            assert _ended(place.train(url)) == 0
            _require_whole(place, url, truth)
        assert agent.is_alive()
    assert code == 0 and die > 20, f"{die - 1} steps were gone through"


@pytest.mark.slow
def test_an_agent_killed_at_any_step(place: _Place) -> None:
    truth = _uninterrupted(place)
    for die in range(1, _MOST_STEPS):
        url = place.new_run()
        with place.agent(die=die) as mortal:
            trainer = place.train(url)
            while trainer.is_alive() and mortal.is_alive():
                mortal.join(0.02)
            killed = not mortal.is_alive()
            if killed:
                assert mortal.exitcode == -signal.SIGKILL
                with place.agent():
                    assert _ended(trainer) == 0
        assert _ended(trainer) == 0
        _require_whole(place, url, truth)
        if not killed:
            break
    assert not killed and die > 30, f"{die - 1} steps were gone through"


@pytest.mark.slow
def test_a_sweep_killed_at_any_step(place: _Place) -> None:
    truth = _uninterrupted(place)
    for die in range(1, _MOST_STEPS):
        url = place.new_run()
        with place.agent():
            assert _ended(place.train(url)) == 0
        store = open_store(url)
        orphans = [
            naming.row_chunk_key(3, 1, f"{number:032x}", rank=0, table=0, number=0)
            for number in range(3)
        ]
        for key in orphans:
            store.put(key, b"left by a killed agent")
        code = _ended(begin(sweep_life, place.environment, url=url, die=die))
        if code == 0:
            assert not {info.key for info in store.list()} & set(orphans)
            break
        assert code == -signal.SIGKILL
        _require_whole(place, url, truth)
    assert code == 0 and die > 3, f"{die - 1} steps were gone through"
