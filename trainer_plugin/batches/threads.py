"""Tells the thread that takes batches from the thread that trains them."""

from __future__ import annotations

import logging
import threading

from recpoint.errors import SettingsError
from recpoint.trainer_plugin.batches.signs import TrainingSigns

__all__ = ["BatchThreads"]

_log = logging.getLogger("recpoint")


class BatchThreads:
    """Knows which thread trains, and which one fetched the last batch.

    Args:
        signs: say in which thread optimizers step.
    """

    def __init__(self, signs: TrainingSigns) -> None:
        self._signs = signs
        self._fetching_thread: int | None = None
        self._has_warned = False

    def forget(self) -> None:
        """Forget which thread fetched the last batch."""
        self._fetching_thread = None

    @property
    def training(self) -> int:
        """The thread that steps the optimizers; before the first step, this one."""
        return threading.get_ident() if self._signs.thread is None else self._signs.thread

    def note_fetch(self) -> bool:
        """Note which thread fetches a batch, and return whether another one fetched the last."""
        is_other = threading.get_ident() != self._fetching_thread
        self._fetching_thread = threading.get_ident()
        return is_other

    def warn(self) -> None:
        """Warn, once, if this is another thread than the training thread."""
        if threading.get_ident() == self.training or self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "another thread than the training thread reads batches: if both draw from the same "
            "random generators, they draw in any order, and a restart trains the same batches but "
            "may differ in bits. Next: have the reader or the model draw from a generator of its "
            "own, or read in the training thread"
        )

    def refuse_other(self, subject: str, remedy: str) -> None:
        """Refuse a thread that takes batches which another one trains.

        Raises:
            SettingsError: this is another thread than the training thread.
        """
        if threading.get_ident() == self.training:
            return
        error = SettingsError(
            subject,
            found="a thread that takes batches for the training thread",
            expected="batches taken by the thread that steps the optimizers, or a loop that "
            "says how many batches are taken ahead",
            next_step=f"{remedy}, and call checkpoints.step() in the training thread after each "
            "step",
        )
        _log.error("%s", error)  # that thread may end with it, while training waits for batches
        raise error
