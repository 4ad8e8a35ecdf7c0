"""Events of checkpoints, with their run as the resource: what automations wait for.

They are sent by flows and by the agent, never by a trainer, and by a thread of Prefect's: nothing
waits for one.
"""

from __future__ import annotations

from typing import Literal

from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL

__all__ = ["EVENT_PREFIX", "RESOURCE_PREFIX", "TAG", "CheckpointEvent", "emit"]

EVENT_PREFIX = "recpoint.checkpoint."
RESOURCE_PREFIX = "recpoint.run."

#: Every flow run of ours has it: what watches or removes flow runs goes by it.
TAG = "recpoint"

CheckpointEvent = Literal[
    "committed",
    "failed",
    "lagging",
    "ended",
    "consolidated",
    "retained",
    "validated",
    "validation_failed",
    "published",
]

#: Prefect refuses events beyond 1.5 MB; texts of errors are the only long ones.
_LONGEST_TEXT = 2000


def emit(
    event: CheckpointEvent,
    run_id: str,
    run_url: str,
    **payload: str | int | float | dict[str, float] | None,
) -> None:
    """Hand an event to Prefect's own sender; returns at once, and raises nothing if that fails.

    Args:
        event: what happened; `recpoint.checkpoint.` goes before it.
        run_id: the run's id; the resource is `recpoint.run.<run id>`.
        run_url: where the run is; the resource's name.
        payload: figures and texts of the event; long texts are cut.
    """
    if not PREFECT_API_URL.value():
        return  # Prefect would start a server for it, which takes many seconds
    emit_event(
        f"{EVENT_PREFIX}{event}",
        resource={
            "prefect.resource.id": f"{RESOURCE_PREFIX}{run_id}",
            "prefect.resource.name": run_url,
        },
        payload={
            name: value[:_LONGEST_TEXT] if isinstance(value, str) else value
            for name, value in payload.items()
        },
    )
