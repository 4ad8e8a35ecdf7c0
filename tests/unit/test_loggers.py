"""What a user's logging handler raises reaches neither the training loop nor a follower."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recpoint import Follower, loggers
from tests.catalog_builder import build, new_run, publish, tables
from tests.polling import until
from tests.training_builder import Place, checkpointer, simple_training, train

SOURCE = Path(loggers.__file__).parent
LOGGER = re.compile(r"getLogger\(([^)]*)\)")


class Fails(logging.Handler):
    """As one whose server is away."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())
        raise self.error


@pytest.fixture
def fails() -> Iterator[Fails]:
    handler = Fails(ConnectionError("no route"))
    logging.getLogger("recpoint").addHandler(handler)
    yield handler
    logging.getLogger("recpoint").removeHandler(handler)


def test_all_loggers_of_the_source_are_guarded() -> None:
    named = set()
    for folder in SOURCE.iterdir():
        files = folder.resolve().rglob("*.py") if folder.is_dir() else [folder]
        for file in files:
            if file.suffix == ".py" and file.name != "loggers.py":
                named.update(LOGGER.findall(file.read_text(encoding="utf-8")))
    named = {name for name in named if not re.fullmatch(r'"(httpx|prefect)[a-z._]*"|', name)}
    assert {name.strip('"') for name in named} == set(loggers.NAMES)


def test_what_a_handler_raises_is_printed(fails: Fails, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("recpoint.serving").warning("the store is %s", "away")
    assert fails.seen == ["the store is away"]
    assert "ConnectionError: no route" in capsys.readouterr().err
    fails.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        logging.getLogger("recpoint").warning("a signal came meanwhile")


@pytest.mark.parametrize("how", ["closed", "a pipe that nobody reads"])
def test_nothing_is_raised_where_standard_error_is_gone(how: str) -> None:
    """The handler that writes to it fails then, and so does printing that."""
    program = (
        "import logging, os, sys\n"
        "import recpoint\n"
        "class Fails(logging.Handler):\n"
        "    def emit(self, record): raise ConnectionError\n"
        "logging.getLogger('recpoint').addHandler(Fails())\n"
        "if sys.argv[1] == 'closed': sys.stderr.close()\n"
        "logging.getLogger('recpoint').error('anything')\n"
        "print('went on', flush=True)\n"
        "os._exit(0)\n"  # python itself fails where it flushes to such a pipe at its end
    )
    reads, writes = os.pipe()
    os.close(reads)
    try:
        arguments = [sys.executable, "-c", program, how]
        ran = subprocess.run(arguments, check=False, stdout=subprocess.PIPE, stderr=writes)
    finally:
        os.close(writes)
    assert ran.stdout == b"went on\n"


def test_loggers_of_a_users_class_stay_theirs() -> None:
    program = (
        "import logging\n"
        "class Theirs(logging.Logger):\n"
        "    def theirs(self): return 'kept'\n"
        "logging.setLoggerClass(Theirs)\n"
        "def fails(record): raise ValueError\n"
        "logging.getLogger('recpoint').addFilter(fails)\n"
        "import recpoint\n"
        "logger = logging.getLogger('recpoint')\n"
        "logger.error('anything')\n"
        "assert logger.theirs() == logging.getLogger('recpoint.agent').theirs() == 'kept'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stderr=subprocess.DEVNULL)


def test_training_goes_on(tmp_path: Path, fails: Fails) -> None:
    """Nobody stores its checkpoints, which is said at each that is due."""
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    training = simple_training()
    with checkpointer(training, place, close_seconds=0.1, drain_seconds=0.0) as ckpt:
        ckpt.restore()
        train(training, ckpt, 8)
        assert ckpt.batches_done == 8
    assert any("no checkpoint at batch" in line for line in fails.seen)


def test_a_follower_goes_on(tmp_path: Path, fails: Fails) -> None:
    with Follower(str(tmp_path / "run"), poll_seconds=0.01) as follower:
        until(lambda: bool(fails.seen))
        run = new_run(tmp_path / "run")
        run.claim(None)
        publish(run, build(run, tables(), step=10, generation=1))
        assert follower.wait(seconds=60.0, step=10)
