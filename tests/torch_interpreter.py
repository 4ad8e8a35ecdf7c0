"""Runs programs in an interpreter that has only imported torch, which saves that second.

A process of `tests.forked` has all of recpoint imported and exits at once. A program here imports
its modules itself, from the path that it is given, and ends like any interpreter: exit handlers
run, and a process that would abort aborts. Each program is forked from one interpreter that has
imported torch and has no second thread. Settings that Python reads from the environment before its
first line come from that interpreter. At its end, a program does not search torch for garbage,
which would take longer than most programs.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.polling import PATIENCE_SECONDS

__all__ = ["TorchInterpreter", "run_program"]

# A request is a line, and so is its answer: the process id of a started program, or the exit code
# of the program that was asked for, null while it has not ended. In the forked process, the program
# runs at the end of this text.
_FORKS = """
import gc, json, os, sys
import torch
gc.freeze()
for line in iter(sys.stdin.readline, ""):
    asked = json.loads(line)
    if isinstance(asked, int):
        pid, status = os.waitpid(asked, os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        continue
    pid = os.fork()
    if not pid:
        break
    print(pid, flush=True)
else:
    sys.exit()
for path, number in zip(asked["files"], range(3)):
    os.dup2(os.open(path, os.O_RDWR), number)
os.environ.clear()
os.environ.update(asked["environment"])
os.chdir(asked["directory"])
sys.argv[1:] = asked["arguments"]
sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
if "OMP_NUM_THREADS" in os.environ:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
program = compile(asked["program"], "<string>", "exec")
del asked, line, number, path, pid
exec(program)
"""


class TorchInterpreter:
    """A process that runs the text of a program, with an interface like Popen's.

    Args:
        arguments: `sys.argv` after its first element.
        environment: the whole environment; None: the environment of this process.
        directory: the working directory, and the first on the import path.
    """

    def __init__(
        self,
        program: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self.returncode: int | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._output_files = [Path(self._folder.name) / name for name in ("out", "err")]
        for path in self._output_files:
            path.touch()
        request = {
            "program": program,
            "arguments": arguments,
            "environment": dict(os.environ if environment is None else environment),
            "directory": str(Path.cwd() if directory is None else directory),
            "files": [os.devnull, *map(str, self._output_files)],
        }
        self.pid: int = _answer(request)

    def poll(self) -> int | None:
        """Return the exit code, less than 0 if a signal ended it; None: it has not ended."""
        if self.returncode is None:
            self.returncode = _answer(self.pid)
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL to the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float = PATIENCE_SECONDS) -> tuple[str, str]:
        """Wait for the end; return what was written to standard output and standard error.

        Raises:
            subprocess.TimeoutExpired: the process did not end in so many seconds, and was killed.
        """
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                self._folder.cleanup()
                raise subprocess.TimeoutExpired("a program after torch", timeout)
            time.sleep(0.005)
        out, err = (path.read_text() for path in self._output_files)
        self._folder.cleanup()
        return out, err


def run_program(
    program: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    timeout: float = PATIENCE_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run the text of a program until it ends; return its exit code and output.

    Raises:
        subprocess.TimeoutExpired: the program does not end.
    """
    process = TorchInterpreter(program, *arguments, environment=environment, directory=directory)
    out, err = process.communicate(timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess([program, *arguments], process.returncode, out, err)


@functools.cache
def _forks() -> subprocess.Popen[str]:
    """Return the interpreter from which programs are forked; it ends with this process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [sys.executable, "-c", _FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    atexit.register(process.communicate)
    return process


def _answer(asked: object) -> Any:
    forks = _forks()
    assert forks.stdin is not None and forks.stdout is not None
    print(json.dumps(asked), file=forks.stdin, flush=True)
    return json.loads(forks.stdout.readline())
