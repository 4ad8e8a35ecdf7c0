"""How far a long task is, as a bar in Prefect's UI."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Final
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run, task_run
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT

__all__ = ["ProgressBar"]

_LOG = logging.getLogger("recpoint.progress")

#: What takes no longer needs no bar; and the server is asked no more often.
_EVERY_SECONDS: Final = 5.0


class ProgressBar:
    """A progress artifact of what runs here, made once it takes long, changed in place.

    Trouble of Prefect's, or a host without a thread to tell it from, ends the bar and nothing else.

    Args:
        key: of the artifact.
        description: what is being done.
    """

    def __init__(self, key: str, description: str) -> None:
        self._key = key
        self._description = description
        self._artifact: UUID | None = None
        self._told = time.monotonic()
        self._ended = False
        self._teller: threading.Thread | None = None

    def show(self, done: int, total: int) -> None:
        """So much is done; both in one unit."""
        if self._is_due():
            self._tell(100.0 * min(done, total) / max(1, total))

    def show_meanwhile(self, done: int, total: int) -> None:
        """As `show` and, where all is done, `finish`, but whoever calls it never waits.

        The server is asked from a thread, one at a time, which ends with the process at the latest;
        to be called from one thread.
        """
        at_work = self._teller is not None and self._teller.is_alive()
        if done >= total:
            if at_work or self._artifact is not None:
                self._meanwhile(self.finish)
        elif not at_work and self._is_due():
            self._meanwhile(partial(self._tell, 100.0 * done / total))

    def finish(self) -> None:
        """All is done: a bar that was shown is full."""
        if self._artifact is not None and not self._ended:
            self._tell(100.0)

    def _is_due(self) -> bool:
        now = time.monotonic()
        if self._ended or now - self._told < _EVERY_SECONDS:
            return False
        self._told = now
        return True

    def _meanwhile(self, tell: Callable[[], None]) -> None:
        before = self._teller

        def in_turn() -> None:
            if before is not None:
                before.join()
            tell()

        context = copy_context()  # which flow run this is, and where its server
        teller = threading.Thread(
            target=context.run, args=(in_turn,), name="recpoint-progress", daemon=True
        )
        try:
            teller.start()
        except (RuntimeError, MemoryError) as error:  # python's: can't start new thread
            self._end(error)
            return
        self._teller = teller

    def _tell(self, percent: float) -> None:
        try:
            # What is given makes it a client of its own, not the one of the flow run's thread.
            settings = {"timeout": PREFECT_API_REQUEST_TIMEOUT.value()}
            with get_client(settings, sync_client=True) as client:
                if self._artifact is not None:
                    client.update_artifact(self._artifact, ArtifactUpdate(data=percent))
                    return
                task, flow = task_run.get_id(), flow_run.get_id()
                made = client.create_artifact(
                    ArtifactCreate(
                        type="progress",
                        key=self._key,
                        description=self._description,
                        data=percent,
                        task_run_id=None if task is None else UUID(task),
                        flow_run_id=None if flow is None else UUID(flow),
                    )
                )
                self._artifact = made.id
        except (PrefectException, httpx.HTTPError) as error:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        self._ended = True
        _LOG.info("%s is no longer shown: %s", self._key, error)
