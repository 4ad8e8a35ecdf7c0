"""SIGTERM: a final checkpoint between two batches, then what would have happened anyway."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from recpoint.catalog.runs.run import Run
from recpoint.catalog.runs.run_end import read_end
from recpoint.catalog.staging import staged
from recpoint.catalog.staging.trainer_note import read_note, trainer_state
from recpoint.catalog.stores.store import open_store
from tests.polling import PATIENCE_SECONDS
from tests.training_builder import Place, checkpointer, simple_training, train, until

SCRIPT = """
import sys, signal
sys.path.insert(0, sys.argv[1])
import torch
torch.sparse.check_sparse_tensor_invariants.disable()
from pathlib import Path
from tests.training_builder import Place, checkpointer, simple_training
place = Place(sys.argv[2], Path(sys.argv[3]))
if sys.argv[4] == "own":
    def own(*_):
        print("own handler", flush=True)
        sys.exit(7)
    signal.signal(signal.SIGTERM, own)
training = simple_training()
with checkpointer(training, place, interval_batches=10**6, handle_sigterm=True) as ckpt:
    ckpt.restore()
    while True:
        training.batch()
        ckpt.step()
        print(ckpt.batches_done, flush=True)
"""


def start(place: Place, handler: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(root), place.run, str(place.staging), handler],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(("handler", "code"), [("default", -signal.SIGTERM), ("own", 7)])
def test_a_final_checkpoint_then_the_handler_before(place: Place, handler: str, code: int) -> None:
    with place.agent():
        process = start(place, handler)
        assert process.stdout is not None
        with process.stdout:
            first = process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            lines = [first.strip(), *process.stdout.read().splitlines()]
        assert process.wait(PATIENCE_SECONDS) == code, lines
    assert ("own handler" in lines) == (handler == "own")
    last = max(int(line) for line in lines if line.isdigit())
    run = Run.open(open_store(place.run))
    newest = run.live_line()[0]
    assert newest.step in (last, last + 1), "the batch after which the signal was seen"
    end = read_end(run, 1)
    assert end is not None and (end.step, end.reason) == (newest.step, "terminated")
    note = read_note(place.run_directory)
    assert trainer_state(place.run_directory, note) == "ended", "and nobody need be woken up"


def test_the_previous_handler_is_back_after_close(place: Place) -> None:
    before = signal.getsignal(signal.SIGTERM)
    training = simple_training()
    ckpt = checkpointer(training, place, handle_sigterm=True)
    ckpt.restore()
    assert signal.getsignal(signal.SIGTERM) != before
    ckpt.close(final=False)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_is_handled_elsewhere_lets_training_go_on(place: Place) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: received.append(number))
    try:
        training = simple_training()
        with place.agent():
            ckpt = checkpointer(training, place, interval_batches=100, handle_sigterm=True)
            ckpt.restore()
            train(training, ckpt, 1)
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: ckpt._end._notice.requested)
            assert not received, "not before the batch is done"
            train(training, ckpt, 1)
            assert received == [signal.SIGTERM]
            assert ckpt.stats.committed == 1
            train(training, ckpt, 1)
            ckpt.close()
            assert ckpt.stats.committed == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_last_checkpoint_is_staged_before_the_signal_goes_on(place: Place) -> None:
    """The handler before may end the process at once, and nobody has to wait for an agent."""
    found: list[list[Path]] = []

    def look(*_: object) -> None:
        found.append(staged.staged_jobs(place.run_directory))

    before = signal.signal(signal.SIGTERM, look)
    try:
        training = simple_training()
        ckpt = checkpointer(training, place, close_wait_seconds=0, handle_sigterm=True)
        ckpt.restore()
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: ckpt._end._notice.requested)
        train(training, ckpt, 1)
        ckpt.close(final=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [path.stem for path in found[0]] == ["00000001-000000000001-r00000"]


FORK = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.training_builder import Place, checkpointer, simple_training
place = Place(sys.argv[2], Path(sys.argv[3]))
ckpt = checkpointer(simple_training(), place, handle_sigterm=True)
ckpt.restore()
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
    while True:
        signal.pause()
sys.stdin.read()
"""


def forking_trainer(place: Place) -> tuple[subprocess.Popen[str], int]:
    """A trainer that has forked a child after its start, and the child's process id."""
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", FORK, str(root), place.run, str(place.staging)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_forked_child_ends_when_it_is_told_to(place: Place) -> None:
    process, child = forking_trainer(place)
    with process:
        try:
            os.kill(child, signal.SIGTERM)
            until(lambda: has_ended(child))
        finally:
            if not has_ended(child):
                os.kill(child, signal.SIGKILL)
            process.kill()


