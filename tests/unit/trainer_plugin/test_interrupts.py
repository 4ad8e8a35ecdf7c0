"""What handlers of signals raise is held back, and nothing else about them changes."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from recpoint import interrupts
from recpoint.catalog.staging.agent_lock import AgentLock
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import SettingsError
from recpoint.interrupts import came_from_handler, held, is_interrupted, let_into, start_thread
from tests.interrupted import Arrival, Interrupt, Spot, Visits, handler_raises
from tests.polling import until
from tests.training_builder import Place, checkpointer, simple_training


class TimeOut(Exception):
    """A watchdog's."""


@contextmanager
def handlers(wanted: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Handlers of some signals, for a while."""
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def calls() -> list[int]:
    """Numbers of the signals whose handlers ran."""
    return []


@pytest.fixture(autouse=True)
def raising(calls: list[int]) -> Iterator[None]:
    """Handlers of two signals that raise."""

    def raise_time_out(number: int, _frame: FrameType | None) -> None:
        calls.append(number)
        raise TimeOut(number)

    with handlers({signal.SIGUSR1: raise_time_out, signal.SIGUSR2: raise_time_out}):
        yield


def test_a_handler_runs_at_once_and_what_it_raises_is_raised_last(calls: list[int]) -> None:
    done = []
    with pytest.raises(TimeOut), held():
        signal.raise_signal(signal.SIGUSR1)
        done.append(list(calls))
        assert is_interrupted()
    assert done == [[signal.SIGUSR1]]
    assert not is_interrupted()


def test_of_several_the_first_is_raised_and_the_others_are_its_context() -> None:
    with pytest.raises(TimeOut, match=str(int(signal.SIGUSR1))) as raised, held():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
    assert isinstance(raised.value.__context__, TimeOut)
    assert raised.value.__context__.args == (signal.SIGUSR2,)


@pytest.mark.parametrize("first", [signal.SIGUSR1, signal.SIGINT])
def test_ctrl_c_goes_before_what_a_script_may_catch(first: signal.Signals) -> None:
    def times_out(_number: int, _frame: FrameType | None) -> None:
        try:
            raise KeyError("looked for")
        except KeyError:
            raise TimeOut from None

    second = signal.SIGINT if first == signal.SIGUSR1 else signal.SIGUSR1
    wanted = {signal.SIGUSR1: times_out, signal.SIGINT: signal.default_int_handler}
    with handlers(wanted), pytest.raises(KeyboardInterrupt) as raised, held():
        signal.raise_signal(first)
        signal.raise_signal(second)
    assert isinstance(raised.value.__context__, TimeOut)


def test_an_error_of_the_block_is_the_context() -> None:
    with pytest.raises(TimeOut) as raised, held():
        signal.raise_signal(signal.SIGUSR1)
        raise ValueError("of the block")
    assert isinstance(raised.value.__context__, ValueError)


def test_a_block_in_a_block_raises_where_the_outer_one_ends() -> None:
    ended = []
    with pytest.raises(TimeOut), held():
        with held():
            signal.raise_signal(signal.SIGUSR1)
        ended.append("inner")
    assert ended == ["inner"]


def test_what_may_be_interrupted_is(calls: list[int]) -> None:
    with held() as hold, pytest.raises(TimeOut):
        hold.let_through(lambda: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(TimeOut), held() as hold:
        signal.raise_signal(signal.SIGUSR1)
        hold.let_through(lambda: calls.append(0))  # it is not called: this raises first
    assert 0 not in calls


def test_a_handler_that_is_set_where_it_is_let_through_is_held_too() -> None:
    def fresh(_number: int, _frame: FrameType | None) -> None:
        raise TimeOut("fresh")

    with handlers({signal.SIGUSR1: signal.SIG_IGN}):
        with pytest.raises(TimeOut, match="fresh"), held() as hold:
            hold.let_through(lambda: signal.signal(signal.SIGUSR1, fresh))
            signal.raise_signal(signal.SIGUSR1)
            assert is_interrupted()
        assert signal.getsignal(signal.SIGUSR1) is fresh


def test_a_handler_that_the_block_sets_stays() -> None:
    with held():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_handlers_are_the_same_afterwards() -> None:
    numbers = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
    before = [signal.getsignal(number) for number in numbers]
    with held():
        assert signal.getsignal(signal.SIGUSR1) not in before
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_block_that_a_handler_runs_while_another_begins_leaves_that_one_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stand-ins of one signal are there, and a handler of the next enters a block itself."""

    def enters(_number: int, _frame: FrameType | None) -> None:
        with held():
            pass

    real = signal.signal
    came: list[signal.Signals] = []

    def comes_after_the_first(number: signal.Signals, handler: Any) -> Any:
        before = real(number, handler)
        if number == signal.SIGUSR1 and not came:
            came.append(number)
            signal.raise_signal(signal.SIGUSR2)
        return before

    with handlers({signal.SIGUSR2: enters}):
        monkeypatch.setattr(signal, "signal", comes_after_the_first)
        ended = []
        with pytest.raises(TimeOut), held():
            monkeypatch.undo()
            signal.raise_signal(signal.SIGUSR1)
            ended.append("block")
        assert came and ended == ["block"]
        assert signal.getsignal(signal.SIGUSR2) is enters


def test_a_handler_in_c_stays_and_flags_too(tmp_path: Path) -> None:
    with (tmp_path / "dump").open("w+b") as file:
        signal.siginterrupt(signal.SIGUSR2, False)
        before = _system_flags(signal.SIGUSR2)
        faulthandler.register(signal.SIGUSR1, file=file, chain=True)
        try:
            with pytest.raises(TimeOut), held():
                signal.raise_signal(signal.SIGUSR1)
            held_bytes = os.path.getsize(file.name)
            assert held_bytes
            with pytest.raises(TimeOut):
                signal.raise_signal(signal.SIGUSR1)
            assert os.path.getsize(file.name) > held_bytes
        finally:
            faulthandler.unregister(signal.SIGUSR1)
        assert _system_flags(signal.SIGUSR2) == before


def _system_flags(number: signal.Signals) -> bytes:
    """The handler's address and the flags, without the mask between them."""
    there = ctypes.create_string_buffer(512)
    assert ctypes.CDLL(None).sigaction(int(number), None, there) == 0
    return there.raw[:8] + there.raw[136:140]


def test_a_forked_child_holds_nothing() -> None:
    with held():
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGUSR1)
            except TimeOut:
                os._exit(7)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_other_threads_are_left_alone() -> None:
    def block() -> None:
        with held():
            entered.set()
            left.wait(60)

    entered, left = threading.Event(), threading.Event()
    thread = threading.Thread(target=block)
    thread.start()
    entered.wait(60)
    with pytest.raises(TimeOut):
        signal.raise_signal(signal.SIGUSR1)
    left.set()
    thread.join()


