"""A publisher leaves a busy Redis server time for readers, and an idle one none."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from recpoint.catalog.store import durable
from recpoint.serving.sinks.opening import open_sink
from recpoint.serving.sinks.redis_pace import RedisPace
from recpoint.testing.sinks import bring, ids_of
from tests.redis_server import RedisServer, redis_server

_BUSY_SECONDS = 0.3


def test_pauses_follow_the_time_beyond_the_best() -> None:
    pace = RedisPace(2.0)
    assert pace.pause_seconds("put", 0.010) == 0
    assert pace.pause_seconds("put", 0.011) == 0
    assert pace.pause_seconds("put", 0.030) == pytest.approx(2 * (0.030 - 0.013), rel=0.01)
    assert pace.pause_seconds("removal", 0.030) == 0  # each kind has a best time of its own
    assert pace.pause_seconds("put", 0.005) == 0
    assert pace.pause_seconds("put", 0.010) == pytest.approx(2 * (0.010 - 0.0065), rel=0.01)


def test_a_server_that_stays_slow_is_no_busy_one_for_ever() -> None:
    pace = RedisPace(2.0)
    pace.pause_seconds("put", 0.001)
    pauses = [pace.pause_seconds("put", 0.010) for _ in range(2000)]
    assert 0 < pauses[0] < 2 * 0.010 and pauses[-1] == 0


def test_no_pauses_if_none_are_wanted() -> None:
    pace = RedisPace(0.0)
    assert [pace.pause_seconds("put", seconds) for seconds in (0.001, 1.0)] == [0, 0]


def test_a_failed_request_is_not_followed_by_a_pause() -> None:
    pace = RedisPace(2.0)
    with pytest.raises(OSError, match="gone"), pace.paced("put"):
        raise OSError("gone")
    assert pace.pause_seconds("put", 1.0) == 0  # nor is it a best time


@contextmanager
def _busy_at_put(server: RedisServer, number: int) -> Iterator[None]:
    """Have the server compute for a while just before it gets some rows, the n-th part of them."""
    parts = urlsplit(server.url)
    puts = [0]
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        script = (
            "local first = redis.call('TIME') while true do local now = redis.call('TIME') "
            "if (now[1] - first[1]) * 1e6 + now[2] - first[2] > "
            f"{_BUSY_SECONDS * 1e6} then return 1 end end"
        )

        def keep_busy(name: str) -> None:
            puts[0] += name.startswith("sink-put")
            if name.startswith("sink-put") and puts[0] == number:
                words = ("EVAL", script, "0")
                text = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
                connection.sendall(f"*{len(words)}\r\n{text}".encode())

        durable.set_observer(keep_busy)
        try:
            yield
        finally:
            durable.set_observer(None)
        assert connection.recv(100) == b":1\r\n"


@pytest.mark.parametrize("options", ["", "&pause=0"])
def test_a_publisher_waits_for_a_busy_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    pauses: list[float] = []
    sleep = time.sleep

    def note_pause(seconds: float) -> None:
        pauses.append(seconds)
        sleep(min(seconds, 0.01))

    rows = {"users": torch.arange(3000), "items": ids_of(1)}
    with redis_server(tmp_path) as server, open_sink(f"{server.url}?grace=0{options}") as sink:
        bring(sink, 1, rows, parent=None)
        monkeypatch.setattr(time, "sleep", note_pause)
        with _busy_at_put(server, 3):
            bring(sink, 2, rows, parent=1)
        with sink.reading() as reading:
            assert reading.version.number == 2 and reading.row_count("users") == 3000
    assert (max(pauses, default=0.0) > _BUSY_SECONDS) == (not options)
