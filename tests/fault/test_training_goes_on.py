"""A store that fails while a model is trained: training goes on, and nothing is lost.

A real training loop in this process, a real agent in another, a real S3 server, and a proxy on the
way to it that breaks what it is told to.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recpoint import Checkpointer
from recpoint.catalog.check.check import check
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.s3 import S3Timeouts
from recpoint.catalog.store.store import open_store
from recpoint.errors import StoreAccessDenied
from recpoint.format.naming import attempt_prefix
from recpoint.testing.seaweed import SeaweedServer
from recpoint.trainer_plugin.restore import start
from recpoint.trainer_plugin.state import rng
from tests.fault.lives import serving
from tests.fault.proxy import Break, FaultProxy
from tests.training_builder import (
    Place,
    Training,
    checkpointer,
    everything,
    simple_training,
    train,
    until,
)

#: The agent gives up on a request after a second, so that a test takes seconds too.
_QUICK = {"connect_timeout": 1, "read_timeout": 1, "retries": {"total_max_attempts": 2}}
#: The trainer's own client would wait for 30 s, five times, and a store is away here until a test
#: has seen that training went on. So much is allowed for ten batches.
_TRAINING_SECONDS = 60.0

FAULTS: dict[str, tuple[Break, str]] = {
    "refuses": (Break(status=403), "AccessDenied"),
    "throttles": (Break(match="PUT ", status=503), "SlowDown"),
    "answers nothing": (Break(silent=True), "Timeout"),
    "resets answers": (Break(match="GET ", reset_after_bytes=150), "while reading"),
    "resets uploads": (Break(match="PUT ", reset_upload_after=200), "while writing"),
    "loses replies": (Break(match="PUT ", lose_reply=True), "while writing"),
}


@pytest.fixture
def proxy(s3_environment: SeaweedServer) -> Iterator[FaultProxy]:
    with FaultProxy(s3_environment.port) as proxy:
        yield proxy


@pytest.fixture
def place(
    proxy: FaultProxy,
    s3_environment: SeaweedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Place:
    """A run that trainer and agent reach through the proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    return Place(s3_environment.run_url(), tmp_path / "staging")


def agent(place: Place, server: SeaweedServer, endpoint: str) -> Any:
    environment = server.environment() | {
        "AWS_ENDPOINT_URL": endpoint,
        "FSSPEC_S3": json.dumps({"config_kwargs": _QUICK}),
    }
    return serving(place.staging, environment, log=place.staging.with_name("agent.log"))


def status(place: Place) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(StagedRun(place.run_directory).status_path.read_text())
    except FileNotFoundError:
        return {}
    return found


def train_in_time(training: Training, ckpt: Checkpointer) -> None:
    """Ten batches, in a time that leaves none for a store."""
    started = time.monotonic()
    train(training, ckpt, 10)
    assert time.monotonic() - started < _TRAINING_SECONDS


def is_failing(place: Place) -> bool:
    return bool(status(place).get("failures"))


def assert_error_helps(place: Place, server: SeaweedServer, words: str) -> None:
    """It names object, found, expected and what to do, and nobody repeats a credential."""
    error = status(place)["last_error"]
    kind, _, told = error.partition(": ")
    assert kind.startswith("Store") and told.startswith(f"{place.run}/"), error
    assert words in error
    assert ": found " in error and "; expected " in error and ". Next: " in error
    log = place.staging.with_name("agent.log").read_text()
    assert "stays staged, next try in" in log and place.run in log
    written = [path for path in place.staging.rglob("*") if path.is_file()]
    for text in (log.encode(), *(path.read_bytes() for path in written)):
        assert server.secret_key.encode() not in text
        assert server.access_key.encode() not in text


def assert_whole(place: Place, training: Training, *, committed: int) -> None:
    """The newest checkpoint is `training`, bit for bit, and all `committed` ones are good."""
    expected = everything(training)
    with rng.untouched():
        run = Run.open(open_store(place.run))
        assert len(run.live_line()) == committed
        assert check(run, level="full").ok
    second = simple_training(77)
    again = checkpointer(second, place)
    report = again.restore()
    assert report is not None and report.skipped == ()
    again.close(final=False)
    assert everything(second) == expected


