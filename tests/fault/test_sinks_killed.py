"""Publishers, sinks and connections that end at any moment: readers see whole versions only."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest
import torch

from recpoint.catalog.run.run import Run
from recpoint.errors import NotServing
from recpoint.serving.sinks.opening import open_sink
from recpoint.serving.sinks.reader import SinkReader
from recpoint.serving.sinks.records import CommittedVersion
from recpoint.serving.sinks.verification import verify
from tests.catalog_builder import Table, new_run
from tests.fault.connection_breaker import ConnectionBreaker
from tests.followed_run import Trainer
from tests.forked_program import ForkedProgram, be_module
from tests.redis_server import RedisServer, redis_server

_FAULTS = 300


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """A trainer of two tables, whose rows a sink is given in a dozen calls."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    random_numbers = torch.Generator().manual_seed(5)
    sizes = {"users": 150, "items": 40}
    values = {name: torch.randn(rows, 4, generator=random_numbers) for name, rows in sizes.items()}
    trainer = Trainer(run, [Table(name, values[name]) for name in sizes])
    trainer.commit(1)
    return trainer


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis server that keeps what it acknowledged."""
    directory = tmp_path / "redis"
    directory.mkdir()
    with redis_server(directory, "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


class _Publishers:
    """Starts processes that publish to one sink, and looks at what readers see."""

    def __init__(
        self, trainer: Trainer, url: str, directory: Path, options: Sequence[str] = ()
    ) -> None:
        self.trainer, self.url, self._directory = trainer, url, directory
        self._options = options

    def start(self, *, die_at: int = 10**6, url: str | None = None) -> ForkedProgram:
        """Start a publisher that is killed at its n-th durable step."""
        command = ["-m", "recpoint", "publish-to", url or self.url, self.trainer.run.url]
        command += self._options
        return ForkedProgram(
            be_module,
            ["recpoint.testing.die_at", str(die_at), *command],
            environment=os.environ,
            output=(self._directory / "out", self._directory / "err"),
        )

    def require_whole(self) -> int:
        """Require that readers see one of the versions, whole, and return its step."""
        with SinkReader(self.url).reading() as version:
            step = version.checkpoint.step
            assert bool((version.dense()["top.weight"] == step).all())
            for table, values in zip(self.trainer.tables, self.trainer.at[step], strict=True):
                assert torch.equal(version.lookup(table.name, torch.arange(table.rows)), values)
        return step

    def require_proven(self) -> CommittedVersion:
        """Require that each row is what the sink says, and return what it holds."""
        with open_sink(self.url) as sink:
            comparison = verify(Run.open(self.trainer.run.store), sink)
        assert comparison.differences == []
        return comparison.version

    def finish(self) -> None:
        """Publish without a fault, and require the newest version."""
        process = self.start()
        assert process.wait() == 0, (self._directory / "err").read_text()
        assert self.require_proven().version.checkpoint == self.trainer.made[-1].ref


def _sweep(publishers: _Publishers) -> None:
    """Kill a publisher at each n-th durable step of a full and of an increment."""
    for is_full in (True, False):
        die_at, code = 1, -signal.SIGKILL
        while code != 0:
            step = publishers.trainer.made[-1].step + 1
            publishers.trainer.commit(step, full=is_full)
            code = publishers.start(die_at=die_at).wait()
            assert code in (0, -signal.SIGKILL)
            assert publishers.require_whole() in ((step,) if code == 0 else (step - 1, step))
            publishers.finish()
            die_at += 1


@pytest.mark.nightly("sinks")
def test_killed_at_each_step_in_redis(trainer: Trainer, redis: RedisServer, tmp_path: Path) -> None:
    publishers = _Publishers(trainer, f"{redis.url}?grace=0", tmp_path)
    publishers.finish()
    _sweep(publishers)


@pytest.mark.nightly("sinks_in_files")
@pytest.mark.parametrize("kind", ["sqlite", "parquet"])
def test_killed_at_each_step_in_a_file(trainer: Trainer, tmp_path: Path, kind: str) -> None:
    publishers = _Publishers(trainer, f"{kind}:{tmp_path}/served", tmp_path)
    publishers.finish()
    _sweep(publishers)


def _sweep_of_increments(publishers: _Publishers) -> None:
    """Kill a publisher with a budget at each n-th durable step of an increment."""
    die_at, code, most_deferred = 1, -signal.SIGKILL, 0
    while code != 0:
        step = publishers.trainer.made[-1].step + 1
        if die_at % 6 == 0:  # short chains, which are verified often
            publishers.trainer.commit(step, full=True)
            publishers.finish()
            step += 1
        publishers.trainer.commit(step)
        code = publishers.start(die_at=die_at).wait()
        assert code in (0, -signal.SIGKILL)
        assert publishers.require_proven().version.checkpoint.step in (step - 1, step)
        publishers.finish()
        deferred = publishers.require_proven().deferred
        most_deferred = max(most_deferred, 0 if deferred is None else deferred.rows)
        die_at += 1
    assert most_deferred > 50


#: 20 of some 60 rows that change.
_BUDGET: Final = ("--budget", "480", "--most-versions", "6")


@pytest.mark.nightly("sink_budget")
def test_killed_with_a_budget_in_redis(
    trainer: Trainer, redis: RedisServer, tmp_path: Path
) -> None:
    publishers = _Publishers(trainer, f"{redis.url}?grace=0", tmp_path, _BUDGET)
    publishers.finish()
    _sweep_of_increments(publishers)


@pytest.mark.nightly("sink_budget")
@pytest.mark.parametrize("kind", ["sqlite", "parquet"])
def test_killed_with_a_budget_in_a_file(trainer: Trainer, tmp_path: Path, kind: str) -> None:
    publishers = _Publishers(trainer, f"{kind}:{tmp_path}/served", tmp_path, _BUDGET)
    publishers.finish()
    _sweep_of_increments(publishers)


class _Faults:
    """Faults of a publisher to Redis, drawn at random."""

    def __init__(
        self, publishers: _Publishers, redis: RedisServer, breaker: ConnectionBreaker, seed: int
    ) -> None:
        self._publishers, self._redis, self._breaker = publishers, redis, breaker
        self._random = random.Random(seed)
        parts = urlsplit(publishers.url)
        self._broken_url = parts._replace(netloc=f"127.0.0.1:{breaker.port}").geturl()

    def strike(self) -> None:
        """Do one fault; a publisher may have ended well all the same."""
        self._random.choice(
            [self._kill_at_step, self._kill_at_moment, self._stop, self._break, self._kill_server]
        )()

    def _kill_at_step(self) -> None:
        self._publishers.start(die_at=self._random.randint(1, 20)).wait()

    def _kill_at_moment(self) -> None:
        process = self._publishers.start()
        time.sleep(self._random.uniform(0.1, 0.8))
        process.kill()
        process.wait()

    def _stop(self) -> None:
        """Stop a publisher, have another one publish, and let the first one go on."""
        stopped = self._publishers.start()
        time.sleep(self._random.uniform(0.1, 0.8))
        stopped.send_signal(signal.SIGSTOP)
        self._publishers.start(die_at=self._random.choice([10**6, 12])).wait()
        stopped.send_signal(signal.SIGCONT)
        stopped.wait()

    def _break(self) -> None:
        """Lose requests or answers; the client asks again."""
        self._breaker.break_at(
            self._random.randint(1, 30), self._random.choice(["request", "answer"])
        )
        assert self._publishers.start(url=self._broken_url).wait() == 0
        self._breaker.break_at(0, "answer")

    def _kill_server(self) -> None:
        process = self._publishers.start()
        time.sleep(self._random.uniform(0.1, 0.8))
        self._redis.restart()
        process.wait()


@pytest.mark.nightly("sinks")
def test_hundreds_of_faults(trainer: Trainer, redis: RedisServer, tmp_path: Path) -> None:
    """After each fault readers see a whole version; after a publication, the newest one."""
    publishers = _Publishers(trainer, f"{redis.url}?grace=0", tmp_path)
    publishers.finish()
    breaker = ConnectionBreaker(int(redis.url.rpartition(":")[2].partition("/")[0]))
    faults = _Faults(publishers, redis, breaker, seed=int.from_bytes(os.urandom(4)))
    count = 0
    while count < _FAULTS:
        step = trainer.made[-1].step + 1
        trainer.commit(step, full=step % 9 == 0)
        for _ in range(1 + step % 3):
            faults.strike()
            assert publishers.require_whole() in (step - 1, step)
            count += 1
        publishers.finish()
    breaker.close()


def test_a_server_that_may_evict_rows_is_refused(
    trainer: Trainer, redis: RedisServer, tmp_path: Path
) -> None:
    redis.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    publishers = _Publishers(trainer, f"{redis.url}?grace=0", tmp_path)
    assert publishers.start().wait() == 3
    assert "noeviction" in (tmp_path / "err").read_text()
    with pytest.raises(NotServing):
        publishers.require_whole()
