"""SIGTERM: noticed by a flag, acted on between two batches, then handed on."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

from recpoint.interrupts import handler_of, set_handler

__all__ = ["TerminationNotice"]


_log = logging.getLogger("recpoint")


class TerminationNotice:
    """Stands in for the process's SIGTERM handler while training runs.

    The first SIGTERM sets `requested`. A second one goes straight to the handler that was there
    before: whoever asks twice does not want to wait for a checkpoint.
    """

    def __init__(self) -> None:
        self.requested = self.redelivered = False
        self._previous: Any = None
        self._installed = False
        self._process = 0

    def install(self) -> None:
        """Take the signal; in another thread than the main one python does not allow that."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "SIGTERM takes no final checkpoint: the Checkpointer was started outside the main "
                "thread. Next: call restore() in the main thread, or Options(handle_sigterm=False)"
            )
            return
        before = handler_of(signal.SIGTERM)
        set_handler(signal.SIGTERM, self._received)
        if before != self._received:  # it is there already
            self._previous = before
        self._installed = True
        self._process = os.getpid()

    def remove(self) -> None:
        """Give the signal back to the handler that was there before."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        # Somebody may have replaced ours meanwhile: theirs stays.
        if handler_of(signal.SIGTERM) == self._received:
            set_handler(signal.SIGTERM, self._handler_before())

    def redeliver(self) -> None:
        """Send the signal again, to the handler before ours; by default that ends the process."""
        self.requested, self.redelivered = False, True
        self.remove()
        os.kill(os.getpid(), signal.SIGTERM)

    def _received(self, _number: int, _frame: FrameType | None) -> None:
        if not self._installed:
            self._received_afterwards()
        # A forked child, of a reader for instance, has this handler too and nothing to checkpoint:
        # it must end when it is told to.
        elif self.requested or os.getpid() != self._process:
            self.redeliver()
        else:
            self.requested = True

    def _received_afterwards(self) -> None:
        """Training is over, and somebody has put this handler back, or calls it beside his own.

        Two Checkpointers do that where the first of them is closed first.
        """
        if handler_of(signal.SIGTERM) != self._received:
            return  # whoever called it answers the signal
        set_handler(signal.SIGTERM, self._handler_before())
        self._previous = None  # once: it may lead back to here
        os.kill(os.getpid(), signal.SIGTERM)

    def _handler_before(self) -> Any:
        # None: the handler before was not python's, and cannot be put back by python.
        return signal.SIG_DFL if self._previous is None else self._previous
