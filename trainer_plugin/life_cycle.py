"""Says which calls of a Checkpointer may run: one at a time, in its process, before its end.

Signal handlers and the `state_dict` of a user's object may call a Checkpointer in the middle of
another call. Such a call is refused, or done when the other one has ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from recpoint.errors import SettingsError
from recpoint.interrupts import Hold, held

__all__ = ["LifeCycle", "misuse"]

T = TypeVar("T")


class LifeCycle:
    """The life of one Checkpointer, from its building to its end.

    Args:
        stop: ends the Checkpointer; its argument says whether a last checkpoint is taken.

    Attributes:
        is_busy: whether a call is in progress.
        is_closed: whether the Checkpointer has ended.
    """

    def __init__(self, stop: Callable[[bool], None]) -> None:
        self._stop = stop
        self._process = os.getpid()
        self._requested_end: bool | None = None  # `final` of an end that waits for a call
        self.is_busy = self.is_closed = False

    @property
    def is_over(self) -> bool:
        """Whether the Checkpointer is closed, or belongs to another process.

        A forked child may also leave the `with` block. The slots, threads and ranks belong to its
        parent, and both processes would write to the memory in which checkpoints are staged.
        """
        return self.is_closed or os.getpid() != self._process

    def run_whole(self, call: Callable[[Hold], T]) -> T:
        """Run `call` to its end; what a signal handler raises meanwhile is raised afterwards.

        An end that was requested meanwhile follows the call.
        """
        try:
            with held() as hold:
                self.is_busy = True
                try:
                    if self.is_closed:  # a signal handler closed it a moment ago
                        raise misuse("a call", "a Checkpointer that is closed", "an open one")
                    return call(hold)
                finally:
                    self.is_busy = False
        finally:
            if self._requested_end is not None:
                self._stop(self._requested_end)

    def request_end(self, *, final: bool) -> None:
        """Have the Checkpointer end when the call in progress has ended."""
        self._requested_end = final

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Run the end of the Checkpointer in this context: it is closed afterwards."""
        self.is_busy, self._requested_end = True, None
        try:
            yield
        finally:
            self.is_busy, self.is_closed = False, True

    def refuse_busy(self, call: str) -> None:
        """Refuse a call that comes during another one.

        Raises:
            SettingsError: a call is in progress.
        """
        if self.is_busy:
            raise misuse(call, "a call during another call", "calls between two batches")

    def refuse_child(self, call: str) -> None:
        """Refuse a call in another process than the one that built the Checkpointer.

        Raises:
            SettingsError: this is a forked child.
        """
        if os.getpid() != self._process:
            raise SettingsError(
                call,
                found=f"a forked child (process {os.getpid()}) of the process that built this "
                f"Checkpointer (process {self._process})",
                expected="the process that built it, because a child would write its own state "
                "into the parent's slots",
                next_step="train and checkpoint in one process, and build the Checkpointer after "
                "that process was forked",
            )


def misuse(call: str, found: str, expected: str) -> SettingsError:
    """Return the error of a call of a Checkpointer at a time when it cannot be made."""
    return SettingsError(
        call, found=found, expected=expected, next_step="see the docstring of Checkpointer.restore"
    )
