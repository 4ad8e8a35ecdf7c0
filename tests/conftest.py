"""Provides fixtures for all tests: a real S3 server, started when the first test needs it."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

gc.disable()  # until collection ends: nothing that is imported until then becomes garbage

pytest.register_assert_rewrite("recpoint.testing.homes", "recpoint.testing.store_suite")

from recpoint.testing.seaweed import SeaweedServer  # noqa: E402  (after the rewriting is set up)
from tests.example_counts import examples  # noqa: E402

hypothesis.settings.register_profile("recpoint", max_examples=examples(100))
hypothesis.settings.load_profile("recpoint")

# A shell makes background processes ignore Ctrl-C, and child processes inherit that: processes that
# tests interrupt would ignore it too.
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

# Each worker has its own port for local Prefect servers, so that a test that stops a server finds
# it again. The ports some thousands higher are for other servers of this worker.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
os.environ["RECPOINT_SERVER_PORT"] = str(4200 + 100 * _WORKER)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """The S3 server of this session (under xdist, of this worker); tests must leave it running."""
    with SeaweedServer(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def own_seaweed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SeaweedServer]:
    """A server for one test, which may kill and restart it; the environment points to it."""
    with SeaweedServer(tmp_path_factory.mktemp("own_seaweed")) as server:
        _use(server, monkeypatch)
        yield server


@pytest.fixture
def s3_environment(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> SeaweedServer:
    """The session's server, to which the environment of this process and its children points."""
    _use(seaweed, monkeypatch)
    return seaweed


@pytest.fixture
def s3_run_url(s3_environment: SeaweedServer) -> str:
    """An unused run URL on the session's server; the environment points to the server."""
    return s3_environment.run_url()


def _use(server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the environment at `server`, whatever it was set to before."""
    for name in _FOREIGN_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that selects tests marked `nightly`."""
    parser.addoption(
        "--nightly",
        metavar="PART",
        help="run the tests of this part of `make nightly`; all: of every part, and those of none",
    )


def _deselect_nightly(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of the part that `--nightly` names; without it, those of no part."""
    chosen = config.getoption("--nightly")
    if chosen == "all":
        return
    selected: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker("nightly")
        part = None if mark is None else mark.args[0]
        (selected if part == chosen else deselected).append(item)
    config.stash[_DESELECTED] = len(deselected)
    config.hook.pytest_deselected(items=deselected)
    items[:] = selected


_DESELECTED = pytest.StashKey[int]()


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    """Say how many tests are left out, and how they are run."""
    count = config.stash.get(_DESELECTED, 0)
    chosen = config.getoption("--nightly")
    if not count or chosen is not None:
        return ""
    return f"left to `make nightly`: {count} tests (here: --nightly PART, or --nightly all)"


def _uses_prefect(item: pytest.Item) -> bool:
    return "prefect_api" in getattr(item, "fixturenames", ())


#: A test that is marked `slow` takes as long as so many others.
_SLOW_COUNTS = 15


def _group_prefect(items: list[pytest.Item]) -> None:
    """Divide the tests with Prefect in process into two groups of whole files, as equal as can be.

    The other workers wait for the longer group at the end. A test that has a group keeps it.
    """
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if _uses_prefect(item) and item.get_closest_marker("xdist_group") is None:
            by_file.setdefault(item.path, []).append(item)
    sizes = {
        file: sum(1 if item.get_closest_marker("slow") is None else _SLOW_COUNTS for item in tests)
        for file, tests in by_file.items()
    }
    group_sizes = [0, 0]
    for file in sorted(sizes, key=lambda path: (-sizes[path], path)):
        group = group_sizes.index(min(group_sizes))
        group_sizes[group] += sizes[file]
        for item in by_file[file]:
            item.add_marker(pytest.mark.xdist_group(f"prefect {group}"))


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests by their part, and order them: those with Prefect in process last.

    Prefect's client leaves threads in the process that sometimes draw from Python's generator. A
    training process never has them (`test_structure`). Tests of bit-identical resumption compare
    that generator, so they must not have these threads either. One worker runs a whole group; if it
    began a group last, the other workers would wait for it. So the slowest tests are first. Two
    workers run all tests with Prefect in process, because each worker that does starts a server.
    """
    _deselect_nightly(config, items)
    _group_prefect(items)

    def order(item: pytest.Item) -> tuple[bool, bool, bool]:
        uses_prefect = _uses_prefect(item)
        grouped, slow = (item.get_closest_marker(name) for name in ("xdist_group", "slow"))
        return (uses_prefect, grouped is None, slow is None)

    items.sort(key=order)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show beside a failed test the log of the S3 server, which alone says why it refused."""
    report = yield
    server = getattr(item, "funcargs", {}).get("seaweed")
    if report.failed and isinstance(server, SeaweedServer):
        report.sections.append(("end of the S3 server's log", server.log_end()))
    return report


def pytest_collection_finish() -> None:
    """Exclude everything imported so far from later garbage collections."""
    gc.collect()
    gc.freeze()
    gc.enable()
