"""Automations as code against a real server: names are identities, and a block is told."""

from __future__ import annotations

import itertools
import time
from datetime import datetime
from pathlib import Path

import pytest
from prefect.blocks.notifications import SlackWebhook
from prefect.client.orchestration import get_client
from prefect.events.actions import DoNothing, SendNotification
from prefect.events.schemas.automations import Automation, EventTrigger
from pydantic import SecretStr

from recpoint.catalog import persist
from recpoint.catalog.run import Run
from recpoint.errors import SettingsError
from recpoint.flows.automations import AlertSettings, apply, automations, find, remove
from recpoint.format.history import History
from recpoint.tasks.events import emit
from tests.catalog_builder import new_run, tables
from tests.job_builder import stage
from tests.polling import PATIENCE_SECONDS, until

pytestmark = pytest.mark.usefixtures("prefect_api")


def there() -> dict[str, Automation]:
    with get_client(sync_client=True) as client:
        return {one.name: one for one in client.read_automations()}


def test_a_block_is_told_and_what_a_person_changed_stays() -> None:
    SlackWebhook(url=SecretStr("https://slack.invalid/x")).save("training", overwrite=True)
    with get_client(sync_client=True) as client:
        other = automations(AlertSettings(), DoNothing())[1]
        client.create_automation(other.model_copy(update={"name": "somebody else's"}))
        # Twice, as Prefect itself would have it.
        client.create_automation(other)
        client.create_automation(other)
    results = ["created", "updated", "created", "created"]
    assert [one.result for one in apply(AlertSettings())] == results
    before = there()
    assert len(before) == 5 and isinstance(before["recpoint: no commit"].actions[0], DoNothing)

    with get_client(sync_client=True) as client:
        client.pause_automation(before["recpoint: no commit"].id)
    apply(AlertSettings(no_commit_seconds=60, notify="slack-webhook/training"))
    after = there()
    assert {name: one.id for name, one in after.items()} == {k: v.id for k, v in before.items()}
    silence = after["recpoint: no commit"]
    assert not silence.enabled and isinstance(silence.actions[0], SendNotification)
    assert [one.enabled for one in find()] == [True, True, False, True]

    with pytest.raises(SettingsError, match="no block slack-webhook/nobody"):
        apply(AlertSettings(notify="slack-webhook/nobody"))
    assert len(remove()) == 4 and there().keys() == {"somebody else's"}
    with get_client(sync_client=True) as client:
        client.delete_automation(there()["somebody else's"].id)


def run_every(directory: Path, *, seconds: float) -> Run:
    """A run with one checkpoint, whose trainer meant to take the next so much later."""
    run = new_run(directory / "run")
    run.claim(None)
    history = History(trained_ms=0, lossy_restores=0, precision=None, due_ms=round(1000 * seconds))
    job = stage(run, directory / "s", tables(), step=1, generation=1, history=history)
    assert persist.persist_job(job).result == "committed"
    return run


def within_seconds(automation: Automation) -> float:
    assert isinstance(automation.trigger, EventTrigger)
    return automation.trigger.within.total_seconds()


def longest_silence(run: Run) -> float:
    """The longest time between two commits of a run that the server heard of, in seconds."""
    with get_client(sync_client=True) as client:
        resource = {"id": [f"recpoint.run.{run.id}"]}
        body = {"filter": {"resource": resource, "order": "ASC"}, "limit": 50}
        events = client.request("POST", "/events/filter", json=body).json()["events"]
    heard = [datetime.fromisoformat(one["received"]) for one in events]
    return max((b - a).total_seconds() for a, b in itertools.pairwise(heard))


def test_a_named_run_alerts_after_its_own_intervals(tmp_path: Path) -> None:
    """Of two with the same interval the one that goes on committing does not."""
    # A server that is so busy that it does not hear of a commit in time has to raise the alarm:
    # with longer intervals then.
    for interval in (5.0, 20.0, 80.0):
        place = tmp_path / f"{interval:.0f}"
        quiet, names = alarms_of_named_runs(place, interval)
        of_quiet = f"recpoint: no commit of run {quiet.id}"
        if of_quiet not in names:
            return
        assert longest_silence(quiet) > 3 * interval - 5
    pytest.fail("the server never heard of commits in time")


def alarms_of_named_runs(place: Path, interval: float) -> tuple[Run, set[str]]:
    """A run that commits often enough, and the alarms that were raised until a silent one's was."""
    quiet, silent, slow = (
        run_every(place / name, seconds=seconds)
        for name, seconds in (("quiet", interval), ("silent", interval), ("slow", 1000.0))
    )
    bare = new_run(place / "bare")
    with pytest.raises(SettingsError, match="its interval is not known yet"):
        apply(AlertSettings(runs=(bare.url,)))
    assert not there()

    apply(AlertSettings(runs=(slow.url,), no_commit_intervals=2))
    done = apply(AlertSettings(runs=(quiet.url, silent.url)))
    assert [one.result for one in done] == ["updated"] * 4 + ["created"] * 2
    waits = {name: within_seconds(one) for name, one in there().items() if "no commit" in name}
    of_run = "recpoint: no commit of run "
    assert waits == {
        "recpoint: no commit": 2000.0,  # not before the slow one may be silent so long
        of_run + slow.id: 2000.0,
        of_run + quiet.id: 3 * interval,
        of_run + silent.id: 3 * interval,
    }
    assert silent.url in next(x.description for x in find() if x.name == of_run + silent.id)

    # An automation counts from the first event that the server has seen after it was made.
    told: list[float] = []
    began = time.monotonic()
    emit("committed", quiet.id, quiet.url)
    emit("committed", silent.id, silent.url)

    def fired() -> set[str] | None:
        if not told or time.monotonic() - told[-1] > interval / 5:
            told.append(time.monotonic())
            emit("committed", quiet.id, quiet.url)
        with get_client(sync_client=True) as client:
            body = {"filter": {"event": {"name": ["prefect.automation.triggered"]}}, "limit": 50}
            events = client.request("POST", "/events/filter", json=body).json()["events"]
        names = {one["resource"]["prefect.resource.name"] for one in events}
        return names if of_run + silent.id in names else None

    names = until(fired, seconds=PATIENCE_SECONDS + 3 * interval)
    assert time.monotonic() - began > 3 * interval and len(told) > 1
    assert not names & {"recpoint: no commit", of_run + slow.id}
    assert len(remove()) == 7 and not there()
    return quiet, names
