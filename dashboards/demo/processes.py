"""Starts, watches and ends the processes of a demo: trainers, ranks under torchrun, Prefect."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from recpoint.errors import RecpointError
from recpoint.flows import prefect_server
from recpoint.format.naming import ManifestName
from recpoint.tasks.job_name import run_tag

__all__ = [
    "Child",
    "ChildFailed",
    "DemoProgress",
    "PrefectUI",
    "RanksTrainer",
    "Trainer",
    "ended",
    "persisted_by_prefect",
    "wait_for_prefect",
]


_PROGRESS_LINE_BYTES = 1 << 10
_LAST_LINES_BYTES = 1 << 20
_TERM_SECONDS = 20.0


class ChildFailed(RecpointError):
    """A process of the demo ended with an error, or did not do its work in time."""


class Child:
    """A child process that runs this Python.

    Args:
        name: for messages.
        arguments: of the Python interpreter.
        log: file to which its stdout and stderr are appended.
        environment: variables added to the environment of this process.
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
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Send SIGSTOP: the process keeps its state and does nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT: the process goes on after `stop`."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL; the process has ended when this returns."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM, and SIGKILL if that fails; the process has ended when this returns."""
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(_TERM_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def check(self) -> None:
        """Raise if the process has ended with an error.

        Raises:
            ChildFailed: with the last lines that the process printed.
        """
        code = self._process.poll()
        if code:
            raise ChildFailed(
                self.name,
                found=f"exit code {code}; its last lines:\n{self.last_lines()}",
                expected="a process that runs, or ends with exit code 0",
                next_step=f"see {self.log}",
            )

    def output(self) -> str:
        """Return the last mebibyte that the process printed."""
        return _tail(self.log, _LAST_LINES_BYTES).decode("utf-8", errors="replace")

    def last_lines(self) -> str:
        """Return the last twelve lines of its log."""
        return "\n".join(self.output().splitlines()[-12:])


class Trainer(Child):
    """One life of the example's training script.

    Args:
        name: for messages and file names.
        script: path of the script.
        arguments: of the script, besides --steps and --progress-file.
        directory: for its log and its progress.
        steps: batches to train.
        launcher: Python arguments that go before the script, for a launcher that starts it.
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
        script_arguments = [
            str(script),
            f"--steps={steps}",
            f"--progress-file={self._progress}",
            *arguments,
        ]
        super().__init__(
            name,
            [*launcher, *script_arguments],
            log=directory / f"{name}.log",
            # One thread: two trainers, an agent and a server share the machine, and the number of
            # threads could change the bits of a sum.
            environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )

    @property
    def step(self) -> int:
        """Batches trained, as the trainer last reported; 0 before the first report."""
        return int(last_progress(self._progress).get("step", 0))

    @property
    def servers(self) -> list[int]:
        """Process ids of its embedding servers, as it last reported."""
        return list(last_progress(self._progress).get("servers", ()))

    def result(self) -> dict[str, Any]:
        """Return the JSON object that the trainer printed last.

        Raises:
            ChildFailed: the trainer ended with an error, or printed no JSON object.
        """
        self.check()
        for line in reversed(self.last_lines().splitlines()):
            if line.startswith("{"):
                parsed: dict[str, Any] = json.loads(line)
                return parsed
        raise ChildFailed(
            self.name,
            found=f"no result in its last lines:\n{self.last_lines()}",
            expected="a JSON object on the last line",
            next_step=f"see {self.log}",
        )