#: `test_store_faults` has each of these faults by day.
_BY_NIGHT = {"throttles", "resets answers", "resets uploads"}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[pytest.mark.nightly("kills")] if fault in _BY_NIGHT else [])
        for fault in FAULTS
    ],
)
def test_training_goes_on_while_the_store(
    fault: str,
    place: Place,
    proxy: FaultProxy,
    s3_environment: SeaweedServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken, words = FAULTS[fault]
    training = simple_training()
    with agent(place, s3_environment, proxy.endpoint):
        ckpt = checkpointer(training, place, close_seconds=120.0)
        ckpt.restore()
        train(training, ckpt, 2)
        until(lambda: ckpt.stats.committed == 1)
        safe = training.model.users.weight.detach().clone()

        proxy.plan = [broken]
        train_in_time(training, ckpt)
        until(lambda: is_failing(place))
        train_in_time(training, ckpt)
        assert_error_helps(place, s3_environment, words)
        stats = ckpt.stats
        assert stats.committed == 1 and stats.staged == 2 and stats.failed == 0
        assert stats.skipped > 0 and stats.lag_batches == 20
        with monkeypatch.context() as beside, rng.untouched():
            beside.setenv("AWS_ENDPOINT_URL", s3_environment.endpoint)
            target = MemoryTarget()
            assert restore(Run.open(open_store(place.run)), target).restored.step == 2
            assert torch.equal(target.tables["users"].values, safe)

        proxy.plan = []
        until(lambda: ckpt.stats.committed == 2)
        train(training, ckpt, 1)
        ckpt.close()
        assert ckpt.stats.committed == ckpt.stats.staged == 3
        assert ckpt.stats.failed == 0 and ckpt.stats.last_error is None
        until(lambda: status(place)["last_error"] is None)
    assert_whole(place, training, committed=3)


def test_a_commit_whose_reply_never_comes_is_noticed_as_done(
    place: Place, proxy: FaultProxy, s3_environment: SeaweedServer
) -> None:
    training = simple_training()
    with agent(place, s3_environment, proxy.endpoint):
        ckpt = checkpointer(training, place, close_seconds=120.0)
        ckpt.restore()
        proxy.plan = [Break(match="/manifests/", lose_reply=True, times=1)]
        train_in_time(training, ckpt)
        until(lambda: ckpt.stats.committed >= 1)
        ckpt.close()
        stats = ckpt.stats
        assert stats.failed == 0 and status(place)["failures"] == 0
        assert stats.committed == stats.staged
    assert_whole(place, training, committed=stats.committed)


def test_training_goes_on_while_the_server_is_dead(
    own_seaweed: SeaweedServer, tmp_path: Path
) -> None:
    place = Place(own_seaweed.run_url(), tmp_path / "staging")
    training = simple_training()
    with agent(place, own_seaweed, own_seaweed.endpoint):
        ckpt = checkpointer(training, place, close_seconds=120.0)
        ckpt.restore()
        train(training, ckpt, 2)
        until(lambda: ckpt.stats.committed == 1)
        own_seaweed.kill()
        train_in_time(training, ckpt)
        until(lambda: is_failing(place))
        train_in_time(training, ckpt)
        assert_error_helps(place, own_seaweed, own_seaweed.endpoint)
        own_seaweed.start()
        until(lambda: ckpt.stats.committed == 2)
        train(training, ckpt, 1)
        ckpt.close()
        assert ckpt.stats.failed == 0
    assert_whole(place, training, committed=3)


@pytest.mark.slow
def test_training_ends_while_the_store_is_away_and_the_agent_commits_later(
    place: Place, proxy: FaultProxy, s3_environment: SeaweedServer
) -> None:
    training = simple_training()
    with agent(place, s3_environment, proxy.endpoint):
        ckpt = checkpointer(training, place, jobs=2, close_seconds=1.0)
        ckpt.restore()
        proxy.plan = [Break(status=503)]
        train(training, ckpt, 3)
        started = time.monotonic()
        ckpt.close()  # with a final checkpoint, of batch 3
        assert time.monotonic() - started < _TRAINING_SECONDS
        assert (ckpt.stats.staged, ckpt.stats.committed, ckpt.stats.failed) == (2, 0, 0)
        until(lambda: is_failing(place))
        proxy.plan = []
        until(lambda: not StagedRun(place.run_directory).staged_jobs())
    assert_whole(place, training, committed=2)


Trained = tuple[list[object], torch.Tensor]


def train_and_commit(place: Place, server: SeaweedServer) -> Trained:
    """All state of a training whose checkpoints 2 and 4 are committed; a table's at step 2."""
    training = simple_training()
    with agent(place, server, server.endpoint):
        ckpt = checkpointer(training, place)
        ckpt.restore()
        train(training, ckpt, 2)
        until(lambda: ckpt.stats.committed == 1)
        values = training.model.users.weight.detach().clone()
        train(training, ckpt, 2)
        ckpt.close()
    assert ckpt.stats.committed == 2
    return everything(training), values


@pytest.fixture(scope="module")
def finished(
    seaweed: SeaweedServer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Trained]:
    """A run that nobody trains any more; restoring from it leaves its newest the newest."""
    url = seaweed.run_url()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in seaweed.environment().items():
            environment.setenv(name, value)
        place = Place(url, tmp_path_factory.mktemp("finished") / "staging")
        return url, train_and_commit(place, seaweed)


@pytest.mark.parametrize(
    "broken",
    [
        Break(match="/chunks/", flip_body_byte=900, times=1),
        Break(match="/manifests/", flip_body_byte=300, times=1),
        Break(match="/run.json", flip_body_byte=20, times=1),
        Break(match="/chunks/", reset_after_bytes=900, times=2),
        Break(match="/chunks/", cut_body_after=700, times=2),
        Break(match="GET ", status=503, times=2),
    ],
    ids=["flips chunk", "flips manifest", "flips run", "resets", "cuts", "throttles"],
)
def test_what_happens_once_on_the_way_leaves_a_restore_bit_identical(
    broken: Break, place: Place, proxy: FaultProxy, finished: tuple[str, Trained]
) -> None:
    place.run, trained = finished
    proxy.plan = [broken]
    second = simple_training(77)
    ckpt = checkpointer(second, place)
    report = ckpt.restore()
    assert report is not None and report.skipped == () and report.restored.step == 4
    ckpt.close(final=False)
    assert any(broken.match in request for request in proxy.requests)
    assert everything(second) == trained[0]


def test_bytes_that_always_come_flipped_are_named_and_never_restored(
    place: Place, proxy: FaultProxy, s3_environment: SeaweedServer
) -> None:
    _, values = train_and_commit(place, s3_environment)
    run = Run.open(open_store(place.run))
    newest = run.manifest(4, 1)
    prefix = attempt_prefix(newest.step, newest.generation, newest.attempt)
    proxy.plan = [Break(match=f"/{prefix}", flip_body_byte=900)]
    second = simple_training(77)
    ckpt = checkpointer(second, place)
    report = ckpt.restore()
    assert report is not None and report.restored.step == ckpt.batches_done == 2
    assert torch.equal(second.model.users.weight, values)
    (skipped,) = report.skipped
    assert skipped.name == (4, 1) and "DigestMismatch" in skipped.error
    assert prefix in skipped.error and "expected crc32c" in skipped.error
    train(second, ckpt, 1)
    ckpt.close(final=False)


def test_a_start_without_the_store_is_an_error_and_can_be_repeated(
    place: Place,
    proxy: FaultProxy,
    finished: tuple[str, Trained],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody trains for days from nothing because a permission was missing for a minute."""
    monkeypatch.setattr(start, "_TIMEOUTS", S3Timeouts(refused_seconds=2.0))  # instead of 30 s
    place.run, trained = finished
    proxy.plan = [Break(status=403)]
    second = simple_training(77)
    before = second.model.users.weight.detach().clone()
    ckpt = checkpointer(second, place)
    with pytest.raises(StoreAccessDenied, match="AWS_ACCESS_KEY_ID"):
        ckpt.restore()
    assert torch.equal(second.model.users.weight, before)
    proxy.plan = []
    report = ckpt.restore()
    assert report is not None and report.restored.step == 4
    ckpt.close(final=False)
    assert everything(second) == trained[0]
