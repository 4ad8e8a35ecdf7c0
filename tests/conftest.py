"""Fixtures for all tests: a real S3 server, started when the first test asks for it."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest

gc.disable()  # until all is collected: of what is imported until then nothing is garbage

pytest.register_assert_rewrite("recpoint.testing.store_suite")

from recpoint.testing.seaweed import SeaweedServer  # noqa: E402  (after the rewriting is set up)

# A shell has what it starts in the background ignore Ctrl-C, and that is inherited: processes that
# tests interrupt would never hear of it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_FOREIGN_SETTINGS = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_SESSION_TOKEN",
    "FSSPEC_S3",
    "FSSPEC_S3_ENDPOINT_URL",
    "FSSPEC_S3_KEY",
    "FSSPEC_S3_SECRET",
)

# Each worker's local Prefect servers have a port of their own, where a test that stops one finds it
# again. The thousands above it are for other servers of this worker.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
os.environ["RECPOINT_SERVER_PORT"] = str(4200 + 100 * _WORKER)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """The S3 server of this session (of this worker under xdist). Leave it running."""
    with SeaweedServer(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def own_seaweed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SeaweedServer]:
    """A server for one test, which may kill it and start it again; the environment leads to it."""
    with SeaweedServer(tmp_path_factory.mktemp("own_seaweed")) as server:
        _use(server, monkeypatch)
        yield server


@pytest.fixture
def s3_environment(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> SeaweedServer:
    """The session's server, found by this process and by those it starts."""
    _use(seaweed, monkeypatch)
    return seaweed


@pytest.fixture
def s3_run_url(s3_environment: SeaweedServer) -> str:
    """A fresh run URL on the session's server, with the environment that leads to it."""
    return s3_environment.run_url()


def _use(server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the environment at `server`, whatever else it was set to."""
    for name in _FOREIGN_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest first, and last what uses Prefect in its own process.

    Prefect's client leaves threads in the process that draw from python's generator now and then.
    A training process never has them (`test_structure`); tests of bit-identical resumption, which
    compare that generator, must not have them either. A group is done by one worker, which nobody
    can help: begun last, it would have the others wait for it.
    """

    def order(item: pytest.Item) -> tuple[bool, bool, bool]:
        uses_prefect = "prefect_api" in getattr(item, "fixturenames", ())
        grouped, slow = (item.get_closest_marker(name) for name in ("xdist_group", "slow"))
        return (uses_prefect, grouped is None, slow is None)

    items.sort(key=order)


def pytest_collection_finish() -> None:
    """Leave what has been imported and collected by now out of each later collection of garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()
