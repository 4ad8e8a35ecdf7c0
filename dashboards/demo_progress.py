"""How far a demo is: one bar for each trainer, and the checkpoints beside it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

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

from recpoint.dashboards.demo_processes import Trainer
from recpoint.format.naming import ManifestName

__all__ = ["DemoProgress"]


class DemoProgress:
    """A live display on a terminal; elsewhere one line an event."""

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def waiting_for_prefect(self) -> None:
        """The agent is starting its server, or has found one."""
        self._bars.update(self._prefect, note="starting")
        self._print_line("starting the agent, and a local Prefect server unless there is one")

    def prefect_is_up(self, url: str) -> None:
        """It answers."""
        self._bars.update(self._prefect, total=1, completed=1, note="up")
        self._print_line(f"Prefect is up: {url}")
        together = f" on {self._ranks} ranks under torchrun" if self._ranks > 1 else ""
        self._print_line(
            f"training twice{together}, {self._steps} batches each; one of the two is checkpointed "
            f"every {self._interval} batches, and killed on the way"
        )

    def show(self, trainers: Sequence[Trainer], committed: Sequence[ManifestName]) -> None:
        """Where the trainers are, and what is committed."""
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

    def killed(self, step: int, committed: int) -> None:
        """SIGKILL was sent."""
        self._bars.update(self._tasks["killed"], completed=step, note=f"SIGKILL at step {step}")
        self._bars.stop_task(self._tasks["killed"])
        who = "the trainer" if self._ranks == 1 else f"rank {self._ranks - 1} of {self._ranks}"
        again = "it" if self._ranks == 1 else "all ranks"
        self._print_line(
            f"killed {who} with SIGKILL at step {step}, {committed} checkpoints committed; "
            f"starting {again} again, with another seed"
        )

    def _print_line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
