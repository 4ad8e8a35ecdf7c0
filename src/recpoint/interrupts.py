"""Holds back what signal handlers raise while the training's and a checkpoint's state must agree.

Python calls a handler in the main thread, between any two instructions, and what the handler raises
(Ctrl-C, a watchdog's time-out, SystemExit) is raised at that place. In the middle of a cut it would
leave rows that are neither dirty nor in a checkpoint. Inside `held()` each handler still runs at
once; only its exception waits, and is raised where the block ends.

Not held: what one thread raises in another (`PyThreadState_SetAsyncExc`). Exceptions in `__del__`
and in callbacks of weak references and of the garbage collector never reach other code.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from functools import cache, partial
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, Self, TypeVar, cast

__all__ = [
    "came_from_handler",
    "handler_of",
    "held",
    "Hold",
    "is_interrupted",
    "let_into",
    "set_handler",
    "start_thread",
]

T = TypeVar("T")

_CALL: Final = "__call__"

#: glibc's `struct sigaction` has 152 bytes, others have less.
_MOST_BYTES_OF_SIGACTION: Final = 512

#: The signals that a process can handle.
_SIGNALS: Final = tuple(
    sorted(set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}, key=int)
)


class _Standin:
    """Stands in for one handler: calls it, and keeps what it raises while the block holds."""

    __slots__ = ("handler", "hold")

    def __init__(self, handler: Callable[..., Any], hold: Hold) -> None:
        self.handler = handler
        self.hold = hold

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.hold.holds:
            self.handler(number, frame)
            return
        try:
            self.handler(number, frame)
        except BaseException as error:  # whatever it is: it is raised later
            self.hold.keep(error)


class Hold:
    """One block of `held()`. Single assignments, which nothing interrupts, begin and end it.

    Attributes:
        holds: whether what handlers raise is kept now.
        is_over: whether the block has ended; stand-ins still in place then only call the handler.
        kept: what is raised where the block ends.
        outer: the block around this one, if this one began in code that the outer lets through.
    """

    __slots__ = ("_standins", "holds", "is_over", "kept", "outer")

    def __init__(self) -> None:
        self.holds = self.is_over = False
        self.kept: BaseException | None = None
        self.outer: Hold | None = None
        self._standins: list[tuple[signal.Signals | int, _Standin]] = []

    def __enter__(self) -> Self:
        global _current
        # Handlers run only in the main thread. If an outer block holds, it raises what is kept.
        if threading.current_thread() is threading.main_thread() and not _is_held():
            try:
                self.outer = _current
                self._stand_in()
                _current = self
                self.holds = True  # last: what a handler raises before this undoes the block
            except BaseException:
                self.is_over = True
                self._give_back()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _current
        if not self.holds:
            return
        try:
            _current = self.outer
            self.holds, self.is_over = False, True  # from here on handlers raise
            self._give_back()
        except BaseException as late:
            self.keep(late)
            self._give_back()  # again, for the rest
        finally:
            if self.kept is not None:  # no call from here on: a handler could raise in it instead
                try:
                    raise self.kept
                finally:
                    self.kept = None  # its traceback refers to this frame: a cycle

    def let_through(self, call: Callable[[], T]) -> T:
        """Call code that handlers may interrupt anywhere; what is kept is raised first."""
        if not self.holds:
            return call()
        try:
            try:
                self.holds = False
                if self.kept is not None:
                    try:
                        raise self.kept
                    finally:
                        self.kept = None
                return call()
            finally:
                self.holds = True
                self._stand_in()  # for handlers that are new
        except BaseException:
            self.holds = True  # again: a handler may have raised before the lines above ran
            self._stand_in()
            raise

    def keep(self, error: BaseException) -> None:
        """Keep an exception, to raise it where the block ends.

        Of several, the first that is no `Exception` (such as Ctrl-C) is raised, else the first; the
        others are its context.
        """
        if self.kept is None:
            self.kept = error
            return
        first, later = self.kept, error
        if isinstance(first, Exception) and not isinstance(later, Exception):
            first, later = later, first
        last, seen_ids = first, {id(first)}
        while last.__context__ is not None and id(last.__context__) not in seen_ids:
            last = last.__context__
            seen_ids.add(id(last))
        if id(later) not in seen_ids:
            last.__context__ = later
        self.kept = first

    def _stand_in(self) -> None:
        for number in _SIGNALS:
            handler: object = signal.getsignal(number)
            if isinstance(handler, _Standin):
                if handler.hold is self:
                    continue
                if handler.hold.is_over:
                    handler = handler.handler  # its block was interrupted in `_give_back`
            if callable(handler):
                standin = _Standin(handler, self)
                self._standins.append((number, standin))
                _put(number, standin)

    def _give_back(self) -> None:
        for number, standin in self._standins:
            handler: object = signal.getsignal(number)
            if handler is standin:  # else the program has set another
                _put(number, standin.handler)


_current: Hold | None = None


def held() -> Hold:
    """Return a block in which signal handlers run but do not raise; see the module's docstring.

    In other threads than the main one, and inside another such block, it changes nothing.
    """
    return Hold()


def _is_held() -> bool:
    return _current is not None and _current.holds


def is_interrupted() -> bool:
    """Return whether a handler raised in the main thread's current block; waits end then."""
    return (
        _current is not None
        and _current.holds
        and _current.kept is not None
        and threading.current_thread() is threading.main_thread()
    )