@contextmanager
def ended(children: list[Child]) -> Iterator[None]:
    """End every child in the list when the block ends, also by an exception.

    In the main thread, it also ends them if this process gets SIGTERM or its terminal is closed.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    handlers = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP) if main}
    try:
        yield
    finally:
        for child in reversed(children):
            if child.running:
                child.terminate()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def last_progress(path: Path) -> dict[str, Any]:
    """Return the last whole line of a JSON lines file that is being appended to; {}: none yet."""
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


class DemoProgress:
    """Shows the progress of a demo: live bars on a terminal, elsewhere one line for each event.

    Each trainer has a bar; the committed checkpoints stand beside it.
    """

    def __init__(self, console: Console, steps: int, interval: int, *, ranks: int = 1) -> None:
        self._console = console
        self._ranks = ranks
        self._interval = interval
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._steps = steps
        self._prefect = self._bars.add_task("Prefect server", total=None, note="")
        self._tasks = {
            name: self._bars.add_task(name, total=steps, start=False, note="", visible=False)
            for name in ("uninterrupted", "killed", "resumed")
        }
        self._started: set[str] = set()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def waiting_for_prefect(self) -> None:
        """Show that the demo waits for the agent to start or find a Prefect server."""
        self._bars.update(self._prefect, note="starting")
        self._print_line("starting the agent, and a local Prefect server unless there is one")

    def prefect_is_up(self, url: str) -> None:
        """Show that Prefect answers at `url`, and that the training begins."""
        self._bars.update(self._prefect, total=1, completed=1, note="up")
        self._print_line(f"Prefect is up: {url}")
        together = f" on {self._ranks} ranks under torchrun" if self._ranks > 1 else ""
        self._print_line(
            f"training twice{together}, {self._steps} batches each; one of the two is checkpointed "
            f"every {self._interval} batches, and killed on the way"
        )

    def show(self, trainers: Sequence[Trainer], committed: Sequence[ManifestName]) -> None:
        """Show how far the trainers are, and how many checkpoints are committed."""
        for trainer in trainers:
            task = self._tasks[trainer.name]
            if trainer.name not in self._started:
                self._started.add(trainer.name)
                self._bars.start_task(task)
                self._bars.update(task, visible=True)
            note = ""
            if trainer.name != "uninterrupted":
                newest = committed[0].step if committed else 0
                lag = max(0, trainer.step - newest)
                note = f"{len(committed)} checkpoints committed, lag {lag} batches"
            self._bars.update(task, completed=trainer.step, note=note)

    def server_killed(self, step: int, *, goes_on: bool) -> None:
        """Show that SIGKILL was sent to an embedding server, and that training has gone on."""
        progress = (
            "went on, with rows that were computed from those of the other servers"
            if goes_on
            else "went back to a checkpoint, and on with another server"
        )
        self._print_line(
            f"killed an embedding server with SIGKILL at step {step}; training {progress}"
        )

    def killed(self, step: int, committed: int) -> None:
        """Show that SIGKILL was sent at batch `step`, after `committed` checkpoints."""
        self._bars.update(self._tasks["killed"], completed=step, note=f"SIGKILL at step {step}")
        self._bars.stop_task(self._tasks["killed"])
        killed_process = (
            "the trainer" if self._ranks == 1 else f"rank {self._ranks - 1} of {self._ranks}"
        )
        restarted = "it" if self._ranks == 1 else "all ranks"
        self._print_line(
            f"killed {killed_process} with SIGKILL at step {step}, {committed} checkpoints "
            "committed; "
            f"starting {restarted} again, with another seed"
        )

    def _print_line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


_START_SECONDS = 300.0
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 60.0
_PAGE = 200
#: The agent logs this when it begins to run persists as flows.
_AGENT_IS_READY = "Prefect is at "


class PrefectUI(NamedTuple):
    """Where Prefect is; `own_server`: it is a local server that an agent started."""

    api_url: str
    own_server: bool

    @property
    def url(self) -> str:
        """The URL of Prefect's web page."""
        return prefect_server.ui_url(self.api_url)


def wait_for_prefect(agent: Child, progress: DemoProgress) -> PrefectUI:
    """Wait until Prefect is up and the agent uses it.

    Raises:
        ChildFailed: the agent ended, or Prefect did not come up.
    """
    progress.waiting_for_prefect()
    configured = prefect_server.configured_url()
    deadline = time.monotonic() + _START_SECONDS
    while True:
        agent.check()
        local = prefect_server.running_server()
        api_url = configured or (local.url if local else None)
        if api_url and _AGENT_IS_READY in agent.output():
            ui = PrefectUI(api_url, own_server=configured is None)
            progress.prefect_is_up(ui.url)
            return ui
        if time.monotonic() > deadline:
            raise ChildFailed(
                "the Prefect server",
                found=f"no answer within {_START_SECONDS:.0f} s",
                expected="a server that starts within half a minute",
                next_step=f"see {prefect_server.server_directory() / 'server.log'} and {agent.log}",
            )
        time.sleep(_POLL_SECONDS)


