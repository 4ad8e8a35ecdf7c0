"""Prefect that never comes: the agent of the command line commits all the same, at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from tests.polling import PATIENCE_SECONDS
from tests.training_builder import (
    Place,
    checkpointer,
    everything,
    simple_training,
    train,
    until,
)

#: From the cut to the commit, once the agent is up; a hanging API must not be waited for, which
#: Prefect's client would do for minutes.
_LAG_SECONDS = 60.0


@pytest.fixture
def black_hole() -> Iterator[str]:
    """An API that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/api"


@contextmanager
def recpoint_agent(place: Place, environment: dict[str, str], log: Path) -> Iterator[None]:
    """`recpoint agent`, as a person starts it; it has to end well when it is told to."""
    inherited = {name: value for name, value in os.environ.items() if "PREFECT" not in name}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "recpoint", "agent", "--staging", str(place.staging)],
            stdout=file,
            stderr=file,
            env=inherited | environment,
        )
    try:
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("prefect", ["refuses", "hangs", "cannot be started"])
def test_training_is_checkpointed_without_prefect_for_ever(
    prefect: str, tmp_path: Path, black_hole: str
) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    home = tmp_path / "home"
    environment = {"RECPOINT_HOME": str(home), "PREFECT_HOME": str(tmp_path / "prefect")}
    if prefect == "cannot be started":
        home.write_text("a file where the server's directory would be")
    else:
        environment["PREFECT_API_URL"] = (
            black_hole if prefect == "hangs" else "http://127.0.0.1:9/api"
        )
    log = tmp_path / "agent.log"
    training = simple_training()
    ckpt = checkpointer(training, place, close_seconds=120.0)
    ckpt.restore()
    with recpoint_agent(place, environment, log):
        train(training, ckpt, 2)  # the agent is not there yet either, and nobody waits
        until(lambda: ckpt.stats.committed == 1)
        for _ in range(3):
            train(training, ckpt, 2)
            until(lambda: ckpt.stats.committed == ckpt.batches_done // 2, seconds=_LAG_SECONDS)
        if prefect == "cannot be started":
            until(lambda: "going on without Prefect" in log.read_text())
        ckpt.close()
    said = log.read_text()
    assert said.count("committed without Prefect") == 4
    assert "Traceback" not in said
    assert (ckpt.stats.failed, ckpt.stats.skipped, ckpt.stats.last_error) == (0, 0, None)
    expected = everything(training)
    assert check(Run.open(open_store(place.run)), level="full").ok
    second = simple_training(9)
    again = checkpointer(second, place)
    again.restore()
    again.close(final=False)
    assert again.batches_done == 8
    assert everything(second) == expected
