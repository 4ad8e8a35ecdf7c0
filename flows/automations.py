"""Defines the automations that Prefect keeps: which events they watch, and what they do.

Automations are code: Prefect's own functions make a second automation of the same name; here the
name is the identity, so that applying twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, Literal, NamedTuple

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import AutomationSort
from prefect.events.actions import ActionTypes, ChangeFlowRunState, DoNothing, RunDeployment
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL

from recpoint.catalog.overview.alarms import INTERVALS_OF_SILENCE
from recpoint.errors import SettingsError
from recpoint.flows.prefect_server import ui_url
from recpoint.flows.recipients import (
    kept_actions,
    notification,
    recipients_text,
    require_block_name,
)
from recpoint.flows.silences import (
    INTERVALS_TAG,
    SHORTEST_SILENCE_SECONDS,
    RunSilence,
    longest,
    of_runs,
    run_silence,
    silence,
    silence_name,
)
from recpoint.tasks.reports import EVENT_PREFIX, RESOURCE_PREFIX, TAG, CheckpointEvent

__all__ = ["AlertSettings", "apply", "automations", "find_ours", "remove_ours"]


#: What is published, and after which event: every commit, or every validation that passed.
Publishes = Literal["committed", "validated"]

_DEPLOYMENT = "publish/recpoint-publish"


def publishing(client: SyncPrefectClient, kind: Publishes, *, name: str) -> AutomationCore:
    """The automation, for all runs that send events to this server.

    A checkpoint that somebody holds stays published: the flow changes nothing then.

    Args:
        client: of the server.
        kind: what is published, and when.
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
            next_step="recpoint deployments init, then prefect deploy --all --no-prompt",
        ) from None
    run_url = "{{ event.resource['prefect.resource.name'] }}"
    return AutomationCore(
        name=name,
        description=f"Publishes the newest {kind} checkpoint when one is {kind}, unless another "
        "is held.",
        trigger=EventTrigger(
            match={"prefect.resource.id": f"{RESOURCE_PREFIX}*"},
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            expect={f"{EVENT_PREFIX}{kind}"},
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
                    "which": kind,
                },
            )
        ],
    )


#: Every automation of ours begins with it.
_PREFIX = "recpoint: "
_SILENCE = silence_name(_PREFIX)
_ZOMBIES = f"{_PREFIX}flow run without a process"
_PUBLISH = f"{_PREFIX}publish"

#: Where neither an option nor an automation that is there says anything else.
NO_COMMIT_SECONDS: Final = 1800.0
NO_HEARTBEAT_SECONDS: Final = 600.0

_PAGE = 200

_FLOW_RUN = "prefect.flow-run."
_SIGNS_OF_LIFE = ("heartbeat", "Running", "Completed", "Failed", "Cancelled", "Crashed")


@dataclass(frozen=True, kw_only=True)
class AlertSettings:
    """When to alert, and how; None: as it is there, or a default where it is not.

    Args:
        no_commit_seconds: alert when a run that has committed, or is behind, commits nothing for so
            long: a few of its intervals; half an hour by default.
        runs: URLs of runs that alert after so many of their own intervals besides. Those that have
            an alert of their own already, and are not named, keep it as it is.
        no_commit_intervals: how many; a run's interval is read from its catalog now. 3 by default.
        notify: a notification block, as `type/name`, such as `slack-webhook/training`, for the
            alerts of all runs. `none`, the default: an alert is only to be seen in Prefect's event
            feed. If None, an alert that is new tells whom the one for silence of any run tells.
        no_heartbeat_seconds: call a flow run of ours crashed when its process gave no sign of life
            for so long: three of the heartbeats (`PREFECT_FLOWS_HEARTBEAT_FREQUENCY`, 180 s); ten
            minutes by default.
        publish: have what is committed, or validated, published at once; by default this is for
            whoever runs the flow `publish`.

    Raises:
        SettingsError: too short a time, less than one interval, or no name of a block.
    """

    no_commit_seconds: float | None = None
    runs: tuple[str, ...] = ()
    no_commit_intervals: float | None = None
    notify: str | None = None
    no_heartbeat_seconds: float | None = None
    publish: Publishes | None = None

    def __post_init__(self) -> None:
        for name, unit in (
            ("no_commit_seconds", "intervals between checkpoints"),
            ("no_heartbeat_seconds", "heartbeats of a flow run"),
        ):
            seconds = getattr(self, name)
            if seconds is not None and not SHORTEST_SILENCE_SECONDS <= seconds <= 366 * 86400:
                raise SettingsError(
                    name,
                    found=f"{seconds:g}",
                    expected=f"{SHORTEST_SILENCE_SECONDS:g} seconds to a year",
                    next_step=f"give a few {unit}",
                )
        intervals = self.no_commit_intervals
        if intervals is not None and not 1.0 < intervals <= 1e6:
            raise SettingsError(
                "no_commit_intervals",
                found=f"{intervals:g}",
                expected="more than 1: between two commits there is one",
                next_step="give 3",
            )
        if self.notify is not None:
            require_block_name(self.notify)


