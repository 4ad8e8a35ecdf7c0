"""Each sink keeps the contract of sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from recpoint.serving.sinks.contract import Sink
from recpoint.serving.sinks.opening import open_sink
from recpoint.testing.sinks import SinkSuite
from tests.redis_server import RedisServer, redis_server

_prefixes = (f"run{number}" for number in count())


@pytest.fixture(scope="module")
def redis_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server without persistence."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


class TestSqliteSink(SinkSuite):
    @pytest.fixture
    def open_sink(self, tmp_path: Path) -> Callable[[], Sink]:
        return lambda: open_sink(f"sqlite:{tmp_path}/served.db")


class TestParquetDirectory(SinkSuite):
    @pytest.fixture
    def open_sink(self, tmp_path: Path) -> Callable[[], Sink]:
        return lambda: open_sink(f"parquet:{tmp_path}/served")


class TestRedisSink(SinkSuite):
    @pytest.fixture
    def open_sink(self, redis_of_module: RedisServer) -> Callable[[], Sink]:
        url = f"{redis_of_module.url}?prefix={next(_prefixes)}&grace=0"
        return lambda: open_sink(url)
