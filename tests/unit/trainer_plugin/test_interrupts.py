"""What handlers of signals raise is held back, and nothing else about them changes."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest

from recpoint.catalog.staging.agent_lock import AgentLock
from recpoint.catalog.staging.staged import staged_jobs
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.interrupts import came_from_handler, held, is_interrupted
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


def test_of_several_the_last_is_raised_with_the_first_as_its_context() -> None:
    with pytest.raises(TimeOut, match=str(int(signal.SIGUSR2))) as raised, held():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
    assert isinstance(raised.value.__context__, TimeOut)
    assert raised.value.__context__.args == (signal.SIGUSR1,)


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
        with pytest.raises(SettingsError, match="from within another"):
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
    ckpt = checkpointer(training, place, interval_batches=100, close_wait_seconds=3_600.0)
    ckpt.restore()
    training.batch()
    ckpt.step()

    def press() -> None:
        until(lambda: staged_jobs(place.run_directory))
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