class Applied(NamedTuple):
    """An automation and what became of it.

    Attributes:
        name: of the automation.
        result: kept: it is as it was.
        after_seconds: how long it waits for what does not happen; None: it acts at once.
        notifies: whom it tells; None: it tells nobody, it publishes.
        kept: what is as it was before, `notification` or `time`.
    """

    name: str
    result: Literal["created", "updated", "kept"]
    after_seconds: float | None = None
    notifies: str | None = None
    kept: tuple[str, ...] = ()


class ListedAutomation(NamedTuple):
    """An automation of ours that a server has."""

    name: str
    enabled: bool
    description: str


def automations(settings: AlertSettings, action: ActionTypes) -> list[AutomationCore]:
    """The automations that `apply` sees to, whatever runs there are; defaults for what is None."""
    silent = settings.no_commit_seconds or NO_COMMIT_SECONDS
    lifeless = settings.no_heartbeat_seconds or NO_HEARTBEAT_SECONDS
    return [
        silence(action, seconds=silent, prefix=_PREFIX),
        _alert(
            "validation failed", "A checkpoint failed its validation.", "validation_failed", action
        ),
        _alert("checkpoint rejected", "A checkpoint can never be stored.", "failed", action),
        _zombies(timedelta(seconds=lifeless), action),
    ]


