"""The automation that publishes: a run of the deployment `publish` for each event of a run."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

from recpoint.errors import SettingsError
from recpoint.tasks.events import EVENT_PREFIX, RESOURCE_PREFIX

__all__ = ["Publishes", "publishing"]

#: What is published, and after which event: every commit, or every validation that passed.
Publishes = Literal["committed", "validated"]

_DEPLOYMENT = "publish/recpoint"


def publishing(client: SyncPrefectClient, which: Publishes, *, name: str) -> AutomationCore:
    """The automation, for all runs that send events to this server.

    A checkpoint that somebody holds stays published: the flow changes nothing then.

    Args:
        client: of the server.
        which: what is published, and when.
        name: of the automation.

    Raises:
        SettingsError: the server has no such deployment.
    """
    try:
        deployment = client.read_deployment_by_name(_DEPLOYMENT)
    except ObjectNotFound:
        raise SettingsError(
            "publish",
            found=f"no deployment {_DEPLOYMENT}",
            expected="one of the flow `publish`",
            next_step="prefect deploy --all --no-prompt, with recpoint's prefect.yaml",
        ) from None
    run_url = "{{ event.resource['prefect.resource.name'] }}"
    return AutomationCore(
        name=name,
        description=f"Publishes the newest {which} checkpoint when one is {which}, unless another "
        "is held.",
        trigger=EventTrigger(
            match={"prefect.resource.id": f"{RESOURCE_PREFIX}*"},
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            expect={f"{EVENT_PREFIX}{which}"},
            threshold=1,
            within=timedelta(0),  # each: one that is left out would be published by the next only
        ),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=deployment.id,
                job_variables=None,
                parameters={
                    "run_url": {"__prefect_kind": "jinja", "template": run_url},
                    "which": which,
                },
            )
        ],
    )
