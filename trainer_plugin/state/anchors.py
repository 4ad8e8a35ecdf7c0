"""Keeps states of a reader from some batches ago, from which a restore reads forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final, NamedTuple

from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.state.reader import Divisible, ResumableLoader, announce

__all__ = ["Anchor", "Anchors"]

#: A state of the reader is kept once in this many batches.
_STRIDE: Final = 16


class Anchor(NamedTuple):
    """A state of the reader inside a Lookahead.

    Attributes:
        position: number of batches read before, counted from the last `load_state_dict`.
        state_or_error: the state, or the error of the reader's `state_dict`.
        generators: states of the reader's generators at the position.
        reads: number of batches to read before the next anchor.
    """

    position: int
    state_or_error: Any
    generators: dict[str, Any]
    reads: int

    @property
    def state(self) -> Any:
        """The state; raises the error of the reader's `state_dict`, if it is there instead."""
        if isinstance(self.state_or_error, Exception):
            raise self.state_or_error
        return self.state_or_error


class Anchors:
    """The anchors of one reader, oldest first.

    Args:
        reader: the reader inside a Lookahead.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._anchors: deque[Anchor] = deque()

    def __len__(self) -> int:
        return len(self._anchors)

    def newest(self, position: int) -> Anchor | None:
        """Return the newest anchor that is not after the position; None: there is none."""
        return next((kept for kept in reversed(self._anchors) if kept.position <= position), None)

    def leave(self, position: int) -> None:
        """Drop anchors that no position from this one on needs.

        The newest anchor before the position stays: a Lookahead that is iterated anew needs it.
        """
        while len(self._anchors) > 1 and self._anchors[1].position < position:
            self._anchors.popleft()

    def forget(self) -> None:
        """Drop all anchors."""
        self._anchors.clear()

    def take(self, position: int, *, at_once: bool) -> None:
        """Keep the reader's state at this position if it is due, or `at_once`."""
        newest = self._anchors[-1] if self._anchors else None
        is_due = newest is None or position - newest.position >= newest.reads
        if not (is_due or at_once):
            return
        state: Any
        try:
            # Copied, because the reader goes on before this is stored.
            state = deepcopy(self._reader.state_dict())
        except Exception as error:  # kept until a checkpoint needs the state
            if came_from_handler(error):
                raise
            state = error
        reads = self._reads_until_next(state)
        self._anchors.append(Anchor(position, state, rng.capture_cpu(), reads))
        announce(self._reader, reads)

    def _reads_until_next(self, state: Any) -> int:
        if isinstance(self._reader, Divisible):
            return 1  # its state must be exact, because it may be divided
        if isinstance(self._reader, ResumableLoader) and isinstance(state, Mapping):
            # The last batch of an epoch has an anchor of its own: by the position, the loader tells
            # that the epoch is over.
            try:
                reads_left = len(self._reader) - state["given"]
            except (TypeError, NotImplementedError):
                return _STRIDE
            return min(_STRIDE, reads_left) if reads_left > 0 else _STRIDE
        return _STRIDE
