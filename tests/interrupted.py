"""Makes signals arrive at a chosen place in a call, between two instructions of Python."""

from __future__ import annotations

import dis
import inspect
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

__all__ = ["Arrival", "Interrupt", "Spot", "TimeOut", "Visits", "arrivals", "handler_raises"]

#: CPython checks for signals after these instructions, and at the begin of a function.
_LOOKS = frozenset(
    dis.opmap[name]
    for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME", "SEND")
    if name in dis.opmap
)

_SIGNAL = signal.SIGUSR1


class Interrupt(BaseException):
    """Stands for a Ctrl-C: no code that catches `Exception` catches it."""


class TimeOut(Exception):
    """Stands for the error that a watchdog raises."""


class Spot(NamedTuple):
    """A place in the code at which Python may run a handler."""

    file: str
    function: str
    offset: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.function}+{self.offset}"


class Arrival(NamedTuple):
    """The signal comes when this spot is reached for the `visit`th time, from 1."""

    spot: Spot
    visit: int
    error: type[BaseException]


@contextmanager
def handler_raises(error: type[BaseException]) -> Iterator[None]:
    """Make the signal's handler raise `error` within the block."""

    def handler(_number: int, _frame: FrameType | None) -> None:
        raise error

    old_handler = signal.signal(_SIGNAL, handler)
    try:
        yield
        assert signal.getsignal(_SIGNAL) is handler, "somebody has kept the handler"
    finally:
        signal.signal(_SIGNAL, old_handler)


class Visits:
    """Calls a function and counts each spot that it reaches in this thread.

    Args:
        arrival: where the signal arrives; None: nowhere.

    Attributes:
        counts: how often each spot was reached.
        arrived: whether the signal came.
    """

    def __init__(self, arrival: Arrival | None = None) -> None:
        self.counts: Counter[Spot] = Counter()
        self.arrived = False
        self._arrival = arrival

    def call(self, function: Callable[[], Any]) -> Any:
        """Call the function; raise what it raises."""
        old_trace = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return function()
        finally:
            sys.settrace(old_trace)

    def _enter(self, frame: FrameType, event: str, _argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if code.co_filename == __file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        operations = _operations(code)
        looks = False

        def within(frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
            nonlocal looks
            if event == "opcode":
                if looks:
                    self._visit(code, frame.f_lasti)
                looks = operations[frame.f_lasti] in _LOOKS
            return within

        # A generator that is discarded comes here too, and Python drops errors that are raised
        # there. A generator that continues checks for signals at its RESUME.
        if not code.co_flags & inspect.CO_GENERATOR:
            self._visit(code, -1)
        return within

    def _visit(self, code: CodeType, offset: int) -> None:
        spot = Spot(code.co_filename, code.co_qualname, offset)
        self.counts[spot] += 1
        if self._arrival is not None and self._arrival[:2] == (spot, self.counts[spot]):
            self.arrived = True
            sys.settrace(None)  # no more spots are needed, and tracing takes most of the time
            signal.raise_signal(_SIGNAL)


@cache
def _operations(code: CodeType) -> bytes:
    return code.co_code


def arrivals(visits: Visits, *, every: int = 1, always: str = "") -> list[Arrival]:
    """Return the first and the last visit of each spot that was found.

    Args:
        visits: recorded without a signal.
        every: one spot of so many is taken.
        always: all spots in files whose names end so are taken.
    """
    arrivals = []
    for number, (spot, count) in enumerate(visits.counts.items()):
        if number % every == 0 or (always and spot.file.endswith(always)):
            errors = (Interrupt, TimeOut) if number // every % 2 else (TimeOut, Interrupt)
            if count > 1 or every == 1:
                arrivals += [Arrival(spot, 1, errors[0]), Arrival(spot, count, errors[1])]
            else:
                arrivals.append(Arrival(spot, 1, errors[0]))
    return arrivals