def let_into(call: Callable[[], T]) -> T:
    """Call the user's code, which handlers may interrupt, because it may hang.

    What a handler raises there is raised here, as an error of that code would be, and once more
    where the block ends.
    """
    hold = _current
    if hold is None or not hold.holds or threading.current_thread() is not threading.main_thread():
        return call()
    try:
        try:
            hold.holds = False
            return call()
        finally:
            hold.holds = True
    except BaseException as error:
        hold.holds = True  # again: a handler may have raised before the line above ran
        if came_from_handler(error) or not isinstance(error, Exception):
            hold.keep(error)
        raise


def start_thread(thread: threading.Thread) -> None:
    """Call `thread.start()`; what handlers raise meanwhile is raised after it.

    In the middle of it, Python would turn that into a RuntimeError, as if no thread were left.

    Raises:
        RuntimeError: the system has no thread left.
        MemoryError: there is no memory for one.
    """
    with held():
        thread.start()


def handler_of(number: signal.Signals) -> object:
    """Return what `signal.getsignal` returns outside the blocks."""
    handler: object = signal.getsignal(number)
    while isinstance(handler, _Standin):
        handler = handler.handler
    return handler


def set_handler(number: signal.Signals, handler: Any) -> None:
    """Set a handler as `signal.signal` does; a block around it holds what the handler raises."""
    current: object = signal.getsignal(number)
    while isinstance(current, _Standin) and isinstance(current.handler, _Standin):
        current = current.handler
    if isinstance(current, _Standin) and callable(handler):
        current.handler = handler
    else:
        signal.signal(number, handler)


def came_from_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised `error`: the interrupted code must not handle it."""
    codes = {_code(signal.getsignal(number)) for number in _SIGNALS} - {None}
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        # A handler that has set another in its place is known by its arguments.
        if frame.f_code in codes or (
            frame.f_back is not None
            and any(value is frame.f_back for value in frame.f_locals.values())
            and any(value in _SIGNALS for value in frame.f_locals.values() if type(value) is int)
        ):
            return True
        trace = trace.tb_next
    return False


def _put(number: signal.Signals | int, handler: Any) -> None:
    """Set Python's handler, and leave the one that the system calls as it is.

    The system may call a C handler that calls Python's in turn, as `faulthandler` registers one;
    and `signal.siginterrupt` may have set the flags.
    """
    system = _sigaction()
    old_action = ctypes.create_string_buffer(_MOST_BYTES_OF_SIGACTION)
    is_saved = system is not None and system(int(number), None, old_action) == 0
    signal.signal(number, handler)
    if is_saved and system is not None:
        system(int(number), old_action, None)


@cache
def _sigaction() -> Callable[[int, Any, Any], int] | None:
    try:
        sigaction = ctypes.CDLL(None).sigaction
    except (AttributeError, OSError, TypeError):
        return None
    sigaction.argtypes, sigaction.restype = (
        (ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p),
        ctypes.c_int,
    )
    return cast(Callable[[int, Any, Any], int], sigaction)


def _after_fork() -> None:
    """End all blocks in a forked child, where nothing would ever raise what they keep."""
    global _current
    hold, _current = _current, None
    while hold is not None:
        hold.holds, hold.is_over, hold.kept = False, True, None
        hold = hold.outer


os.register_at_fork(after_in_child=_after_fork)


def _code(handler: Any) -> CodeType | None:
    """Return the code that runs when a handler is called, if it is written in Python."""
    while isinstance(handler, partial):
        handler = handler.func
    for called in (
        handler,
        getattr(handler, "__func__", None),
        getattr(type(handler), _CALL, None),
    ):
        code = getattr(called, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None
