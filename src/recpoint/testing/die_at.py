"""Runs a program and kills it, with SIGKILL, at its n-th durable step.

    python -m recpoint.testing.die_at N -m package.module arguments…
    python -m recpoint.testing.die_at N script.py arguments…
    python -m recpoint.testing.die_at --count FILE -m package.module arguments…

A step is what `catalog.store.durable.step` announces: every write, fsync, rename, link, unlink,
upload and deletion, right before it is done. With N larger than the number of steps the program
ends by itself. `--count` kills nothing and appends a line `number<TAB>pid<TAB>name` to FILE at each
step, so that a test can go through all of them. With `--children` before the program, the Python
processes that it starts count and die too, each by itself at its own n-th step.

A program that starts itself in another way can call `install` or `install_from_environment`.
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
    """Observe the steps of this process: die at step `die_at`, count them into a file, or both.

    Args:
        die_at: the step at which it is killed, from 1 on.
        count_into: file for a line at each step.
        besides: kinds of steps that are not counted: the first words of their names.
    """
    lock = threading.Lock()
    taken = 0

    def observe(name: str) -> None:
        nonlocal taken
        if name.partition(" ")[0] in besides:
            return
        with lock:  # never released by the thread that dies, so no other takes a step meanwhile
            taken += 1
            if count_into is not None:
                with open(count_into, "a", encoding="utf-8") as file:
                    file.write(f"{taken}\t{os.getpid()}\t{name}\n")
            if taken == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    durable.set_observer(observe)


def install_from_environment() -> None:
    """Install what RECPOINT_DIE_AT and RECPOINT_COUNT_STEPS say; do nothing without either."""
    die_at, count_into = os.environ.get(DIE_VARIABLE), os.environ.get(COUNT_VARIABLE)
    if die_at or count_into:
        install(die_at=int(die_at) if die_at else None, count_into=count_into or None)


def main(arguments: Sequence[str]) -> None:
    """Run what `arguments` say, as this module's docstring describes."""
    rest = list(arguments)
    die_at: int | None = None
    count_into: str | None = None
    if rest[:1] == ["--count"] and len(rest) > 1:
        count_into = str(Path(rest[1]).absolute())
        del rest[:2]
    elif rest and rest[0].isdecimal() and int(rest[0]) > 0:
        die_at = int(rest.pop(0))
    else:
        raise SystemExit(_USAGE)
    with_children = rest[:1] == ["--children"]
    if with_children:
        rest.pop(0)
    if rest[:1] == ["--"]:
        rest.pop(0)
    is_module = rest[:1] == ["-m"] and len(rest) > 1
    # Checked before anything is installed: a caller that catches the error must not die later.
    if not is_module and (not rest or rest[0].startswith("-")):
        raise SystemExit(_USAGE)
    if with_children:
        _reach_children(die_at, count_into)
    install(die_at=die_at, count_into=count_into)
    if is_module:
        sys.argv = rest[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        sys.path.insert(0, str(Path(rest[0]).absolute().parent))
        runpy.run_path(rest[0], run_name="__main__")


def _reach_children(die_at: int | None, count_into: str | None) -> None:
    """Have every Python process started from here on call `install_from_environment`.

    Python imports `sitecustomize` from its path when it starts; there is one beside this module.
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
