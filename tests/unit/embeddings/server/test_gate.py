"""A gate lets calls in side by side or one alone, whatever order they come in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from recpoint.embeddings.server.gate import Gate
from tests.polling import until


class _Caller:
    """A thread that enters a context, and stays inside until it is let go."""

    def __init__(self, context: AbstractContextManager[None]) -> None:
        self._context = context
        self.is_inside = threading.Event()
        self._may_leave = threading.Event()
        self._thread = threading.Thread(target=self._stay, daemon=True)
        self._thread.start()

    def _stay(self) -> None:
        with self._context:
            self.is_inside.set()
            self._may_leave.wait(30)

    def leave(self) -> None:
        self._may_leave.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


def _waits(gate: Gate) -> Callable[[], bool]:
    return lambda: gate._waiting == 1


def test_calls_are_inside_side_by_side() -> None:
    gate = Gate()
    callers = [_Caller(gate.shared()) for _ in range(3)]
    assert all(caller.is_inside.wait(30) for caller in callers)
    for caller in callers:
        caller.leave()


def test_a_call_that_waits_to_be_alone_goes_before_those_that_come_later() -> None:
    gate = Gate()
    first, second = _Caller(gate.shared()), _Caller(gate.shared())
    assert first.is_inside.wait(30) and second.is_inside.wait(30)
    alone = _Caller(gate.alone())
    until(_waits(gate), seconds=30)
    later = _Caller(gate.shared())
    first.leave()
    assert not alone.is_inside.wait(0.02) and not later.is_inside.is_set()
    second.leave()
    assert alone.is_inside.wait(30) and not later.is_inside.wait(0.02)
    alone.leave()
    assert later.is_inside.wait(30)
    later.leave()


def test_a_call_that_is_refused_inside_is_let_out_again() -> None:
    gate = Gate()

    def refuse() -> None:
        raise ValueError("another incarnation")

    with pytest.raises(ValueError, match="another incarnation"), gate.shared(refuse):
        pytest.fail("it is not let in")
    alone = _Caller(gate.alone())
    assert alone.is_inside.wait(30)
    alone.leave()
