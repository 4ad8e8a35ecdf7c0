"""How far a long task is, as a bar in Prefect's UI."""

from __future__ import annotations

import logging
import time
from typing import Final
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run, task_run

__all__ = ["ProgressBar"]

_LOG = logging.getLogger("recpoint.progress")

#: What takes no longer needs no bar; and the server is asked no more often.
_EVERY_SECONDS: Final = 5.0


class ProgressBar:
    """A progress artifact of the task that runs here, made once it takes long, changed in place.

    Trouble of Prefect's ends the bar and nothing else.

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

    def show(self, done: int, total: int) -> None:
        """So much is done; both in one unit."""
        now = time.monotonic()
        if not self._ended and now - self._told >= _EVERY_SECONDS:
            self._told = now
            self._tell(100.0 * min(done, total) / max(1, total))

    def finish(self) -> None:
        """All is done: a bar that was shown is full."""
        if self._artifact is not None and not self._ended:
            self._tell(100.0)

    def _tell(self, percent: float) -> None:
        try:
            with get_client(sync_client=True) as client:
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
            self._ended = True
            _LOG.info("%s is no longer shown: %s", self._key, error)
