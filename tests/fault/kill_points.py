"""Going through every step at which a process can be killed, several at once.

Most of a killed life is waiting: for disks, a server, another process. So several go on side by
side, each with a run of its own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.forked import ForkedProcess

__all__ = ["LONGEST_LIFE_SECONDS", "at_every_step", "ended"]

LONGEST_LIFE_SECONDS = 240.0
_AT_ONCE = 4
# Far more steps than any of these lives takes: a life that never ends is a failure, not a loop.
_MOST_STEPS = 400


def at_every_step(attempt: Callable[[int], bool], *, at_once: int = _AT_ONCE) -> int:
    """Call `attempt` with 1, 2, 3 …, until there was nothing left to kill; the number of steps.

    Args:
        attempt: has a process die at the step it is given, and looks at what is left; whether
            it was killed. Called from several threads at once.
        at_once: from so many.

    Raises:
        Exception: what an attempt raised.
    """
    steps = itertools.count(1)
    finished = threading.Event()

    def one_after_another() -> int:
        try:
            while not finished.is_set():
                die = next(steps)
                assert die < _MOST_STEPS, "it does not end"
                if not attempt(die):
                    return die
        finally:
            finished.set()
        return _MOST_STEPS

    with ThreadPoolExecutor(at_once) as pool:
        ends = [pool.submit(one_after_another) for _ in range(at_once)]
    return min(end.result() for end in ends) - 1


def ended(process: ForkedProcess) -> int:
    """The exit code, once there is one."""
    process.join(LONGEST_LIFE_SECONDS)
    assert process.exitcode is not None, "it neither ended nor died"
    return process.exitcode
