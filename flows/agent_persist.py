"""How an agent has a job persisted: as a flow where Prefect works, by the same steps where not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from recpoint.catalog.persist.persist import PersistJob, drive, persist_job
from recpoint.errors import RecpointError
from recpoint.flows.agent_runs import RunState
from recpoint.flows.prefect_gate import PrefectGate

__all__ = ["AgentPersist"]

_POLL_SECONDS: Final = 0.05


class AgentPersist:
    """Persists jobs; any number of threads may, each another job.

    Args:
        gate: says when Prefect can be used, and is told when it fails.
    """

    def __init__(self, gate: PrefectGate) -> None:
        self._gate = gate
        self._telling: list[threading.Thread] = []

    @property
    def telling(self) -> list[threading.Thread]:
        """Flows that have answered their jobs, and only tell of it."""
        return [thread for thread in self._telling if thread.is_alive()]

    def persist(
        self,
        job_file: Path,
        job: PersistJob | None,
        state: RunState,
        log: logging.LoggerAdapter[logging.Logger],
    ) -> None:
        """Take a job to its end, or, of several ranks, as far as this host can.

        Args:
            job_file: the job file.
            job: the job; None: it cannot be read, and is to be rejected.
            state: of its run.
            log: where to say what became of it.

        Raises:
            RecpointError, OSError, MemoryError: not now; the job stays staged.
        """
        worth_a_flow = job is not None and state.is_worth_a_flow()
        call = self._gate.persist_flow() if worth_a_flow else None
        if job is not None and call is not None:
            failed = self._run_flow(call, job)
            if failed is None:
                return self._gate.worked()
            if isinstance(failed, RecpointError):
                raise failed
            self._gate.failed(f"{type(failed).__name__}: {failed}")
        outcome = persist_job(job_file) if job is None else drive(job).outcome
        log.info("%s", f"{outcome.result} without Prefect {outcome.error}".rstrip())

    def _run_flow(self, call: Callable[[PersistJob], Any], job: PersistJob) -> BaseException | None:
        """Run the flow; None if the job is answered, or waits for other ranks; else what failed."""
        results: list[Any] = []

        def run() -> None:
            try:
                state = call(job)
                results.append(state.result(raise_on_failure=False) or state)
            except Exception as error:
                # Of Prefect, its client or its server, in a hundred forms.
                results.append(error)

        thread = threading.Thread(target=run, name=f"flow {job.path.stem}", daemon=True)
        thread.start()
        while thread.is_alive() and job.path.exists():
            thread.join(_POLL_SECONDS)
        if not job.path.exists():
            # The rest of the flow only tells about it, which an API that hangs drags out.
            self._telling = [*self.telling, thread]
            return None
        # None: an exit, or a cancellation, which is none of the job's faults.
        failed = results[0] if results else "the flow ended without a state"
        if getattr(failed, "name", None) == "Waiting":
            return None
        return failed if isinstance(failed, BaseException) else RuntimeError(str(failed))
