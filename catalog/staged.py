"""Paths of the staging area, which trainer and agent share (format §7)."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path

from recpoint.format.naming import MAX_RANK, job_stem

__all__ = [
    "agent_lock_path",
    "default_staging_root",
    "job_path",
    "jobs_directory",
    "outcome_path",
    "outcomes_directory",
    "run_directory",
    "slot_path",
    "slots_directory",
    "spool_directory",
    "status_path",
    "trainer_lock_path",
]

MAX_SLOT = 9_999


def default_staging_root() -> Path:
    """`RECPOINT_STAGING`, else in memory (`/dev/shm`), else in the temporary directory."""
    chosen = os.environ.get("RECPOINT_STAGING")
    if chosen:
        return Path(chosen)
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return parent / f"recpoint-{os.getuid()}"


def run_directory(staging: Path | str, run_url: str) -> Path:
    """The directory of one run in the staging area `staging`; two runs never share one."""
    name = run_url.rstrip("/").rpartition("/")[2]
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100] or "run"
    digest = hashlib.sha256(run_url.encode("utf-8", errors="surrogatepass")).hexdigest()
    return Path(staging) / f"{safe}-{digest[:12]}"


def slots_directory(run_dir: Path | str) -> Path:
    """Where the trainer's slots are."""
    return Path(run_dir) / "slots"


def jobs_directory(run_dir: Path | str) -> Path:
    """Where job files are."""
    return Path(run_dir) / "jobs"


def outcomes_directory(run_dir: Path | str) -> Path:
    """Where the agent's answers are."""
    return Path(run_dir) / "outcomes"


def spool_directory(run_dir: Path | str) -> Path:
    """Where the agent keeps encoded parts on their way to the store."""
    return Path(run_dir) / "spool"


def slot_path(run_dir: Path | str, rank: int, index: int) -> Path:
    """Slot `index` of `rank`."""
    if not (0 <= rank <= MAX_RANK and 0 <= index <= MAX_SLOT):
        raise ValueError(f"rank {rank}, slot {index}: outside 0 … {MAX_RANK}, 0 … {MAX_SLOT}")
    return slots_directory(run_dir) / f"r{rank:05d}-{index}.bin"


def job_path(run_dir: Path | str, generation: int, step: int, rank: int) -> Path:
    """The job file of one snapshot."""
    return jobs_directory(run_dir) / f"{job_stem(generation, step, rank)}.json"


def outcome_path(run_dir: Path | str, generation: int, step: int, rank: int) -> Path:
    """The outcome file that answers the job of the same name."""
    return outcomes_directory(run_dir) / f"{job_stem(generation, step, rank)}.json"


def status_path(run_dir: Path | str) -> Path:
    """What the agent is doing with this run, for people."""
    return Path(run_dir) / "status.json"


def trainer_lock_path(run_dir: Path | str) -> Path:
    """Locked by the training process."""
    return Path(run_dir) / "trainer.lock"


def agent_lock_path(staging: Path | str) -> Path:
    """Locked by the agent that serves the whole staging area."""
    return Path(staging) / "agent.lock"
