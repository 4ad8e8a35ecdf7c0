"""Notes SIGTERM in a flag that training reads between two batches, then passes the signal on."""

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
    """Replaces the process's SIGTERM handler while training runs.

    The first SIGTERM sets `requested`. A second one goes straight to the earlier handler: whoever
    sends it twice does not want to wait for a checkpoint.

    Attributes:
        requested: a SIGTERM has arrived and has not been passed on.
        redelivered: a SIGTERM has been passed on.
    """

    def __init__(self) -> None:
        self.requested = self.redelivered = False
        self._previous: Any = None
        self._installed = False
        self._process = 0

    def install(self) -> None:
        """Install the handler, if this is the main thread; Python allows it only there."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "SIGTERM takes no final checkpoint: the Checkpointer was started outside the main "
                "thread. Next: call restore() in the main thread, or Options(handle_sigterm=False)"
            )
            return
        current = handler_of(signal.SIGTERM)
        set_handler(signal.SIGTERM, self._received)
        if current != self._received:  # otherwise ours was installed already
            self._previous = current
        self._installed = True
        self._process = os.getpid()

    def remove(self) -> None:
        """Put the earlier handler back."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        # If somebody has replaced our handler meanwhile, leave theirs.
        if handler_of(signal.SIGTERM) == self._received:
            set_handler(signal.SIGTERM, self._handler_before())

    def redeliver(self) -> None:
        """Send the signal again, to the earlier handler; the default handler ends the process."""
        self.requested, self.redelivered = False, True
        self.remove()
        os.kill(os.getpid(), signal.SIGTERM)

    def _received(self, _number: int, _frame: FrameType | None) -> None:
        if not self._installed:
            self._received_afterwards()
        # A forked child, for instance a reader's worker, also has this handler but takes no
        # checkpoint: it must end at once.
        elif self.requested or os.getpid() != self._process:
            self.redeliver()
        else:
            self.requested = True

    def _received_afterwards(self) -> None:
        """Pass on a signal that arrives after training is over.

        Somebody has put this handler back, or calls it from another handler. Two Checkpointers do
        this if the one that was started first is closed first.
        """
        if handler_of(signal.SIGTERM) != self._received:
            return  # called by another handler, which handles the signal
        set_handler(signal.SIGTERM, self._handler_before())
        self._previous = None  # only once: the earlier handler may lead back to this one
        os.kill(os.getpid(), signal.SIGTERM)

    def _handler_before(self) -> Any:
        # None: the earlier handler was not installed from Python, so Python cannot put it back.
        return signal.SIG_DFL if self._previous is None else self._previous
