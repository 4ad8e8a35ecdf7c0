"""Persists one job: as a flow if Prefect can be used, by the same functions if not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from recpoint.catalog.persist.persist import PersistJob, drive, persist_job
from recpoint.catalog.staging import job_files
from recpoint.errors import RecpointError
from recpoint.flows.agent.gate import PrefectGate
from recpoint.flows.agent.queue import LOG, staged_before
from recpoint.flows.agent.runs import Awaits, RunState

__all__ = [
    "AgentPersist",
]


_POLL_SECONDS: Final = 0.05


class AgentPersist:
    """Persists jobs; several threads may use it, each for another job.

    Args:
        gate: says when Prefect can be used, and is told when Prefect fails.
    """

    def __init__(self, gate: PrefectGate) -> None:
        self._gate = gate
        self._telling: list[threading.Thread] = []
        self._started = time.time()  # not monotonic: compared with times of files

    @property
    def telling(self) -> list[threading.Thread]:
        """Threads of flows whose jobs are answered, and which only report to Prefect."""
        return [thread for thread in self._telling if thread.is_alive()]

    def persist(
        self,
        job_file: Path,
        job: PersistJob | None,
        state: RunState,
        log: logging.LoggerAdapter[logging.Logger],
    ) -> None:
        """Persist a job, or, if it needs other ranks' parts, as much of it as this host can.

        Args:
            job_file: the job file.
            job: the job; None: the file cannot be read, and is rejected here.
            state: the state of the job's run.
            log: gets the result of a job that is persisted without Prefect.

        Raises:
            RecpointError, OSError, MemoryError: the try failed; the job stays staged.
        """
        worth_a_flow = job is not None and state.is_worth_a_flow()
        call = self._gate.persist_flow() if worth_a_flow else None
        if job is not None and call is not None:
            failed = self._run_flow(call, job, state)
            if failed is None:
                return self._gate.worked()
            if isinstance(failed, RecpointError):
                raise failed
            self._gate.failed(f"{type(failed).__name__}: {failed}")
        outcome = persist_job(job_file) if job is None else drive(job).outcome
        log.info("%s", f"{outcome.result} without Prefect {outcome.error}".rstrip())

    def end_answered_run(self, state: RunState) -> None:
        """End, in the background, the flow run of a job that was answered outside that flow run."""
        awaits = state.awaits
        end = None if awaits is None or awaits.job_file.exists() else self._gate.end_flow_run()
        if awaits is None or end is None:
            return  # nothing to end; or Prefect is away, and a later call ends it
        state.awaits = None

        def tell() -> None:
            try:
                end(awaits.flow_run, job_files.answer_given(awaits.job_file))
            except Exception as error:  # only Prefect's display depends on this call
                LOG.info("%s: its flow run still waits in Prefect: %s", awaits.job_file, error)

        thread = threading.Thread(target=tell, name="end flow run", daemon=True)
        thread.start()
        self._telling = [*self.telling, thread]

    def _run_flow(
        self, call: Callable[..., Any], job: PersistJob, state: RunState
    ) -> BaseException | None:
        """Run the flow for a job.

        Returns:
            None: the job is answered, or waits for other ranks. Otherwise the error: a
            `RecpointError` if the work failed, any other type if Prefect failed.
        """
        self.end_answered_run(state)  # the flow run of a job before this one
        results: list[Any] = []
        ended: list[Any] = []  # `flows.persist.Tried`, whose module imports Prefect
        awaits = state.awaits
        known_run = awaits.flow_run if awaits is not None and awaits.job_file == job.path else None
        # A job staged before this agent began may have a flow run that an earlier agent began.
        tried_before = known_run is None and staged_before(job.path, self._started)

        def run() -> None:
            try:
                tried = call(job, flow_run=known_run, tried_before=tried_before)
                ended.append(tried)
                if tried.error is None:
                    results.append(tried.state.result(raise_on_failure=False) or tried.state)
                else:
                    results.append(tried.error)
            except Exception as error:
                # Prefect, its client and its server raise many types.
                results.append(error)

        thread = threading.Thread(target=run, name=f"flow {job.path.stem}", daemon=True)
        thread.start()
        while thread.is_alive() and job.path.exists():
            thread.join(_POLL_SECONDS)
        if not job.path.exists():
            # The rest of the flow only reports to Prefect, whose API may hang: do not wait for it.
            state.awaits = None
            self._telling = [*self.telling, thread]
            return None
        if ended:  # else Prefect failed, and the flow run that is known still awaits its end
            flow_run = ended[0].flow_run
            is_tried_again = ended[0].error is not None and flow_run is not None
            state.awaits = Awaits(job.path, flow_run) if is_tried_again else None
        # No result: the thread exited or was cancelled, which is not the job's fault.
        failed = results[0] if results else "the flow ended without a state"
        if getattr(failed, "name", None) == "Waiting":
            return None
        return failed if isinstance(failed, BaseException) else RuntimeError(str(failed))
