"""Automations as code: what Prefect watches in the events of checkpoints, and whom it tells.

Prefect's own functions make a second automation of the same name; here the name is the identity, so
that applying twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal, NamedTuple

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import (
    ActionTypes,
    ChangeFlowRunState,
    DoNothing,
    SendNotification,
)
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL

from recpoint.catalog.overview import INTERVALS_OF_SILENCE
from recpoint.errors import SettingsError
from recpoint.flows.prefect_server import ui_url
from recpoint.flows.publish_automation import Publishes, publishing
from recpoint.flows.silence_automation import (
    SHORTEST_SILENCE_SECONDS,
    longest,
    run_silence,
    silence,
)
from recpoint.tasks.events import EVENT_PREFIX, RESOURCE_PREFIX, TAG, CheckpointEvent

__all__ = ["AlertSettings", "Applied", "Found", "apply", "automations", "find", "remove"]

#: Every automation of ours begins with it.
_PREFIX = "recpoint: "

_PAGE = 200

_FLOW_RUN = "prefect.flow-run."
_SIGNS_OF_LIFE = ("heartbeat", "Running", "Completed", "Failed", "Cancelled", "Crashed")


@dataclass(frozen=True, kw_only=True)
class AlertSettings:
    """When to alert, and how.

    Args:
        no_commit_seconds: alert when a run that has committed, or is behind, commits nothing for so
            long: a few of its intervals.
        runs: URLs of runs that alert after so many of their own intervals besides. Those that have
            an alert of their own already, and are not named, keep it as it is.
        no_commit_intervals: how many; a run's interval is read from its catalog now.
        notify: a notification block, as `type/name`, such as `slack-webhook/training`; without one
            an alert is only to be seen in Prefect's event feed.
        no_heartbeat_seconds: call a flow run of ours crashed when its process gave no sign of life
            for so long: three of the heartbeats (`PREFECT_FLOWS_HEARTBEAT_FREQUENCY`, 180 s).
        publish: have what is committed, or validated, published at once; None: by whoever runs the
            flow `publish`. An automation that does so already is left as it is.

    Raises:
        SettingsError: too short a time, less than one interval, or no name of a block.
    """

    no_commit_seconds: float = 1800.0
    runs: tuple[str, ...] = ()
    no_commit_intervals: float = INTERVALS_OF_SILENCE
    notify: str | None = None
    no_heartbeat_seconds: float = 600.0
    publish: Publishes | None = None

    def __post_init__(self) -> None:
        for name, of in (
            ("no_commit_seconds", "intervals between checkpoints"),
            ("no_heartbeat_seconds", "heartbeats of a flow run"),
        ):
            if not SHORTEST_SILENCE_SECONDS <= getattr(self, name) <= 366 * 86400:
                raise SettingsError(
                    name,
                    found=f"{getattr(self, name):g}",
                    expected=f"{SHORTEST_SILENCE_SECONDS:g} seconds to a year",
                    next_step=f"give a few {of}",
                )
        if not 1.0 < self.no_commit_intervals <= 1e6:
            raise SettingsError(
                "no_commit_intervals",
                found=f"{self.no_commit_intervals:g}",
                expected="more than 1: between two commits there is one",
                next_step="give 3",
            )
        if self.notify is not None and len([x for x in self.notify.split("/") if x]) != 2:
            raise SettingsError(
                "notify",
                found=self.notify,
                expected="type/name of a notification block",
                next_step="prefect block ls",
            )


class Applied(NamedTuple):
    """An automation and what became of it."""

    name: str
    result: Literal["created", "updated"]


class Found(NamedTuple):
    """An automation of ours that a server has."""

    name: str
    enabled: bool
    description: str


def automations(settings: AlertSettings, action: ActionTypes) -> list[AutomationCore]:
    """The automations that `apply` sees to, whatever runs there are."""
    return [
        silence(action, seconds=settings.no_commit_seconds, prefix=_PREFIX),
        _alert(
            "validation failed", "A checkpoint failed its validation.", "validation_failed", action
        ),
        _alert("checkpoint rejected", "A checkpoint can never be stored.", "failed", action),
        _zombies(timedelta(seconds=settings.no_heartbeat_seconds), action),
    ]


def _zombies(silence: timedelta, action: ActionTypes) -> AutomationCore:
    """Prefect never ends a run whose process and worker are gone, and it holds its slots for ever.

    Only runs that have sent a heartbeat, or never got as far as running: where heartbeats are off,
    a run that takes long is left alone.
    """
    return AutomationCore(
        name=f"{_PREFIX}flow run without a process",
        description=f"A flow run gave no sign of life for {silence}: it is called crashed, so that "
        "it holds no slot. What it was at is done again, by an agent or by the next run.",
        trigger=EventTrigger(
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={
                "prefect.resource.role": "tag",
                "prefect.resource.id": f"prefect.tag.{TAG}",
            },
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            after={f"{_FLOW_RUN}heartbeat", f"{_FLOW_RUN}Pending"},
            expect={f"{_FLOW_RUN}{sign}" for sign in _SIGNS_OF_LIFE},
            threshold=1,
            within=silence,
        ),
        actions=[
            ChangeFlowRunState(
                name="Crashed",
                state=StateType.CRASHED,
                message=f"no sign of life of its process for {silence}",
                force=False,
            ),
            action,
        ],
    )


def apply(settings: AlertSettings) -> list[Applied]:
    """Create the automations, or bring those of the same names up to date.

    Whether one is enabled stays as it is. Others of the same name are removed.

    Raises:
        SettingsError: there is no API, it does not answer, there is no such block, or the interval
            of one of the runs is not known yet.
        RecpointError: one of the runs cannot be read.
    """
    done = []
    named = [run_silence(url, settings.no_commit_intervals) for url in settings.runs]
    with _client() as client:
        action = _action(client, settings.notify)
        least = longest(_ours(client), named, prefix=_PREFIX)
        settings = replace(settings, no_commit_seconds=max(least, settings.no_commit_seconds))
        all_wanted = automations(settings, action)
        all_wanted += [one.automation(action, prefix=_PREFIX) for one in named]
        if settings.publish is not None:
            all_wanted.append(publishing(client, settings.publish, name=f"{_PREFIX}publish"))
        for wanted in all_wanted:
            there = client.read_automations_by_name(wanted.name)
            if not there:
                client.create_automation(wanted)
                done.append(Applied(wanted.name, "created"))
                continue
            wanted.enabled = there[0].enabled
            client.update_automation(there[0].id, wanted)
            for double in there[1:]:
                client.delete_automation(double.id)
            done.append(Applied(wanted.name, "updated"))
    return done


def find() -> list[Found]:
    """The automations of ours that the server has, by name.

    Raises:
        SettingsError: there is no API, or it does not answer.
    """
    with _client() as client:
        return sorted(Found(one.name, one.enabled, one.description) for one in _ours(client))


def remove() -> list[str]:
    """Remove what `find` finds; the names.

    Raises:
        SettingsError: there is no API, or it does not answer.
    """
    with _client() as client:
        ours = _ours(client)
        for one in ours:
            client.delete_automation(one.id)
    return sorted(one.name for one in ours)


def _ours(client: SyncPrefectClient) -> list[Automation]:
    ours: list[Automation] = []
    offset = 0
    while page := client.read_automations(limit=_PAGE, offset=offset):
        ours += [one for one in page if one.name.startswith(_PREFIX)]
        offset += len(page)
    return ours


def _events(*names: CheckpointEvent) -> set[str]:
    return {f"{EVENT_PREFIX}{name}" for name in names}


def _alert(
    name: str, description: str, event: CheckpointEvent, action: ActionTypes
) -> AutomationCore:
    """An automation that acts at once on each event of a run, but once a minute at most."""
    return AutomationCore(
        name=f"{_PREFIX}{name}",
        description=description,
        trigger=EventTrigger(
            match={"prefect.resource.id": f"{RESOURCE_PREFIX}*"},
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            expect=_events(event),
            threshold=1,
            within=timedelta(minutes=1),
        ),
        actions=[action],
    )


def _action(client: SyncPrefectClient, notify: str | None) -> ActionTypes:
    if notify is None:
        return DoNothing()
    kind, name = [part for part in notify.split("/") if part]
    try:
        block = client.read_block_document_by_name(name, kind)
    except ObjectNotFound:
        raise SettingsError(
            "notify",
            found=f"no block {notify}",
            expected="a notification block that the server has",
            next_step="prefect block ls",
        ) from None
    assert block.id is not None  # what a server has got has one
    return SendNotification(
        block_document_id=block.id,
        subject="recpoint: {{ automation.name }}",
        body="{{ automation.description }}\n\n"
        "run: {{ event.resource['prefect.resource.name'] }}\n"
        "last event: {{ event.event }} of {{ event.occurred }}\n{{ event.payload }}",
    )


@contextmanager
def _client() -> Iterator[SyncPrefectClient]:
    url = PREFECT_API_URL.value()
    if not url:
        # Prefect would start a server of its own, and the automations would go with it.
        raise SettingsError(
            "PREFECT_API_URL",
            found="no Prefect API",
            expected="one that is configured, or the local server",
            next_step="recpoint server start",
        )
    try:
        with get_client(sync_client=True) as client:
            yield client
    except httpx.TransportError as error:
        raise SettingsError(
            ui_url(url),
            found=f"no answer: {error or type(error).__name__}",
            expected="a Prefect API",
            next_step="recpoint server status",
        ) from error
    except PrefectHTTPStatusError as error:
        raise SettingsError(
            ui_url(url),
            found=f"HTTP {error.response.status_code}: {error.response.text[:500]}",
            expected="a Prefect API that takes automations",
            next_step="see its log",
        ) from error
