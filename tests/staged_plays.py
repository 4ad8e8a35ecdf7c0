"""Plays of one trainer after another on one run, and what becomes of the jobs that they stage."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from recpoint import Checkpointer
from recpoint.catalog.persist import persist
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.format.job import Job
from recpoint.format.naming import ManifestName
from tests.running_parts import pipeline_of
from tests.training_builder import reject, until

__all__ = ["StagedPlay"]


class StagedPlay(RuleBasedStateMachine):
    """The rules of an agent that works when it is told to.

    A play sets the attributes, and compares what is stored with the truth in `check`.

    Attributes:
        url: the run URL.
        run_directory: the run's part of the staging area.
        ckpt: the trainer that lives now; None: none does.
        generation: its generation.
    """

    url: str
    run_directory: Path
    ckpt: Checkpointer | None
    generation: int

    @property
    def trainer(self) -> Checkpointer:
        assert self.ckpt is not None
        return self.ckpt

    def check(self, name: ManifestName) -> None:
        """Compare a checkpoint that was just stored with the truth."""
        raise NotImplementedError

    def run(self) -> Run:
        return Run.open(open_store(self.url))

    def jobs(self) -> list[tuple[Path, Job]]:
        return [(p, job_files.read_job(p)) for p in StagedRun(self.run_directory).staged_jobs()]

    def settled(self) -> None:
        """What was cut is staged, and every answer there is has been heard."""
        outcomes = StagedRun(self.run_directory).outcomes_directory
        until(lambda: not list(outcomes.glob(f"{self.generation:08d}-*.json")))
        pipeline = pipeline_of(self.trainer)
        until(lambda: not pipeline._handoff.is_staging() and not pipeline._handoff._unwanted)
        own_jobs = [job for _, job in self.jobs() if job.generation == self.generation]
        until(lambda: self.trainer.stats is not None and pipeline.pending == len(own_jobs))

    @precondition(lambda self: self.jobs())
    @rule()
    def persist_oldest(self) -> None:
        path, job = self.jobs()[0]
        outcome = persist.persist_job(path)
        self.settled()
        if outcome.result == "committed":
            self.check(ManifestName(job.step, job.generation))

    @precondition(lambda self: self.jobs())
    @rule(error_type=st.sampled_from(["StagingError", "MissingLink", "DigestMismatch"]))
    def reject_oldest(self, error_type: str) -> None:
        reject(self.jobs()[0][0], error_type)
        self.settled()

    @precondition(lambda self: self.jobs())
    @rule()
    def lose_newest(self) -> None:
        self.jobs()[-1][0].unlink()
        self.settled()
