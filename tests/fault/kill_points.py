"""Goes through the steps at which a process can be killed, several at once.

`make test` kills at a fixed sample of the steps: the first, the last, and one of each kind. Steps
between which nothing changes that another process could see count as one kind for each act.
`make nightly` kills at all of them. Most of a killed life is waiting: for disks, a server, another
process. So several lives go on side by side, each with a run of its own.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.forked import ForkedProcess

__all__ = [
    "FAULTS_EVERY",
    "LONGEST_LIFE_SECONDS",
    "NEVER",
    "UNSEEN_ACTS",
    "Death",
    "act_of",
    "at_every_step",
    "at_steps",
    "ended",
    "kind_of",
    "sampled",
]

LONGEST_LIFE_SECONDS = 240.0
#: For `make nightly`: of how many steps one is taken; 0: this is `make test`.
FAULTS_EVERY = int(os.environ.get("RECPOINT_FAULTS_EVERY", "0"))
_AT_ONCE = 4
#: Acts after which no file or object has another name, or other contents under its name.
UNSEEN_ACTS = frozenset({"fsync", "mkdir", "open", "reserve", "write"})
# Far more steps than any of these lives takes: a life that never ends is a failure, not a loop.
_MOST_STEPS = 400


class Death(NamedTuple):
    """When a life ends, as arguments of the lives in `tests.fault.lives`.

    Attributes:
        die: number of the step at which it is killed; None: it is not killed.
        count_into: file to which each step appends a line (`recpoint.testing.die_at`); None: none.
    """

    die: int | None
    count_into: str | None = None


#: Nobody kills it, and nobody counts its steps.
NEVER = Death(None)


def at_steps(
    attempt: Callable[[Death], bool],
    counted: Path,
    *,
    at_once: int = _AT_ONCE,
    kind: Callable[[str], str] | None = None,
) -> int:
    """Kills a life at a sample of its steps, or at all for `make nightly`.

    For the sample, one life is counted first.

    Args:
        attempt: has a process die as it is told, and checks what is left; returns whether it was
            killed. Called from several threads at once.
        counted: a file that does not exist yet, for the steps of the life that is counted.
        at_once: from so many threads.
        kind: returns the kind of a step from its name; None: `kind_of`.

    Returns:
        The number of steps of a life.

    Raises:
        Exception: what an attempt raised.
    """
    if FAULTS_EVERY:
        return at_every_step(lambda die: attempt(Death(die)), at_once=at_once, every=FAULTS_EVERY)
    assert not attempt(Death(None, str(counted))), "a life that nobody kills was killed"
    names = [line.split("\t")[2] for line in counted.read_text().splitlines()]
    wanted = sampled([(kind or kind_of)(name) for name in names])
    with ThreadPoolExecutor(at_once) as pool:
        killed = list(pool.map(attempt, map(Death, wanted)))
    # A life whose threads or whose waits are shorter than those of the counted one has fewer steps.
    assert sum(killed) > len(wanted) // 2, f"{sum(killed)} of {len(wanted)} lives were killed"
    return len(names)


def kind_of(name: str) -> str:
    """Return the name of a step without digests, steps and numbers; of an unseen act, the act."""
    if (act := act_of(name)) in UNSEEN_ACTS:
        return act
    return re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "#", name)


def act_of(name: str) -> str:
    """Return the act of a step, whatever it is done to: such as `fsync`, `put` or `created`."""
    return name.partition(" ")[0]


def sampled(kinds: Sequence[str]) -> list[int]:
    """Return numbers of steps, from 1 on: the first, the last, and a drawn one of each kind.

    The same kinds always give the same numbers.
    """
    draw = random.Random(len(kinds))
    of_kinds: dict[str, list[int]] = {}
    for number, kind in enumerate(kinds, 1):
        of_kinds.setdefault(kind, []).append(number)
    return sorted({1, len(kinds), *map(draw.choice, of_kinds.values())})


def at_every_step(
    attempt: Callable[[int], bool], *, at_once: int = _AT_ONCE, every: int = 1
) -> int:
    """Call `attempt` with 1, 2, 3 …, until there was nothing left to kill; the number of steps.

    Args:
        attempt: has a process die at the step it is given, and looks at what is left; whether
            it was killed. Called from several threads at once.
        at_once: from so many.
        every: of how many steps one is taken.

    Raises:
        Exception: what an attempt raised.
    """
    steps = itertools.count(1, every)
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
