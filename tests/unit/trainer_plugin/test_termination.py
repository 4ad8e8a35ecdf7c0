"""SIGTERM: a final checkpoint between two batches, then what would have happened anyway."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from recpoint.catalog.run.ends import read_end
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.trainer_note import read_trainer_note, trainer_state
from recpoint.catalog.store.store import open_store
from tests.forked_program import ForkedProgram, be_code
from tests.polling import PATIENCE_SECONDS
from tests.torch_interpreter import run_program
from tests.training_builder import Place, checkpointer, simple_training, train, until

SCRIPT = """
import sys, signal
import torch
torch.sparse.check_sparse_tensor_invariants.disable()
from pathlib import Path
from tests.training_builder import Place, checkpointer, simple_training
place = Place(sys.argv[1], Path(sys.argv[2]))
if sys.argv[3] == "own":
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


def start(script: str, place: Place, said: Path, *arguments: str) -> ForkedProgram:
    """Start the script with the place; what it says is in a file."""
    return ForkedProgram(
        be_code,
        [script, place.run, str(place.staging), *arguments],
        environment=os.environ,
        output=(said, said),
    )


def first_line(said: Path) -> str:
    """The first whole one, once it is there."""
    until(lambda: "\n" in said.read_text())
    return said.read_text().splitlines()[0]


@pytest.mark.parametrize(("handler", "code"), [("default", -signal.SIGTERM), ("own", 7)])
def test_a_final_checkpoint_then_the_handler_before(
    place: Place, tmp_path: Path, handler: str, code: int
) -> None:
    said = tmp_path / "said"
    with place.agent():
        process = start(SCRIPT, place, said, handler)
        first_line(said)
        process.send_signal(signal.SIGTERM)
        ended = process.wait()
    lines = said.read_text().splitlines()
    assert ended == code, lines
    assert ("own handler" in lines) == (handler == "own")
    last = max(int(line) for line in lines if line.isdigit())
    run = Run.open(open_store(place.run))
    newest = run.live_line()[0]
    assert newest.step in (last, last + 1), "the batch after which the signal was seen"
    end = read_end(run, 1)
    assert end is not None and (end.step, end.reason) == (newest.step, "terminated")
    note = read_trainer_note(StagedRun(place.run_directory))
    assert trainer_state(StagedRun(place.run_directory), note) == "ended", (
        "and nobody need be woken up"
    )


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
            until(lambda: ckpt._training.end._notice.requested)
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
        found.append(StagedRun(place.run_directory).staged_jobs())

    before = signal.signal(signal.SIGTERM, look)
    try:
        training = simple_training()
        ckpt = checkpointer(training, place, close_seconds=0, handle_sigterm=True)
        ckpt.restore()
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: ckpt._training.end._notice.requested)
        train(training, ckpt, 1)
        ckpt.close(final=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [path.stem for path in found[0]] == ["00000001-000000000001-r00000"]


FORK = """
import os, signal, sys
from pathlib import Path
from tests.training_builder import Place, checkpointer, simple_training
place = Place(sys.argv[1], Path(sys.argv[2]))
ckpt = checkpointer(simple_training(), place, handle_sigterm=True)
ckpt.restore()
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


def forking_trainer(place: Place, said: Path) -> tuple[ForkedProgram, int]:
    """A trainer that has forked a child after its start, and the child's process id."""
    process = start(FORK, place, said)
    return process, int(first_line(said))


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_forked_child_ends_when_it_is_told_to(place: Place, tmp_path: Path) -> None:
    process, child = forking_trainer(place, tmp_path / "said")
    try:
        os.kill(child, signal.SIGTERM)
        until(lambda: has_ended(child))
    finally:
        if not has_ended(child):
            os.kill(child, signal.SIGKILL)
        process.kill()


def test_a_forked_child_that_lives_on_does_not_keep_the_run(place: Place, tmp_path: Path) -> None:
    process, child = forking_trainer(place, tmp_path / "said")
    try:
        process.kill()
        process.wait()
        assert not has_ended(child)
        ckpt = checkpointer(simple_training(), place)
        ckpt.restore()
        ckpt.close(final=False)
    finally:
        os.kill(child, signal.SIGKILL)


# No end of a child searches what was imported for garbage: that takes longer than all else it does.
LEAVING = """
import gc, os, sys
import torch._dynamo  # as the first optimizer does
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
            assert not ckpt._parts.area.jobs(), "the child has staged something"
            training.batch()
            ckpt.step()
            ckpt.close()
            return [path.stem for path in ckpt._parts.area.jobs()]
        elif how == "exits":
            sys.exit()
        elif how == "closes":
            ckpt.close(final=False)
        elif how == "goes on":
            for name in ("step", "checkpoint", "restore"):
                refuses(ckpt, name)
    sys.exit()  # of the child

gc.freeze()
for how in ("leaves", "exits", "closes", "goes on"):
    # Flushed: what a child has of it, it would print once more.
    print(how, forked(how, Place(f"{sys.argv[1]} {how}", Path(sys.argv[2]))), flush=True)
"""


def test_a_forked_child_takes_no_checkpoint(place: Place) -> None:
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = run_program(LEAVING, place.run, str(place.staging), environment=alone)
    ways = ("leaves", "exits", "closes", "goes on")
    expected = [f"{how} ['00000001-000000000002-r00000']" for how in ways]
    assert (ran.returncode, ran.stdout.splitlines()) == (0, expected), ran.stderr


# Each of its children ends as an interpreter does: by itself, without close().
UNCLOSED = """
import gc, os, sys
import torch._dynamo  # as the first optimizer does
from pathlib import Path
from recpoint.catalog.staging.area import StagedRun
from tests import training_builder
from tests.training_builder import Place, checkpointer, simple_training
training_builder.ROWS = 2_000_000  # which takes longer to stage than a process to end
place = Place(sys.argv[1], Path(sys.argv[2]))
gc.freeze()
for _ in range(3):
    child = os.fork()
    if child == 0:
        training = simple_training()
        ckpt = checkpointer(training, place, interval_batches=1)
        ckpt.restore()
        training.batch()
        ckpt.step()
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, len(StagedRun(place.run_directory).staged_jobs()), flush=True)
"""


def test_a_process_that_ends_without_close_ends_well_and_leaves_what_was_cut(place: Place) -> None:
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = run_program(UNCLOSED, place.run, str(place.staging), environment=alone)
    # Without the wait nearly all of them leave nothing, and some abort.
    assert ran.stdout.splitlines() == 3 * ["0 1"], ran.stderr
    assert ran.returncode == 0


def test_a_second_signal_does_not_wait(place: Place) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: received.append(number))
    try:
        ckpt = checkpointer(simple_training(), place, handle_sigterm=True)
        ckpt.restore()
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: ckpt._training.end._notice.requested)
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
        ckpt = checkpointer(training, place, close_seconds=0, handle_sigterm=True)
        ckpt.restore()
        ckpt.take_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: ckpt._training.end._notice.requested)
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