def test_a_forked_child_that_lives_on_does_not_keep_the_run(place: Place) -> None:
    process, child = forking_trainer(place)
    with process:
        try:
            process.kill()
            process.wait(PATIENCE_SECONDS)
            assert not has_ended(child)
            ckpt = checkpointer(simple_training(), place)
            ckpt.restore()
            ckpt.close(final=False)
        finally:
            os.kill(child, signal.SIGKILL)


LEAVING = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from recpoint.errors import SettingsError
from tests.training_builder import Place, checkpointer, simple_training

def refuses(ckpt, name):
    try:
        getattr(ckpt, name)()
    except SettingsError as refused:
        assert f"{name}(): found a forked child (process {os.getpid()})" in str(refused)
    else:
        raise AssertionError(f"{name}() was not refused")

def forked(how, place):
    training = simple_training()
    with checkpointer(training, place, interval_batches=10**6) as ckpt:
        ckpt.restore()
        training.batch()
        ckpt.step()
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert not ckpt._area.jobs(), "the child has staged something"
            training.batch()
            ckpt.step()
            ckpt.close()
            return [path.stem for path in ckpt._area.jobs()]
        elif how == "exits":
            sys.exit()
        elif how == "closes":
            ckpt.close(final=False)
        elif how == "goes on":
            for name in ("step", "checkpoint", "restore"):
                refuses(ckpt, name)
    sys.exit()  # of the child

for how in ("leaves", "exits", "closes", "goes on"):
    # Flushed: what a child has of it, it would print once more.
    print(how, forked(how, Place(f"{sys.argv[2]} {how}", Path(sys.argv[3]))), flush=True)
"""


def test_a_forked_child_takes_no_checkpoint(place: Place) -> None:
    root = Path(__file__).parents[3]
    ran = subprocess.run(
        [sys.executable, "-c", LEAVING, str(root), place.run, str(place.staging)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    ways = ("leaves", "exits", "closes", "goes on")
    expected = [f"{how} ['00000001-000000000002-r00000']" for how in ways]
    assert (ran.returncode, ran.stdout.splitlines()) == (0, expected), ran.stderr


UNCLOSED = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.training_builder import Place, checkpointer, simple_training
place = Place(sys.argv[2], Path(sys.argv[3]))
training = simple_training()
ckpt = checkpointer(training, place, interval_batches=1)
ckpt.restore()
training.batch()
ckpt.step()
"""


def test_a_process_that_ends_without_close_ends_well_and_leaves_what_was_cut(place: Place) -> None:
    root = Path(__file__).parents[3]
    for _ in range(3):  # without the wait most of them abort
        ended = subprocess.run(
            [sys.executable, "-c", UNCLOSED, str(root), place.run, str(place.staging)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=PATIENCE_SECONDS,
        )
        assert ended.returncode == 0, ended.stderr
        assert len(staged.staged_jobs(place.run_directory)) == 1


def test_a_second_signal_does_not_wait(place: Place) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: received.append(number))
    try:
        ckpt = checkpointer(simple_training(), place, handle_sigterm=True)
        ckpt.restore()
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: ckpt._end._notice.requested)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: bool(received))
        ckpt.close(final=False)
        assert len(received) == 1
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("first", [0, 1])
def test_two_that_are_closed_in_any_order_leave_the_signal_as_it_was(
    tmp_path: Path, first: int
) -> None:
    received: list[int] = []

    def handle(number: int, _frame: object) -> None:
        received.append(number)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        both = []
        for name in ("a", "b"):
            place = Place(str(tmp_path / name), tmp_path / f"staging-{name}")
            both.append(checkpointer(simple_training(), place, handle_sigterm=True))
            both[-1].restore()
        both[first].close(final=False)
        both[1 - first].close(final=False)
        for count in (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: len(received) == count)  # noqa: B023
        assert signal.getsignal(signal.SIGTERM) == handle
    finally:
        signal.signal(signal.SIGTERM, before)


def test_taken_twice_the_signal_goes_on_to_the_handler_before(place: Place) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: received.append(number))
    try:
        training = simple_training()
        ckpt = checkpointer(training, place, close_wait_seconds=0, handle_sigterm=True)
        ckpt.restore()
        ckpt.take_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: ckpt._end._notice.requested)
        train(training, ckpt, 1)
        assert received == [signal.SIGTERM]
        ckpt.close(final=False)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_started_in_another_thread(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGTERM)
    training = simple_training()
    ckpt = checkpointer(training, place, handle_sigterm=True)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            ckpt.restore()
            train(training, ckpt, 1)
            ckpt.close(final=False)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not errors and not thread.is_alive()
    assert "main thread" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == before
