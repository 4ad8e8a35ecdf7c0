"""Persists jobs in separate processes, which may be killed."""

from __future__ import annotations

from pathlib import Path

from recpoint.catalog.persist import plan
from recpoint.catalog.persist.persist import persist_job
from recpoint.testing.die_at import install
from tests.forked import ForkedProcess
from tests.polling import PATIENCE_SECONDS

__all__ = ["persist_in_process"]


def persist_in_process(job_file: Path, *, die_at: int | None = None) -> int | None:
    """Persist a job, in chunks of 400 bytes, in a process that dies at its `die_at`-th step.

    Args:
        job_file: of the job.
        die_at: number of the step at which the process is killed, from 1 on; None: never.

    Returns:
        The exit code; −9 for SIGKILL.
    """
    process = ForkedProcess(target=_persist, args=(job_file, die_at))
    process.start()
    process.join(PATIENCE_SECONDS)
    if process.is_alive():
        process.kill()
        raise TimeoutError(f"{job_file} was not persisted in {PATIENCE_SECONDS:.0f} s")
    return process.exitcode


def _persist(job_file: Path, die_at: int | None) -> None:
    plan.CHUNK_BYTES, plan.GROUP_BYTES = 400, 900
    install(die_at=die_at)
    persist_job(job_file)
