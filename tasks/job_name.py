"""Names jobs and runs for people, in log lines and in Prefect. Needs no Prefect."""

from __future__ import annotations

import logging
import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from recpoint.format.naming import parse_job_stem

__all__ = ["job_log", "job_name", "run_tag"]


#: The hash at the end of a run's directory, which tells runs of one name apart but nobody reads.
_HASH = re.compile(r"-[0-9a-f]{12}\Z")


class JobName(NamedTuple):
    """What a job file's path says about it."""

    run: str
    generation: int
    step: int
    rank: int

    def __str__(self) -> str:
        return f"{self.run} step {self.step} rank {self.rank}"


def job_name(job_path: str) -> JobName:
    """The name of the job in `job_path`; it need not exist (any more)."""
    path = Path(job_path)
    named = parse_job_stem(path.stem)
    if named is None:
        raise ValueError(f"{path.name!r} is not the name of a job file")
    return JobName(_HASH.sub("", path.parent.parent.name), *named)


def run_tag(run_url: str) -> str:
    """The tag of a run's flow runs: its whole URL, because two runs may end with the same name."""
    return f"run:{run_url.rstrip('/')}"


class _JobLog(logging.LoggerAdapter[logging.Logger]):
    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return f"[{self.extra['job'] if self.extra else ''}] {msg}", kwargs


def job_log(job_path: str) -> logging.LoggerAdapter[logging.Logger]:
    """A logger whose lines carry run, step and rank."""
    return _JobLog(logging.getLogger("recpoint.persist"), {"job": job_name(job_path)})
