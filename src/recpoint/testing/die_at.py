"""Runs a program and kills it, with SIGKILL, at its n-th durable step.

    python -m recpoint.testing.die_at N -m package.module arguments…
    python -m recpoint.testing.die_at N script.py arguments…
    python -m recpoint.testing.die_at --count FILE -m package.module arguments…

`catalog.store.durable.step` announces the steps: every write, fsync, rename, link, unlink, upload
and deletion, just before it is done. If N is larger than the number of steps, the program ends by
itself. `--count` kills nothing and appends a line `number<TAB>pid<TAB>name` to FILE at each step,
so that a test can go through all steps. With `--children` before the program, the Python processes
that it starts count too, and each dies at its own n-th step.

A program that is started in another way can call `install` or `install_from_environment`.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from collections.abc import Container, Sequence
from pathlib import Path

from recpoint.catalog.store import durable

__all__ = ["COUNT_VARIABLE", "DIE_VARIABLE", "install", "install_from_environment", "main"]

DIE_VARIABLE = "RECPOINT_DIE_AT"
COUNT_VARIABLE = "RECPOINT_COUNT_STEPS"

_USAGE = "usage: die_at (N | --count FILE) [--children] (-m MODULE | SCRIPT) [ARGUMENT …]"


def install(
    *,
    die_at: int | None = None,
    count_into: str | os.PathLike[str] | None = None,
    besides: Container[str] = (),
) -> None:
    """Observe the steps of this process: kill it at a step, write the steps to a file, or both.

    Args:
        die_at: number of the step at which the process is killed, from 1 on; None: never.
        count_into: file to which each step appends a line; None: no file.
        besides: kinds of steps that are not counted, given as the first words of their names.
    """
    lock = threading.Lock()
    steps = 0

    def observe(name: str) -> None:
        nonlocal steps
        if name.partition(" ")[0] in besides:
            return
        with lock:  # a thread that dies keeps the lock, so that no other thread takes a step
            steps += 1
            if count_into is not None:
                with open(count_into, "a", encoding="utf-8") as file:
                    file.write(f"{steps}\t{os.getpid()}\t{name}\n")
            if steps == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    durable.set_observer(observe)


def install_from_environment() -> None:
    """Call `install` with RECPOINT_DIE_AT and RECPOINT_COUNT_STEPS, if one of them is set."""
    die_at, count_into = os.environ.get(DIE_VARIABLE), os.environ.get(COUNT_VARIABLE)
    if die_at or count_into:
        install(die_at=int(die_at) if die_at else None, count_into=count_into or None)


def main(arguments: Sequence[str]) -> None:
    """Run the program in `arguments`, as the module's docstring describes."""
    words = list(arguments)
    die_at: int | None = None
    count_into: str | None = None
    if words[:1] == ["--count"] and len(words) > 1:
        count_into = str(Path(words[1]).absolute())
        del words[:2]
    elif words and words[0].isdecimal() and int(words[0]) > 0:
        die_at = int(words.pop(0))
    else:
        raise SystemExit(_USAGE)
    with_children = words[:1] == ["--children"]
    if with_children:
        words.pop(0)
    if words[:1] == ["--"]:
        words.pop(0)
    is_module = words[:1] == ["-m"] and len(words) > 1
    # Arguments are checked before `install`: a caller that gets the usage must not be killed later.
    if not is_module and (not words or words[0].startswith("-")):
        raise SystemExit(_USAGE)
    if with_children:
        _reach_children(die_at, count_into)
    install(die_at=die_at, count_into=count_into)
    if is_module:
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).absolute().parent))
        runpy.run_path(words[0], run_name="__main__")


def _reach_children(die_at: int | None, count_into: str | None) -> None:
    """Make every Python process that is started from now on call `install_from_environment`.

    Python imports `sitecustomize` from its path when it starts; `in_children` has such a module.
    """
    directory = str(Path(__file__).with_name("in_children"))
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = directory + (os.pathsep + path if path else "")
    if die_at is not None:
        os.environ[DIE_VARIABLE] = str(die_at)
    if count_into is not None:
        os.environ[COUNT_VARIABLE] = count_into


if __name__ == "__main__":
    main(sys.argv[1:])
