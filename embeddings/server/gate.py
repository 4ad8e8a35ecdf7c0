"""Lets calls to an embedding server in: side by side, or one alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

__all__ = ["Gate"]


class Gate:
    """Lets calls in side by side, or one alone; one that waits to be alone goes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._waiting = 0
        self._is_alone = False

    def shared(self, require: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """Return a context that any number of calls may be in at the same time.

        Args:
            require: called once inside; if it raises, the call is let out again.
        """
        return _Shared(self, require)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody is inside, and let nobody in until the end of the block."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._is_alone and not self._inside)
            self._waiting -= 1
            self._is_alone = True
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()

    def _enter(self) -> None:
        with self._changed:
            while self._is_alone or self._waiting:
                self._changed.wait()
            self._inside += 1

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            if self._waiting:  # nobody else waits for those who are side by side
                self._changed.notify_all()


class _Shared(AbstractContextManager[None]):
    """Is inside a gate beside others. Each call is so several times; a generator costs more."""

    def __init__(self, gate: Gate, require: Callable[[], None] | None) -> None:
        self._gate = gate
        self._require = require

    def __enter__(self) -> None:
        self._gate._enter()
        if self._require is not None:
            try:
                self._require()
            except BaseException:
                self._gate._leave()
                raise

    def __exit__(self, *error: object) -> None:
        self._gate._leave()
