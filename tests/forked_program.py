"""Runs programs in forked processes as `python -m` does, without the seconds for imports."""

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

__all__ = [
    "PARENT",
    "ForkedProgram",
    "be_code",
    "be_module",
    "be_script",
    "run_module",
    "run_script",
]

#: An argument that is replaced by the id of the process from which a program is forked.
PARENT = "the parent's pid"


class ForkedProgram:
    """A process that runs `program` in its own environment, with an interface like Popen's.

    Args:
        program: a function of a module; it ends with `sys.exit`, or returns None.
        arguments: of the program; they are pickled.
        environment: the whole environment of the process and its children.
        output: files to which standard output and standard error are appended.
        directory: the working directory.
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
            path.open("ab").close()  # so that a test can read the file at once
        working_directory = Path.cwd() if directory is None else directory
        process_arguments = (
            program,
            tuple(arguments),
            dict(environment),
            output,
            working_directory,
        )
        self._process = ForkedProcess(target=_begin, args=process_arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Return the exit code; None: the process has not ended."""
        return self._process.exitcode

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = PATIENCE_SECONDS) -> int:
        """Wait for the end; return the exit code, less than 0 if a signal ended the process.

        Raises:
            TimeoutError: the process has not ended in so many seconds.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError(f"process {self.pid} did not end in {timeout:.0f} s")
        return code


def run_module(
    arguments: Sequence[str], *, environment: Mapping[str, str], directory: Path
) -> subprocess.CompletedProcess[str]:
    """Run `python -m` with these arguments in a forked process; return exit code and output.

    Raises:
        TimeoutError: the process does not end.
    """
    return _run(be_module, arguments, environment, directory)


def run_script(
    *arguments: str, environment: Mapping[str, str] | None = None, directory: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script with its arguments in a forked process; return exit code and output.

    Args:
        arguments: the path of the script, and its arguments.
        environment: the whole environment; None: the environment of this process.
        directory: the working directory; None: that of this process.

    Raises:
        TimeoutError: the process does not end.
    """
    return _run(be_script, arguments, os.environ if environment is None else environment, directory)


def _run(
    program: Callable[..., None],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: Path | None,
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder) / "out", Path(folder) / "err"
        process = ForkedProgram(
            program, arguments, environment=environment, output=outputs, directory=directory
        )
        try:
            code = process.wait()
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, code, *(path.read_text() for path in outputs))


def be_module(module: str, *arguments: str) -> None:
    """Act as `python -m` with these arguments."""
    sys.argv = [
        module,
        *(str(os.getppid()) if argument == PARENT else argument for argument in arguments),
    ]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def be_script(path: str, *arguments: str) -> None:
    """Act as `python` with the path of a script and these arguments."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def be_code(text: str, *arguments: str) -> None:
    """Act as `python -c` with these arguments."""
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
    # Modules that the server imported have read its environment, so they are set again here.
    fsspec.config.set_conf_env(fsspec.config.conf)
    refresh_global_settings_context()
    # The server has imported Prefect, which installed a handler there.
    logging.getLogger().handlers.clear()
    # A forked process does not have the OpenMP threads of the server.
    torch.set_num_threads(1)
    program(*arguments)
