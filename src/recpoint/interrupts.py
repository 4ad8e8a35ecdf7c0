"""What handlers of signals raise, held back while training's state and a checkpoint's must agree.

Python calls a handler in the main thread, between any two instructions of whatever runs there, and
what the handler raises goes on from that place: Ctrl-C, a watchdog's time-out, SystemExit. In the
middle of a cut it would leave rows that are neither dirty nor in a checkpoint. Inside `held()` each
handler still runs at once; only its exception waits, and is raised where the block ends.

Not held: what one thread raises in another (`PyThreadState_SetAsyncExc`). What runs in `__del__`,
in callbacks of weak references and of the garbage collector cannot raise into other code.
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

#: glibc's has 152, others less.
_MOST_BYTES_OF_SIGACTION: Final = 512

#: Those that a process can handle.
_SIGNALS: Final = tuple(
    sorted(set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}, key=int)
)


class _Standin:
    """Stands in for one handler; it does what that one does, but raises only where it may."""

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
    """One block of `held()`. Single assignments begin and end it, which nothing interrupts.

    Attributes:
        holds: whether what handlers raise is kept now.
        is_over: its stand-ins that are still in place mean nothing any more.
        kept: what is raised where the block ends.
        outer: the block around this one, which lets through what this one does not.
    """

    __slots__ = ("_standins", "holds", "is_over", "kept", "outer")

    def __init__(self) -> None:
        self.holds = self.is_over = False
        self.kept: BaseException | None = None
        self.outer: Hold | None = None
        self._standins: list[tuple[signal.Signals | int, _Standin]] = []

    def __enter__(self) -> Self:
        global _current
        # Handlers run in the main thread alone; and what is held already is raised further out.
        if threading.current_thread() is threading.main_thread() and not _is_held():
            try:
                self.outer = _current
                self._stand_in()
                _current = self
                self.holds = True  # last: until here nothing has happened
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
            self._give_back()  # the rest
        finally:
            if self.kept is not None:  # no call between here and the end: it would lose this
                try:
                    raise self.kept
                finally:
                    self.kept = None  # its traceback has this frame

    def let_through(self, call: Callable[[], T]) -> T:
        """Call something that may be interrupted at any place; what is kept is raised first."""
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
            self.holds = True  # also where a handler came between the call and the lines above
            self._stand_in()
            raise

    def keep(self, error: BaseException) -> None:
        """Raise it where the block ends.

        Of several the first that is no `Exception`, as Ctrl-C is not, else the first; the others
        are its context.
        """
        if self.kept is None:
            self.kept = error
            return
        first, other = self.kept, error
        if isinstance(first, Exception) and not isinstance(other, Exception):
            first, other = other, first
        last, seen = first, {id(first)}
        while last.__context__ is not None and id(last.__context__) not in seen:
            last = last.__context__
            seen.add(id(last))
        if id(other) not in seen:
            last.__context__ = other
        self.kept = first

    def _stand_in(self) -> None:
        for number in _SIGNALS:
            handler: object = signal.getsignal(number)
            if isinstance(handler, _Standin):
                if handler.hold is self:
                    continue
                if handler.hold.is_over:
                    handler = handler.handler  # it was interrupted while it gave back
            if callable(handler):
                standin = _Standin(handler, self)
                self._standins.append((number, standin))
                _put(number, standin)

    def _give_back(self) -> None:
        for number, standin in self._standins:
            there: object = signal.getsignal(number)
            if there is standin:  # else somebody has chosen another
                _put(number, standin.handler)


_current: Hold | None = None


def held() -> Hold:
    """A block in which handlers of signals run and do not raise; see above.

    In other threads than the main one, and inside another such block, it changes nothing.
    """
    return Hold()


def _is_held() -> bool:
    return _current is not None and _current.holds


def is_interrupted() -> bool:
    """Whether a handler has raised in the block that the main thread is in: waits end then."""
    return (
        _current is not None
        and _current.holds
        and _current.kept is not None
        and threading.current_thread() is threading.main_thread()
    )


def let_into(call: Callable[[], T]) -> T:
    """Call code of the user's, which handlers may interrupt: it may hang, and they end that.

    What a handler raises there comes out here, as an error of that code would, and once more where
    the block ends.
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
        hold.holds = True  # also where a handler came between the call and the line above
        if came_from_handler(error) or not isinstance(error, Exception):
            hold.keep(error)
        raise


def start_thread(thread: threading.Thread) -> None:
    """`thread.start()`, whole: what handlers raise comes after it.

    In the middle of it Python would make a RuntimeError of that, as if there were no thread left.

    Raises:
        RuntimeError: the system has no thread left.
        MemoryError: there is no memory for one.
    """
    with held():
        thread.start()


def handler_of(number: signal.Signals) -> object:
    """What `signal.getsignal` says outside the blocks."""
    handler: object = signal.getsignal(number)
    while isinstance(handler, _Standin):
        handler = handler.handler
    return handler


def set_handler(number: signal.Signals, handler: Any) -> None:
    """`signal.signal`, which in a block leaves what the new handler raises to that block."""
    there: object = signal.getsignal(number)
    while isinstance(there, _Standin) and isinstance(there.handler, _Standin):
        there = there.handler
    if isinstance(there, _Standin) and callable(handler):
        there.handler = handler
    else:
        signal.signal(number, handler)


def came_from_handler(error: BaseException) -> bool:
    """Whether a signal's handler raised it, so that it is not for whoever was interrupted."""
    codes = {_code(signal.getsignal(number)) for number in _SIGNALS} - {None}
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        # One that has put another in its place is known by what it was called with.
        if frame.f_code in codes or (
            frame.f_back is not None
            and any(value is frame.f_back for value in frame.f_locals.values())
            and any(value in _SIGNALS for value in frame.f_locals.values() if type(value) is int)
        ):
            return True
        trace = trace.tb_next
    return False


def _put(number: signal.Signals | int, handler: Any) -> None:
    """`signal.signal` for Python alone: what the system calls stays.

    That may be a handler in C which hands on to Python's, as `faulthandler` registers one; and its
    flags are `signal.siginterrupt`'s.
    """
    system = _sigaction()
    before = ctypes.create_string_buffer(_MOST_BYTES_OF_SIGACTION)
    known = system is not None and system(int(number), None, before) == 0
    signal.signal(number, handler)
    if known and system is not None:
        system(int(number), before, None)


@cache
def _sigaction() -> Callable[[int, Any, Any], int] | None:
    try:
        found = ctypes.CDLL(None).sigaction
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes, found.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p), ctypes.c_int
    return cast(Callable[[int, Any, Any], int], found)


def _after_fork() -> None:
    """A forked child is in no block: nothing would ever raise there what it keeps."""
    global _current
    hold, _current = _current, None
    while hold is not None:
        hold.holds, hold.is_over, hold.kept = False, True, None
        hold = hold.outer


os.register_at_fork(after_in_child=_after_fork)


def _code(handler: Any) -> CodeType | None:
    """What runs when a handler is called, if it is written in Python."""
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
