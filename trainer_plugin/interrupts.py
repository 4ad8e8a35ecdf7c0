"""What handlers of signals raise, held back while training's state and a checkpoint's must agree.

Python calls a handler in the main thread, between any two instructions of whatever runs there, and
what the handler raises goes on from that place: Ctrl-C, a watchdog's time-out, SystemExit. In the
middle of a cut it would leave rows that are neither dirty nor in a checkpoint. Inside `held()` each
handler still runs at once; only its exception waits, and is raised where the block ends.

Not held: what one thread raises in another (`PyThreadState_SetAsyncExc`). What runs in `__del__`,
in callbacks of weak references and of the garbage collector cannot raise into other code.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, Self, TypeVar

__all__ = ["Hold", "came_from_handler", "held", "is_interrupted"]

T = TypeVar("T")

_CALL: Final = "__call__"

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
    """One block of `held()`. Its state changes by single assignments, which nothing interrupts.

    Attributes:
        holds: whether what handlers raise is kept now.
    """

    __slots__ = ("_kept", "_standins", "holds")

    def __init__(self) -> None:
        self.holds = False
        self._kept: list[BaseException] = []
        self._standins: list[tuple[signal.Signals | int, _Standin]] = []

    def __enter__(self) -> Self:
        global _current
        # Handlers run in the main thread alone; and what is held already is raised further out.
        if threading.current_thread() is threading.main_thread() and not _is_held():
            try:
                self._stand_in()
                _current = self
                self.holds = True  # last: until here nothing has happened
            except BaseException:
                self._give_back()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.holds:
            return
        try:
            self.holds = False  # from here on handlers raise
            self._give_back()
        except BaseException as late:
            self.keep(late)
            self._give_back()  # the rest; were this interrupted too, stand-ins left do no harm
        finally:
            self._raise_kept()

    def let_through(self, call: Callable[[], T]) -> T:
        """Call something that may be interrupted at any place; what is kept is raised first."""
        if not self.holds:
            return call()
        try:
            self.holds = False
            self._raise_kept()
            return call()
        finally:
            self.holds = True
            self._stand_in()  # for handlers that are new

    def keep(self, error: BaseException) -> None:
        """Raise it where the block ends; of several the last, with the others as its context."""
        if self._kept and error.__context__ is None:
            error.__context__ = self._kept[-1]
        self._kept.append(error)

    @property
    def is_interrupted(self) -> bool:
        """Whether something is kept."""
        return bool(self._kept)

    def _raise_kept(self) -> None:
        if self._kept:
            kept, self._kept = self._kept, []
            raise kept.pop()

    def _stand_in(self) -> None:
        for number in _SIGNALS:
            handler: object = signal.getsignal(number)
            if isinstance(handler, _Standin):
                if handler.hold is self:
                    continue
                handler = handler.handler  # of a hold that was interrupted while it gave back
            if callable(handler):
                standin = _Standin(handler, self)
                self._standins.append((number, standin))
                signal.signal(number, standin)

    def _give_back(self) -> None:
        for number, standin in self._standins:
            there: object = signal.getsignal(number)
            if there is standin:  # else somebody has chosen another
                signal.signal(number, standin.handler)


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
        and _current.is_interrupted
        and threading.current_thread() is threading.main_thread()
    )


def came_from_handler(error: BaseException) -> bool:
    """Whether a signal's handler raised it, so that it is not for whoever was interrupted."""
    codes = {_code(signal.getsignal(number)) for number in _SIGNALS} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


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
