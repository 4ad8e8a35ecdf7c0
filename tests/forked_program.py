"""Programs in forked processes: what `python -m` does, without the seconds of its imports."""

from __future__ import annotations

import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import fsspec.config
import torch

from tests.forked import ForkedProcess
from tests.polling import PATIENCE_SECONDS

__all__ = ["PARENT", "ForkedProgram", "be_code", "be_module", "run_module"]

#: An argument that stands for the id of the process that a program is forked from.
PARENT = "the parent's pid"


class ForkedProgram:
    """A process that runs `program` with an environment of its own; as `subprocess.Popen` has it.

    Args:
        program: a function of a module that ends with `sys.exit`, or with what it returns as None.
        arguments: for it; they travel by pickling.
        environment: all that it has, also for the processes that it starts.
        output: files for standard output and standard error, which are appended to.
        directory: where it runs.
    """

    def __init__(
        self,
        program: Callable[..., None],
        arguments: Sequence[object],
        *,
        environment: Mapping[str, str],
        output: tuple[Path, Path],
        directory: Path | None = None,
    ) -> None:
        for path in output:
            path.open("ab").close()  # there to be read at once
        where = Path.cwd() if directory is None else directory
        begun = (program, tuple(arguments), dict(environment), output, where)
        self._process = ForkedProcess(target=_begin, args=begun, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """The exit code; None while it has not ended."""
        return self._process.exitcode

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = PATIENCE_SECONDS) -> int:
        """The exit code, less than 0 where a signal ended it.

        Raises:
            TimeoutError: it has not ended in so many seconds.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError(f"process {self.pid} did not end in {timeout:.0f} s")
        return code


def run_module(
    arguments: Sequence[str], *, environment: Mapping[str, str], directory: Path
) -> subprocess.CompletedProcess[str]:
    """Do what `python -m` does with these arguments, in a forked process; what it said.

    Raises:
        TimeoutError: it does not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "out", Path(folder) / "err"
        process = ForkedProgram(
            be_module, arguments, environment=environment, output=said, directory=directory
        )
        try:
            code = process.wait()
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, code, *(path.read_text() for path in said))


def be_module(module: str, *arguments: str) -> None:
    """A program that does what `python -m` does with these."""
    sys.argv = [module, *(str(os.getppid()) if one == PARENT else one for one in arguments)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def be_code(text: str, *arguments: str) -> None:
    """A program that does what `python -c` does with these."""
    sys.argv = ["-c", *arguments]
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


def _begin(
    program: Callable[..., None],
    arguments: tuple[object, ...],
    environment: dict[str, str],
    output: tuple[Path, Path],
    directory: Path,
) -> None:
    from prefect.context import refresh_global_settings_context

    for path, number in zip(output, (1, 2), strict=True):
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    # What the server of these processes read from its own environment when it imported them.
    fsspec.config.set_conf_env(fsspec.config.conf)
    refresh_global_settings_context()
    # Prefect, which that server has imported, has one of its own there.
    logging.getLogger().handlers.clear()
    # The threads of OpenMP that the server may have had are not there in a forked process.
    torch.set_num_threads(1)
    program(*arguments)
