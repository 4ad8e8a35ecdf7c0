"""What a sweep knows of staged jobs, which only the trainer's own host can know (format §6.5)."""

from __future__ import annotations

import socket
from pathlib import Path

from recpoint.catalog.runs.run import Run
from recpoint.catalog.staging import staged
from recpoint.catalog.staging.agent_lock import at_work
from recpoint.errors import FormatError

__all__ = ["knows_what_is_staged"]


def knows_what_is_staged(run: Run, run_dir: Path) -> bool:
    """Whether `run_dir` is where the newest trainer of a run stages its checkpoints.

    That trainer was started on this host, and the directory is in use: its trainer or an agent is
    running, or jobs are staged. A directory that an earlier trainer has left behind is no sign, nor
    is a sweep or drain: anybody may begin one anywhere.

    Args:
        run: the run.
        run_dir: its directory in a staging area of this host, whether it is there or not.

    Raises:
        StoreError: the store cannot be read.
    """
    other = at_work(run_dir.parent)
    in_use = run_dir.is_dir() and (
        staged.trainer_is_running(run_dir)
        or (other is not None and not other.ends_by_itself)
        or bool(staged.staged_jobs(run_dir))
    )
    numbers = run.generation_numbers() if in_use else []
    named = max((name.generation for name in run.manifest_names()), default=0) if numbers else 0
    if not numbers or numbers[-1] < named:
        return False  # nobody can tell whose a generation is whose record is lost
    try:
        return run.generation(numbers[-1]).host == socket.gethostname()[:255]
    except FormatError:
        return False  # damaged: nobody can tell whose it is
