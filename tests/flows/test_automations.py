"""Automations as code against a real server: names are identities, and a block is told."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from datetime import datetime
from pathlib import Path

import pytest
from prefect.blocks.notifications import SlackWebhook
from prefect.client.orchestration import get_client
from prefect.events.actions import DoNothing, SendNotification
from prefect.events.schemas.automations import Automation, EventTrigger
from prefect.settings import PREFECT_API_URL
from pydantic import SecretStr

from recpoint.catalog.persist import persist
from recpoint.catalog.run.run import Run
from recpoint.errors import SettingsError
from recpoint.flows.automations import AlertSettings, apply, automations, find_ours, remove_ours
from recpoint.format.history import History
from recpoint.tasks.reports import emit
from tests.catalog_builder import new_run, tables
from tests.forked_program import run_module
from tests.job_builder import stage
from tests.polling import PATIENCE_SECONDS, SERVER_SECONDS, until

pytestmark = pytest.mark.usefixtures("prefect_api")

ROOT = Path(__file__).resolve().parents[2]


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
    results = ["created", "kept", "created", "created"]
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
    assert [one.enabled for one in find_ours()] == [True, True, False, True]

    with get_client(sync_client=True) as client:
        client.create_automation(other)
        with pytest.raises(SettingsError, match="no block slack-webhook/nobody"):
            apply(AlertSettings(notify="slack-webhook/nobody"))
        # Nothing was done: that one is there twice.
        assert len(client.read_automations()) == 1 + len(after)
    apply(AlertSettings(notify="none"))
    assert all(isinstance(one.actions[-1], DoNothing) for one in there().values())
    assert len(remove_ours()) == 4 and there().keys() == {"somebody else's"}
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


def recpoint_automations(*arguments: str) -> str:
    """What `recpoint automations` says, on the server of this test."""
    url = PREFECT_API_URL.value()
    assert url is not None
    environment = {**os.environ, "PREFECT_API_URL": url, "PYTHONPATH": str(ROOT / "src")}
    command = ("recpoint", "automations", *arguments)
    done = run_module(command, environment=environment, directory=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def applied(*arguments: str) -> dict[str, tuple[str, float | None, str | None]]:
    """What became of each automation, after which time it acts now, and whom it tells."""
    done = json.loads(recpoint_automations("apply", *arguments, "--json"))["automations"]
    said = {one["name"]: one for one in done}
    assert said.keys() == there().keys()
    for name, one in there().items():
        of_server = within_seconds(one)
        assert said[name]["after_seconds"] == (of_server if of_server > 60 else None)
        if name != "recpoint: publish":
            assert said[name]["notifies"] == whom(one)
    return {
        name.removeprefix("recpoint: "): (one["result"], one["after_seconds"], one["notifies"])
        for name, one in said.items()
    }


def whom(automation: Automation) -> str:
    """The block that an automation tells, as the server has it."""
    first, *others = reversed(automation.actions)
    assert [one.type for one in others] in ([], ["change-flow-run-state"])
    if isinstance(first, DoNothing):
        return "nobody"
    assert isinstance(first, SendNotification)
    with get_client(sync_client=True) as client:
        block = client.read_block_document(first.block_document_id)
    assert block.block_type is not None
    return f"{block.block_type.slug}/{block.name}"


@pytest.mark.nightly("prefect")
def test_what_is_not_given_again_stays_as_it_is(tmp_path: Path) -> None:
    """The commands of docs/how-to/deployments.md, one after the other."""
    training, other = "slack-webhook/training", "slack-webhook/other"
    for name in ("training", "other"):
        SlackWebhook(url=SecretStr("https://slack.invalid/x")).save(name, overwrite=True)
    with get_client(sync_client=True) as client:
        flow = client.create_flow_from_name("publish")
        client.create_deployment(flow_id=flow, name="recpoint-publish")
    run = run_every(tmp_path, seconds=100.0)
    page = (ROOT / "docs" / "how-to" / "deployments.md").read_text(encoding="utf-8")
    given = re.findall(r"(?m)^recpoint automations apply (.*)$", page)
    first, of_one = (line.split() for line in given)
    assert first == f"--no-commit 30m --notify {training} --publish validated".split()

    dead, silent, of_run = "flow run without a process", "no commit", f"no commit of run {run.id}"
    alerts: dict[str, tuple[str, float | None, str | None]] = {
        silent: ("created", 1800.0, training),
        "validation failed": ("created", None, training),
        "checkpoint rejected": ("created", None, training),
        dead: ("created", 600.0, training),
    }
    assert applied(*first) == {**alerts, "publish": ("created", None, None)}
    kept = {name: ("kept", *rest) for name, (_, *rest) in alerts.items()}
    kept["publish"] = ("kept", None, None)
    created = {**kept, of_run: ("created", 300.0, training)}
    assert applied(run.url, *of_one[1:]) == created
    # Nor is an alert of a run that is named again put back, or one that is not named.
    changed = {of_run: ("updated", 500.0, training)}
    assert applied(run.url, "--intervals", "5") == {**kept, **changed}
    kept[of_run] = ("kept", 500.0, training)
    assert applied(run.url) == kept
    others = "--no-heartbeat 11m --no-commit 45m".split()
    assert recpoint_automations("apply", *others).splitlines() == [
        f"updated: recpoint: {silent}, after 45 min 0 s, notifies {training} as before",
        f"kept: recpoint: validation failed, notifies {training} as before",
        f"kept: recpoint: checkpoint rejected, notifies {training} as before",
        f"updated: recpoint: {dead}, after 11 min 0 s, notifies {training} as before",
        f"kept: recpoint: {of_run}, after 8 min 20 s as before, notifies {training} as before",
        "kept: recpoint: publish",
    ]

    # Whoever else is to be told is told by all of them.
    kept |= {dead: ("kept", 660.0, training), silent: ("kept", 2700.0, training)}
    for block, told in ((other, other), ("none", "nobody")):
        new = {name: ("updated", seconds, told) for name, (_, seconds, _) in kept.items()}
        assert applied("--notify", block) == {**new, "publish": ("kept", None, None)}
    remove_ours()


def longest_silence(run: Run) -> float:
    """The longest time between two commits of a run that the server heard of, in seconds."""
    with get_client(sync_client=True) as client:
        resource = {"id": [f"recpoint.run.{run.id}"]}
        body = {"filter": {"resource": resource, "order": "ASC"}, "limit": 50}
        events = client.request("POST", "/events/filter", json=body).json()["events"]
    heard = [datetime.fromisoformat(one["received"]) for one in events]
    return max((b - a).total_seconds() for a, b in itertools.pairwise(heard))


@pytest.mark.slow
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
    # The time for all stays at what the slow one, which is not named again, may take.
    assert [one.result for one in done] == ["kept"] * 4 + ["created"] * 2 + ["kept"]
    waits = {name: within_seconds(one) for name, one in there().items() if "no commit" in name}
    of_run = "recpoint: no commit of run "
    assert waits == {
        "recpoint: no commit": 2000.0,  # not before the slow one may be silent so long
        of_run + slow.id: 2000.0,
        of_run + quiet.id: 3 * interval,
        of_run + silent.id: 3 * interval,
    }
    assert silent.url in next(x.description for x in find_ours() if x.name == of_run + silent.id)

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

    names = until(fired, longest_pause=SERVER_SECONDS, seconds=PATIENCE_SECONDS + 3 * interval)
    assert time.monotonic() - began > 3 * interval and len(told) > 1
    assert not names & {"recpoint: no commit", of_run + slow.id}
    assert len(remove_ours()) == 7 and not there()
    return quiet, names
