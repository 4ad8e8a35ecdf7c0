"""Runs a trainer of the soak, as a process that is killed now and then.

    python -m benchmarks.soak_trainer truth FILE STEPS
    python -m benchmarks.soak_trainer train RUN_URL STAGING FILE BATCH_SECONDS

`truth` trains without checkpoints and writes the digest after each batch. `train` continues from
the run's newest checkpoint until SIGTERM, and writes a line of JSON for its restore and each batch.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from benchmarks.soak_training import INTERVAL_BATCHES, Training

__all__ = ["main"]

_stop: list[int] = []


def main(arguments: list[str]) -> None:
    """Run one trainer, from its start to its end."""
    if arguments[0] == "truth":
        _truth(Path(arguments[1]), int(arguments[2]))
    else:
        _train(arguments[1], arguments[2], Path(arguments[3]), float(arguments[4]))


def _truth(file: Path, steps: int) -> None:
    training = Training()
    with file.open("w") as lines:
        for step in range(1, steps + 1):
            training.batch()
            _tell(lines, {"step": step, "digest": training.digest()})


def _train(run_url: str, staging: str, file: Path, batch_seconds: float) -> None:
    from recpoint import Checkpointer, Options

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: _stop.append(1))
    training = Training()
    checkpoints = Checkpointer(
        training.model,
        training.optimizers,
        reader=training.reader,
        run=run_url,
        interval_batches=INTERVAL_BATCHES,
        staging=staging,
        options=Options(handle_sigterm=False),
    )
    with file.open("a") as lines:
        report = checkpoints.restore()
        step = 0 if report is None else report.restored.step
        skipped = [] if report is None else [f"{name}: {reason}" for name, reason in report.skipped]
        restored = {"restored": step, "digest": training.digest(), "skipped": skipped}
        _tell(lines, {**restored, "t": time.monotonic()})
        while not _stop:
            training.batch()
            checkpoints.step()
            stats = checkpoints.stats
            counters = {k: v for k, v in asdict(stats).items() if isinstance(v, int | str)}
            _tell(lines, {**counters, "t": time.monotonic(), "step": checkpoints.batches_done})
            time.sleep(batch_seconds)  # the time that a batch of a real model would take
        checkpoints.close()


def _tell(lines: TextIO, line: dict[str, Any]) -> None:
    lines.write(json.dumps(line) + "\n")
    lines.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