class Callable_:
    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        raise TimeOut

    def method(self, _number: int, _frame: FrameType | None) -> None:
        raise TimeOut


def _function(_extra: int, _number: int, _frame: FrameType | None) -> None:
    raise TimeOut


@pytest.mark.parametrize("handler", [Callable_(), Callable_().method, partial(_function, 1)])
def test_what_a_handler_raised_is_told_from_other_errors(handler: Callable[..., Any]) -> None:
    with handlers({signal.SIGUSR1: handler}):
        with pytest.raises(TimeOut) as raised:
            signal.raise_signal(signal.SIGUSR1)
        assert came_from_handler(raised.value)
        with pytest.raises(ValueError) as other:
            int("none")
        assert not came_from_handler(other.value)


def test_a_handler_that_puts_another_in_its_place_is_known_by_how_it_was_called() -> None:
    def once(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise TimeOut

    with handlers({signal.SIGUSR1: once}), pytest.raises(TimeOut) as raised:
        signal.raise_signal(signal.SIGUSR1)
    assert came_from_handler(raised.value)


def test_a_watchdog_ends_a_state_dict_that_hangs(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    state, hangs = training.reader.state_dict, threading.Event()

    def state_dict() -> dict[str, Any]:
        if hangs.is_set():
            hangs.clear()
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            threading.Event().wait(60)
        return state()

    training.reader.state_dict = state_dict  # type: ignore[method-assign]

    def times_out(_number: int, _frame: FrameType | None) -> None:
        raise TimeOut

    with handlers({signal.SIGALRM: times_out}):
        ckpt.restore()
        training.batch()
        hangs.set()
        began = time.monotonic()
        with pytest.raises(TimeOut):
            ckpt.step()
        assert time.monotonic() - began < 30
        assert ckpt.stats.failed == 1
        training.batch()
        ckpt.step()
        until(lambda: place.persist_all() == 1)  # and training goes on
        ckpt.close(final=False)


def test_a_second_sigterm_does_not_wait_for_the_agent(place: Place) -> None:
    training = simple_training()
    long = {"interval_batches": 100, "close_seconds": 3_600.0, "handle_sigterm": True}
    ckpt = checkpointer(training, place, **long)

    class Ended(BaseException):
        pass

    def ends(_number: int, _frame: FrameType | None) -> None:
        raise Ended

    def asks_again() -> None:
        until(lambda: bool(StagedRun(place.run_directory).staged_jobs()))
        os.kill(os.getpid(), signal.SIGTERM)

    with handlers({signal.SIGTERM: ends}), AgentLock(place.staging):
        ckpt.restore()
        training.batch()
        os.kill(os.getpid(), signal.SIGTERM)
        asking = threading.Thread(target=asks_again)
        asking.start()
        with pytest.raises(Ended):
            ckpt.step()
        asking.join()
        assert signal.getsignal(signal.SIGTERM) is ends
        ckpt.close(final=False)
    assert place.persist_all() == 1


@pytest.mark.parametrize("from_handler", [True, False])
def test_close_from_within_a_step_happens_after_it(
    place: Place, from_handler: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="recpoint")
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    answers: list[object] = []

    def asks(*_: object) -> None:
        answers.append(ckpt.checkpoint())
        answers.append(ckpt.stats.failed)
        with pytest.raises(SettingsError, match="during another"):
            ckpt.step()
        ckpt.close(final=False)
        answers.append("closed")

    state = training.reader.state_dict

    def state_dict() -> dict[str, Any]:
        if from_handler:
            signal.raise_signal(signal.SIGUSR1)
        else:
            asks()
        return state()

    training.reader.state_dict = state_dict  # type: ignore[method-assign]
    with handlers({signal.SIGUSR1: asks}):
        ckpt.restore()
        answers.clear()
        training.batch()
        ckpt.step()
    assert answers == [False, 0, "closed"]
    with pytest.raises(SettingsError, match="closed"):
        ckpt.step()
    assert place.persist_all() == 1  # what was being cut


def test_ctrl_c_ends_the_wait_for_the_agent_and_nothing_else(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=100, close_seconds=3_600.0)
    ckpt.restore()
    training.batch()
    ckpt.step()

    def press() -> None:
        until(lambda: bool(StagedRun(place.run_directory).staged_jobs()))
        os.kill(os.getpid(), signal.SIGUSR1)

    with AgentLock(place.staging):  # an agent that takes its time
        timer = threading.Thread(target=press)
        timer.start()
        with pytest.raises(TimeOut):
            ckpt.close()
        timer.join()
    assert place.persist_all() == 1  # the last checkpoint is staged
    with pytest.raises(SettingsError, match="closed"):
        ckpt.step()


@pytest.mark.parametrize("error", [TimeOut, Interrupt])
@pytest.mark.parametrize("times", [1, 2])
def test_a_state_dict_that_is_interrupted_in_close_is_asked_once_more(
    place: Place, error: type[BaseException], times: int
) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=100)
    state, left = training.reader.state_dict, [0]

    def state_dict() -> dict[str, Any]:
        if left[0]:
            left[0] -= 1
            signal.raise_signal(signal.SIGALRM)
        return state()

    training.reader.state_dict = state_dict  # type: ignore[method-assign]

    def raises(_number: int, _frame: FrameType | None) -> None:
        raise error

    with handlers({signal.SIGALRM: raises}):
        ckpt.restore()
        training.batch()
        ckpt.step()
        left[0] = times
        with pytest.raises(error):
            ckpt.close()
    assert left == [0]
    # Twice: it hangs, and the script wants to end.
    assert place.persist_all() == (1 if times == 1 else 0)


def test_a_handler_at_any_place_of_a_block_is_given_back_and_heard() -> None:
    def block() -> None:
        with held() as hold:
            hold.let_through(os.getpid)
            let_into(os.getpid)

    visits = Visits()
    with handler_raises(Interrupt):
        visits.call(block)
    spots = [spot for spot in visits.counts if spot.file == interrupts.__file__]
    assert len(spots) > 30
    for spot in spots:
        for visit in {1, visits.counts[spot]}:
            arriving = Visits(Arrival(spot, visit, Interrupt))
            with handler_raises(Interrupt), pytest.raises(Interrupt):  # and asks for its handler
                arriving.call(block)
            assert arriving.arrived and not is_interrupted()


#: So many calls in a row do not pass the same spot by.
_TRIES = 100


def _in_threading(visits: Visits) -> list[Spot]:
    return [spot for spot in visits.counts if os.path.basename(spot.file) == "threading.py"]


def _is_interrupted_at(spot: Spot, function: Callable[[], Any]) -> None:
    """Check that the call raises what a handler raises at the spot.

    A thread that starts at once spares its starter the wait, so a call may pass the spot by.
    """
    for _ in range(_TRIES):
        arriving = Visits(Arrival(spot, 1, Interrupt))
        with handler_raises(Interrupt):
            try:
                arriving.call(function)
            except Interrupt:
                return
        assert not arriving.arrived, spot
    pytest.fail(f"no call came to {spot}")


def test_a_thread_is_started_whole() -> None:
    def start() -> None:
        thread = threading.Thread(target=list)
        start_thread(thread)
        begun.append(thread)

    begun: list[threading.Thread] = []
    visits = Visits()
    with handler_raises(Interrupt):
        visits.call(start)
    spots = _in_threading(visits)
    assert len(spots) > 30
    for spot in spots:
        _is_interrupted_at(spot, start)
    for thread in begun:
        thread.join()


def test_reads_that_start_threads_raise_what_a_handler_raises() -> None:
    def read() -> None:
        with ReadScheduler(1) as reads:
            reads.begin(list).result()

    visits = Visits()
    with handler_raises(TimeOut):
        visits.call(read)
    spots = [spot for spot in _in_threading(visits) if spot.function.startswith("Condition.")]
    assert len(spots) > 5
    for spot in spots:
        _is_interrupted_at(spot, read)
