"""The processes a demo runs: started, watched through files, and ended by their own ids."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from recpoint.errors import RecpointError

__all__ = ["Child", "ChildFailed", "Trainer", "ended", "last_progress"]

_PROGRESS_LINE_BYTES = 1 << 10
_LAST_LINES_BYTES = 1 << 20
_TERM_SECONDS = 20.0


class ChildFailed(RecpointError):
    """A process of the demo ended, and not well."""


class Child:
    """One process; what it prints goes to `log`.

    Args:
        name: for messages.
        arguments: of this Python.
        log: file for stdout and stderr.
        environment: added to this process's.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
            )

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def stop(self) -> None:
        """SIGSTOP: it keeps everything it has and does nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL; it has ended when this returns."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """SIGTERM, and SIGKILL when that does not help; it has ended when this returns."""
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(_TERM_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def check(self) -> None:
        """Nothing, unless it has ended with an error.

        Raises:
            ChildFailed: it has; with the last lines it printed.
        """
        code = self._process.poll()
        if code:
            raise ChildFailed(
                self.name,
                found=f"exit code {code}; its last lines:\n{self.last_lines()}",
                expected="a process that runs, or ends well",
                next_step=f"see {self.log}",
            )

    def output(self) -> str:
        """What it printed, the last mebibyte of it."""
        return _tail(self.log, _LAST_LINES_BYTES).decode("utf-8", errors="replace")

    def last_lines(self, count: int = 12) -> str:
        """The end of its log."""
        return "\n".join(self.output().splitlines()[-count:])


class Trainer(Child):
    """One life of the example's training script.

    Args:
        name: for messages, and of its files.
        script: the script.
        arguments: of the script, beside those that follow from the others.
        directory: for its files.
        steps: batches to train.
        launcher: what this Python runs in place of the script, which then starts the script.
    """

    def __init__(
        self,
        name: str,
        script: Path,
        arguments: Sequence[str],
        *,
        directory: Path,
        steps: int,
        launcher: Sequence[str] = (),
    ) -> None:
        self._progress = directory / f"{name}.progress.jsonl"
        self.steps = steps
        own = [str(script), f"--steps={steps}", f"--progress-file={self._progress}", *arguments]
        super().__init__(
            name,
            [*launcher, *own],
            log=directory / f"{name}.log",
            # One thread: two trainers, an agent and a server share the machine, and the bits of
            # a sum must not depend on how many threads there happened to be.
            environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )

    @property
    def step(self) -> int:
        """Batches done, as it said last; 0 before the first."""
        return int(last_progress(self._progress).get("step", 0))

    def result(self) -> dict[str, Any]:
        """The object it printed last.

        Raises:
            ChildFailed: it has not ended well, or printed no such line.
        """
        self.check()
        for line in reversed(self.last_lines().splitlines()):
            if line.startswith("{"):
                parsed: dict[str, Any] = json.loads(line)
                return parsed
        raise ChildFailed(
            self.name,
            found=f"no result in its last lines:\n{self.last_lines()}",
            expected="a JSON object in the last one",
            next_step=f"see {self.log}",
        )


@contextmanager
def ended(children: list[Child]) -> Iterator[None]:
    """Whatever happens in the block, every child in the list has ended after it.

    In the main thread also when this process is told to end, or its terminal is closed.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    before = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP) if main}
    try:
        yield
    finally:
        for child in reversed(children):
            if child.running:
                child.terminate()
        for number, handler in before.items():
            signal.signal(number, handler)


def last_progress(path: Path) -> dict[str, Any]:
    """The last whole line of a file that is being appended to; {} before there is one."""
    for line in reversed(_tail(path, 4 * _PROGRESS_LINE_BYTES).split(b"\n")[:-1]):
        try:
            parsed: dict[str, Any] = json.loads(line)
            return parsed
        except ValueError:
            continue
    return {}


def _tail(path: Path, count_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - count_bytes))
            return file.read()
    except FileNotFoundError:
        return b""
