"""A trainer of the demo that is several processes under torchrun, of which one is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from recpoint.dashboards.demo_processes import Trainer, last_progress

__all__ = ["RanksTrainer"]

#: Everything on this host's loopback, at whatever port is free; a rank that dies is noticed soon.
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

    Arguments as for `Trainer`. After `kill` nothing of it is left: torchrun ends the ranks that
    are not killed, and then itself.
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
        others = [f"{first.stem}.rank{rank}{first.suffix}" for rank in range(1, ranks)]
        self._files = [first, *(directory / other for other in others)]
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
        """Batches done, as the rank says that is furthest; 0 before the first."""
        return max(int(last_progress(file).get("step", 0)) for file in self._files)

    def stop(self) -> None:
        """SIGSTOP to each rank."""
        self._signal(signal.SIGSTOP, self._files)

    def kill(self) -> None:
        """SIGKILL to the last rank; all have ended when this returns."""
        self._signal(signal.SIGKILL, self._files[-1:])
        self._signal(signal.SIGCONT, self._files[:-1])
        self._process.wait()

    def terminate(self) -> None:
        """SIGKILL to all ranks, and SIGTERM to torchrun; all have ended when this returns."""
        self._signal(signal.SIGKILL, self._files)
        self._process.terminate()  # torchrun ends ranks that have not said who they are yet
        self._process.wait()

    def _signal(self, number: signal.Signals, files: Sequence[Path]) -> None:
        """To the ranks that write these files, once they have begun to."""
        for file in files:
            pid = last_progress(file).get("pid")
            # While torchrun runs, a rank of its own that has ended is not forgotten unnoticed:
            # torchrun ends then, too.
            if pid is not None and self.running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), number)
