"""Defines the automations that notice silence, of any run or of a named one by its own intervals.

A trigger of Prefect's waits for a time that is fixed when it is made, the same for all runs that it
matches; so a run whose own intervals count has one for itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from prefect.events.actions import ActionTypes
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture

from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import SettingsError
from recpoint.tasks.reports import EVENT_PREFIX, RESOURCE_PREFIX

__all__ = [
    "INTERVALS_TAG",
    "RunSilence",
    "SHORTEST_SILENCE_SECONDS",
    "longest",
    "of_runs",
    "run_silence",
    "silence",
    "silence_name",
]


#: Prefect's own floor for a trigger that waits for something not to happen.
SHORTEST_SILENCE_SECONDS = 10.0
#: A tag of a run's automation begins with it, and ends with the number of its intervals.
INTERVALS_TAG = "recpoint.intervals:"
_BEGINS = {f"{EVENT_PREFIX}committed", f"{EVENT_PREFIX}lagging"}
_ENDS = {f"{EVENT_PREFIX}committed", f"{EVENT_PREFIX}ended"}


class RunSilence(NamedTuple):
    """How long one run may be silent: `intervals` of its own, each of `interval_seconds`."""

    url: str
    run_id: str
    intervals: float
    interval_seconds: float

    @property
    def seconds(self) -> float:
        """What its trigger waits for; never shorter than Prefect allows."""
        return max(SHORTEST_SILENCE_SECONDS, self.intervals * self.interval_seconds)

    def name(self, prefix: str) -> str:
        """Of its automation. The run's id is its identity: a run may move to another URL."""
        return f"{of_runs(prefix)}{self.run_id}"

    def as_before(self, current: Automation | None) -> RunSilence:
        """The same with as many intervals as the run's automation has been given, if it has."""
        for tag in () if current is None else current.tags:
            if tag.startswith(INTERVALS_TAG):
                with suppress(ValueError):
                    return self._replace(intervals=float(tag.removeprefix(INTERVALS_TAG)))
        return self

    def automation(self, action: ActionTypes, *, prefix: str) -> AutomationCore:
        """The automation, with a name that begins with `prefix`."""
        quiet_time = timedelta(seconds=round(self.seconds))
        return AutomationCore(
            name=self.name(prefix),
            description=f"{self.url} committed nothing for {quiet_time}: {self.intervals:g} of its "
            f"intervals, {self.interval_seconds:.3g} s each when this was applied. "
            "Its trainer or its agent is dead, or its store is away.",
            tags=[f"{INTERVALS_TAG}{self.intervals:g}"],
            trigger=_trigger(f"{RESOURCE_PREFIX}{self.run_id}", quiet_time),
            actions=[action],
        )


def run_silence(url: str, intervals: float) -> RunSilence:
    """How long the run at `url` may be silent, from the interval that its catalog tells of.

    Raises:
        SettingsError: its interval is not known yet.
        RecpointError: it is not there, or cannot be read.
    """
    overview = RunWatch(Run.open(open_store(url))).refresh()
    interval = overview.lag.interval_seconds
    if interval is None:
        raise SettingsError(
            overview.url,
            found=f"{overview.live_checkpoints} checkpoints: its interval is not known yet",
            expected="a run whose checkpoints tell how far they are apart",
            next_step="apply again after its second checkpoint; until then leave out its URL, "
            "and --no-commit counts",
        )
    return RunSilence(overview.url, overview.run, intervals, interval)


def silence(action: ActionTypes, *, seconds: float, prefix: str) -> AutomationCore:
    """The automation for all runs that send events to this server, named ones too."""
    quiet_time = timedelta(seconds=seconds)
    return AutomationCore(
        name=silence_name(prefix),
        description=f"A run committed nothing for {quiet_time}: its trainer or its agent is dead, "
        "or its store is away. Once for each silence; again while an agent says that it is "
        "behind. Not after a training that ended by itself on a host with an agent.",
        trigger=_trigger(f"{RESOURCE_PREFIX}*", quiet_time),
        actions=[action],
    )


def longest(current: Iterable[Automation], named: Iterable[RunSilence], *, prefix: str) -> float:
    """The longest silence of a run that has an automation for itself, in seconds; 0: none has.

    The automation for all must wait as long: it would alert for that run too, before its time.
    It cannot leave a run out, since no pattern of Prefect's means "all but these".

    Args:
        current: what the server has.
        named: what it is about to have.
        prefix: that names of ours begin with.
    """
    seconds_by_name = {silence.name(prefix): silence.seconds for silence in named}
    for automation in current:
        if automation.name.startswith(of_runs(prefix)) and isinstance(
            automation.trigger, EventTrigger
        ):
            seconds_by_name.setdefault(automation.name, automation.trigger.within.total_seconds())
    return math.ceil(max(seconds_by_name.values(), default=0.0))


def silence_name(prefix: str) -> str:
    """Of the automation for all runs."""
    return f"{prefix}no commit"


def of_runs(prefix: str) -> str:
    """What the names of automations for one run begin with."""
    return f"{prefix}no commit of run "


def _trigger(resource: str, silence: timedelta) -> EventTrigger:
    return EventTrigger(
        match={"prefect.resource.id": resource},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        after=_BEGINS,
        expect=_ENDS,
        threshold=1,
        within=silence,
    )