def _zombies(silence: timedelta, action: ActionTypes) -> AutomationCore:
    """Prefect never ends a run whose process and worker are gone, and it holds its slots for ever.

    Only runs that have sent a heartbeat, or never got as far as running: where heartbeats are off,
    a run that takes long is left alone.
    """
    return AutomationCore(
        name=_ZOMBIES,
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

    What `settings` leave open stays as it is, and so do tags and whether one is enabled. Others of
    the same name are removed.

    Raises:
        SettingsError: there is no API, it does not answer, there is no such block, or the interval
            of one of the runs is not known yet.
        RecpointError: one of the runs cannot be read.
    """
    intervals = settings.no_commit_intervals
    named = [run_silence(url, intervals or INTERVALS_OF_SILENCE) for url in settings.runs]
    with _client() as client:
        # First of all: nothing is changed where that cannot be.
        chosen = None if settings.notify is None else notification(client, settings.notify)
        current = _newest_of_each_name(client)
        if intervals is None:
            named = [silence.as_before(current.get(silence.name(_PREFIX))) for silence in named]
        action = chosen or DoNothing()
        alerts = automations(_resolved(settings, current, named), action)
        alerts += [silence.automation(action, prefix=_PREFIX) for silence in named]
        other_names = current.keys() - {alert.name for alert in alerts}
        of_others = sorted(name for name in other_names if name.startswith(of_runs(_PREFIX)))
        # Those too tell whoever is to be told from now on.
        alerts += [current[name].model_copy(update={"actions": [action]}) for name in of_others]
        applied = [_apply_alert(client, alert, current, keep=chosen is None) for alert in alerts]
        if settings.publish is not None:
            publication = publishing(client, settings.publish, name=_PUBLISH)
            applied.append(
                Applied(_PUBLISH, _create_or_update(client, publication, current.get(_PUBLISH)))
            )
        elif _PUBLISH in current:
            applied.append(Applied(_PUBLISH, "kept"))
    return applied


def _apply_alert(
    client: SyncPrefectClient,
    alert: AutomationCore,
    current_by_name: Mapping[str, Automation],
    *,
    keep: bool,
) -> Applied:
    """See to an alert; `keep`: it tells whom it told before, a new one whom the others tell."""
    current = current_by_name.get(alert.name)
    seconds = _waits_seconds(alert)
    kept_parts = []
    if keep and (model := current or current_by_name.get(_SILENCE)) is not None:
        own_actions = [action for action in alert.actions if isinstance(action, ChangeFlowRunState)]
        alert.actions = own_actions + kept_actions(model.actions)
        kept_parts.append("notification")
    if current is not None and seconds is not None and seconds == _waits_seconds(current):
        kept_parts.append("time")
    result = _create_or_update(client, alert, current)
    return Applied(
        alert.name, result, seconds, recipients_text(client, alert.actions), tuple(kept_parts)
    )


def _resolved(
    settings: AlertSettings, current_by_name: Mapping[str, Automation], named: Iterable[RunSilence]
) -> AlertSettings:
    """The settings with every time: the one that is there, else the default, where none is given.

    Never less for all runs than for one that has an alert of its own.
    """

    def seconds(seconds_set: float | None, name: str, default: float) -> float:
        if seconds_set is not None:
            return seconds_set
        current = current_by_name.get(name)
        return (None if current is None else _waits_seconds(current)) or default

    silent = seconds(settings.no_commit_seconds, _SILENCE, NO_COMMIT_SECONDS)
    return replace(
        settings,
        no_commit_seconds=max(silent, longest(current_by_name.values(), named, prefix=_PREFIX)),
        no_heartbeat_seconds=seconds(settings.no_heartbeat_seconds, _ZOMBIES, NO_HEARTBEAT_SECONDS),
    )


def _waits_seconds(alert: AutomationCore) -> float | None:
    """How long it waits for what does not happen; None if it waits for nothing."""
    if not isinstance(alert.trigger, EventTrigger) or alert.trigger.posture != Posture.Proactive:
        return None
    return alert.trigger.within.total_seconds()


def _create_or_update(
    client: SyncPrefectClient, automation: AutomationCore, current: Automation | None
) -> Literal["created", "updated", "kept"]:
    if current is None:
        client.create_automation(automation)
        return "created"
    tags = {tag for tag in current.tags if not tag.startswith(INTERVALS_TAG)} | {*automation.tags}
    own_fields = ("description", "trigger", "actions")
    # One that is changed counts anew.
    if tags == {*current.tags} and all(
        getattr(current, x) == getattr(automation, x) for x in own_fields
    ):
        return "kept"
    client.update_automation(
        current.id,
        AutomationCore(
            name=automation.name,
            description=automation.description,
            enabled=current.enabled,
            tags=sorted(tags),
            trigger=automation.trigger,
            actions=automation.actions,
            actions_on_trigger=current.actions_on_trigger,
            actions_on_resolve=current.actions_on_resolve,
        ),
    )
    return "updated"


def find_ours() -> list[ListedAutomation]:
    """The automations of ours that the server has, by name.

    Raises:
        SettingsError: there is no API, or it does not answer.
    """
    with _client() as client:
        return sorted(
            ListedAutomation(automation.name, automation.enabled, automation.description)
            for automation in _read_ours(client)
        )


def remove_ours() -> list[str]:
    """Remove what `find_ours` finds; the names.

    Raises:
        SettingsError: there is no API, or it does not answer.
    """
    with _client() as client:
        automations = _read_ours(client)
        for automation in automations:
            client.delete_automation(automation.id)
    return sorted(automation.name for automation in automations)


def _read_ours(client: SyncPrefectClient) -> list[Automation]:
    """All that are ours, those first that were changed last."""
    automations: list[Automation] = []
    offset, newest = 0, AutomationSort.UPDATED_DESC
    while page := client.read_automations(sort=newest, limit=_PAGE, offset=offset):
        automations += [automation for automation in page if automation.name.startswith(_PREFIX)]
        offset += len(page)
    return automations


def _newest_of_each_name(client: SyncPrefectClient) -> dict[str, Automation]:
    """Those that are ours; of several with one name the others are removed."""
    newest: dict[str, Automation] = {}
    for automation in _read_ours(client):
        if newest.setdefault(automation.name, automation) is not automation:
            client.delete_automation(automation.id)
    return newest


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
