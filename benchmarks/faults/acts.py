"""Does one thing with a system in a process of its own, which may crash, hang or be killed."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.io_faults import IoFault, arm, done

__all__ = ["LIMIT_SECONDS", "Act", "Ended", "begin", "perform"]

#: An act that takes longer has hung.
LIMIT_SECONDS = 90.0

#: A signal, and not an exit code, ends a process whose act raised nothing and returned nothing.
_RAISED = 3


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How an act ended.

    Attributes:
        value: what it returned; None unless `ok`.
        ok: whether it returned.
        error_type: class name of the exception that it raised; empty if none.
        error: text of that exception and of its causes.
        signal: the signal that ended the process; 0 if none.
        hung: whether it was ended because it took too long.
        operations: how many file operations it did, if they were counted.
        output: the last lines that it printed or logged.
    """

    value: Any = None
    ok: bool = False
    error_type: str = ""
    error: str = ""
    signal: int = 0
    hung: bool = False
    operations: int = 0
    output: str = ""

    def __str__(self) -> str:
        if self.ok:
            return "returned"
        if self.hung:
            return f"no answer in {LIMIT_SECONDS:.0f} s"
        if self.signal:
            return f"ended by {signal.Signals(self.signal).name}"
        return f"{self.error_type}: {self.error}"


class Act:
    """A function that runs in a forked process, the first of a process group of its own.

    Args:
        function: what is done; its result must be picklable.
        folder: for files of this act; it exists.
        fault: what strikes the process.
        clock_offset_seconds: how far its wall clock is off.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        folder: Path,
        *,
        fault: IoFault | None = None,
        clock_offset_seconds: int = 0,
    ) -> None:
        self._result = folder / f"act-{time.monotonic_ns()}.pickle"
        self._log = self._result.with_suffix(".log")
        sys.stdout.flush()
        self._began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(function, fault, clock_offset_seconds)

    def _run(self, function: Callable[[], Any], fault: IoFault | None, offset: int) -> None:
        """Do the act and end this process."""
        code = 1
        try:
            os.setsid()
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for number in (1, 2):
                os.dup2(log, number)
            arm(fault, clock_offset_seconds=offset)
            result: dict[str, Any] = {}
            try:
                result = {"value": function(), "ok": True}
                code = 0
            except BaseException as error:
                traceback.print_exc()
                result = {"error_type": type(error).__name__, "error": _text(error)}
                code = _RAISED
            result["operations"] = done()
            arm(None)
            beside = self._result.with_suffix(".new")
            beside.write_bytes(pickle.dumps(result))
            beside.rename(self._result)
        finally:
            # Without the interpreter's end: threads of a system may wait there for ever.
            os._exit(code)

    def stopped(self) -> bool:
        """Wait until the process is stopped or has ended; return whether it is stopped."""
        deadline = self._began + LIMIT_SECONDS
        while time.monotonic() < deadline:
            status = os.waitid(
                os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
            )
            if status is not None:
                return status.si_code == os.CLD_STOPPED
            time.sleep(0.005)
        return False

    def go_on(self) -> None:
        """Let a stopped process go on."""
        os.killpg(self.pid, signal.SIGCONT)

    def ended(self) -> Ended:
        """Wait for the end, and end all that the process has started."""
        deadline = self._began + LIMIT_SECONDS
        status, hung = 0, False
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                hung = True
                self._kill_group()
                _, status = os.waitpid(self.pid, 0)
                break
            time.sleep(0.003)
        self._kill_group()
        output = self._log.read_text(errors="replace")[-4000:] if self._log.exists() else ""
        if hung:
            return Ended(hung=True, output=output)
        if not self._result.exists():
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            error = "" if number else f"the process ended with code {os.WEXITSTATUS(status)}"
            return Ended(signal=number, error=error, output=output)
        return Ended(**pickle.loads(self._result.read_bytes()), output=output)

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _text(error: BaseException) -> str:
    """Return the text of an exception, of its notes and of those that it was raised from."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 8:
        texts += [str(cause), *getattr(cause, "__notes__", ())]
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return " <- ".join(texts)[:4000]


def begin(function: Callable[[], Any], folder: Path, **how: Any) -> Act:
    """Begin an act; see `Act`."""
    return Act(function, folder, **how)


def perform(function: Callable[[], Any], folder: Path, **how: Any) -> Ended:
    """Do an act to its end; see `Act`."""
    return Act(function, folder, **how).ended()
