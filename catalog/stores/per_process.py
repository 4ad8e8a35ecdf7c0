"""One object for each process: for clients whose threads and sockets do not survive a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["PerProcess"]

_Made = TypeVar("_Made")

# A child may have been forked while another thread held the lock; it gets a new one.
_making = threading.Lock()
# Objects that came with a fork. Kept for ever: to collect one would close its sockets, which are
# the parent's too.
_inherited: list[object] = []


def _after_fork() -> None:
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class PerProcess(Generic[_Made]):
    """Calls `make` at the first use in each process. A pickle holds `make`, never what it made.

    Args:
        make: can be pickled; must not hold secrets.
    """

    def __init__(self, make: Callable[[], _Made]) -> None:
        self._make = make
        self._made: tuple[int, _Made] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"_make": self._make, "_made": None}

    def get(self) -> _Made:
        """This process's object."""
        made = self._made
        if made is None or made[0] != os.getpid():
            with _making:
                made = self._made
                if made is None or made[0] != os.getpid():
                    if made is not None:
                        _inherited.append(made[1])
                    made = self._made = (os.getpid(), self._make())
        return made[1]