def persisted_by_prefect(ui: PrefectUI, run_url: str) -> int:
    """Count the run's steps for which Prefect's API lists a completed `persist` flow run."""
    steps: set[str] = set()
    offset = 0
    while page := _persist_runs(ui, run_url, offset):
        for flow_run in page:
            steps.update(tag for tag in flow_run["tags"] if tag.startswith("step:"))
        offset += len(page)
    return len(steps)


def _persist_runs(ui: PrefectUI, run_url: str, offset: int) -> list[dict[str, Any]]:
    question = {
        "flows": {"name": {"any_": ["persist"]}},
        "flow_runs": {
            "tags": {"all_": [run_tag(run_url)]},
            "state": {"type": {"any_": ["COMPLETED"]}},
        },
        "limit": _PAGE,
        "offset": offset,
    }
    request = urllib.request.Request(
        f"{ui.api_url.rstrip('/')}/flow_runs/filter",
        data=json.dumps(question).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
        page: list[dict[str, Any]] = json.load(answer)
    return page


#: torchrun uses this host's loopback at a free port, and soon notices that a rank has died.
_TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--nnodes=1",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=127.0.0.1:0",
    "--local-addr=127.0.0.1",
    "--max-restarts=0",
    "--monitor-interval=0.1",
)


class RanksTrainer(Trainer):
    """One life of the example's training script, as `ranks` processes under torchrun.

    Arguments as for `Trainer`. `kill` leaves no process: torchrun ends the other ranks, and then
    itself.
    """

    def __init__(
        self,
        name: str,
        script: Path,
        arguments: Sequence[str],
        *,
        directory: Path,
        steps: int,
        ranks: int,
    ) -> None:
        first = directory / f"{name}.progress.jsonl"
        further_names = [f"{first.stem}.rank{rank}{first.suffix}" for rank in range(1, ranks)]
        self._files = [first, *(directory / file_name for file_name in further_names)]
        super().__init__(
            name,
            script,
            arguments,
            directory=directory,
            steps=steps,
            # The "--" keeps torchrun from taking the script's --run for its own --run-path.
            launcher=[*_TORCHRUN, f"--nproc-per-node={ranks}", "--"],
        )

    @property
    def step(self) -> int:
        """Batches trained, as the rank that is furthest reports; 0 before the first report."""
        return max(int(last_progress(file).get("step", 0)) for file in self._files)

    def stop(self) -> None:
        """Send SIGSTOP to each rank."""
        self._signal(signal.SIGSTOP, self._files)

    def go_on(self) -> None:
        """Send SIGCONT to each rank."""
        self._signal(signal.SIGCONT, self._files)

    def kill(self) -> None:
        """Send SIGKILL to the last rank; all ranks have ended when this returns."""
        self._signal(signal.SIGKILL, self._files[-1:])
        self._signal(signal.SIGCONT, self._files[:-1])
        self._process.wait()

    def terminate(self) -> None:
        """Send SIGKILL to all ranks and SIGTERM to torchrun; all have ended on return."""
        self._signal(signal.SIGKILL, self._files)
        self._process.terminate()  # torchrun ends ranks that have not reported their pid yet
        self._process.wait()

    def _signal(self, number: signal.Signals, files: Sequence[Path]) -> None:
        """Send a signal to the ranks that write these files, if they have reported a pid."""
        for file in files:
            pid = last_progress(file).get("pid")
            # While torchrun runs, this pid cannot belong to another process: torchrun itself ends
            # soon after a rank has ended.
            if pid is not None and self.running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), number)
