"""What the page says of a run: figures as texts and charts, without a browser."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recpoint.catalog.overview.alarms import Alarm
from recpoint.catalog.overview.keys_of_tables import KeyedTableUse, KeysOfTables
from recpoint.catalog.overview.overview import (
    Age,
    CheckpointFacts,
    Ended,
    ExpiringManifest,
    Failure,
    Generation,
    Lag,
    RunOverview,
    ServersSeen,
    StagedRisk,
    Totals,
)
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.overview.width_mix import WidthMix
from recpoint.catalog.run.run import Run
from recpoint.dashboards import page, server_texts, texts
from recpoint.dashboards.loss_texts import loss_text
from recpoint.dashboards.watched_runs import RunView, WatchedRun, WatchedRuns
from recpoint.format.manifest import CopiedAhead, MeasuredLoss
from recpoint.format.naming import GENERATION_KEY, MANIFEST_KEY
from recpoint.format.retention_records import Plan, PlannedManifest, PlannedRules, RuleBest
from recpoint.format.servers import AllServers, ServerFacts
from recpoint.units import duration_text
from tests.catalog_builder import build, new_run, publish, tables
from tests.interposed_store import InterposedStore
from tests.polling import until

NOTHING = RunOverview(
    url="/runs/a",
    run="5e" * 16,
    refreshed_ms=0,
    checkpoints=(),
    live_checkpoints=0,
    superseded_checkpoints=0,
    last_validated=None,
    generation=None,
    restarts=0,
    ended=None,
    gone_ms=None,
    staged=None,
    servers=None,
    lag=Lag(
        seconds=None,
        silent_seconds=0.0,
        at_risk_seconds=0.0,
        at_risk_batches=None,
        overdue=False,
        clock="store",
        interval_seconds=None,
        intervals=None,
    ),
    restore=None,
    totals=Totals(
        checkpoints=0, stored_bytes=0, full_bytes=0, stall_seconds=0.0, trained_seconds=None
    ),
    plan=None,
    expiring=(),
    failures=(),
)


def facts(step: int, **changed: object) -> CheckpointFacts:
    fields: dict[str, object] = {
        "step": step,
        "generation": 1,
        "kind": "increment",
        "chain_length": 2,
        "state": "committed",
        "validation": None,
        "pins": (),
        "expires": False,
        "merged": False,
        "snapshot_ms": 1000 * step,
        "staged_ms": 1000 * step + 1,
        "committed_ms": 1000 * step + 500,
        "stall_seconds": 0.002,
        "lag_seconds": 0.5,
        "interval_seconds": 10.0,
        "interval_batches": 10,
        "at_risk_seconds": 10.5,
        "at_risk_batches": 11,
        "stored_bytes": 100,
        "full_bytes": 1000,
        "error": None,
    }
    return CheckpointFacts(**(fields | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 ms"),
        (0.0123, "12.3 ms"),
        (59.94, "59.9 s"),
        (61.0, "1 min 1 s"),
        (3600.0, "1 h 0 min"),
        (47 * 3600.0, "47 h 0 min"),
        (49 * 3600.0, "2 d 1 h"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration_text(seconds) == words


def test_a_run_of_which_nothing_is_known_has_texts_for_everything() -> None:
    values = texts.field_texts(NOTHING)
    assert tuple(values) == texts.FIELDS
    for chart in (page.lag_chart, page.stall_chart, page.bytes_chart):
        options, words = chart(drawn_of())
        assert words.endswith(".") and all(not one["data"] for one in options["series"])


def test_a_loss_says_how_well_it_is_known() -> None:
    began = Generation(
        number=1, host="h", pid=1, created_ms=0, age=Age(9.0, "store"), restored_step=None
    )
    lag = replace(NOTHING.lag, at_risk_seconds=90.0, at_risk_batches=1)
    going_on = replace(NOTHING, generation=began, lag=lag)
    assert texts.risk_text(NOTHING) == texts.NONE
    assert texts.risk_text(going_on) == "about 1 min 30 s, 1 batch"
    overdue = replace(going_on, lag=replace(lag, overdue=True, at_risk_batches=None))
    assert texts.risk_text(overdue) == "up to 1 min 30 s"
    ended = replace(going_on, ended=Ended(step=7, reason="finished", ended_ms=0))
    assert texts.risk_text(ended) == "1 min 30 s, 1 batch"
    stored = replace(ended, lag=replace(lag, at_risk_seconds=0.0, at_risk_batches=0))
    assert texts.risk_text(stored) == "nothing: ended, all is stored"
    uncounted = replace(
        ended,
        ended=Ended(step=0, reason="finished", ended_ms=0),
        lag=replace(lag, at_risk_batches=None),
    )
    assert texts.risk_text(uncounted) == "up to 1 min 30 s, no batch was counted"
    assert "counted no batch" in texts.expectation_text(uncounted)
    gone = replace(going_on, gone_ms=1_760_000_000_000)
    assert texts.risk_text(gone) == "about 1 min 30 s, 1 batch"
    at_once = replace(gone, lag=replace(lag, at_risk_seconds=0.016, at_risk_batches=0))
    assert texts.risk_text(at_once) == "up to 5.0 s"  # it gives a sign of life as often
    assert "the trainer is gone" in texts.expectation_text(gone)
    assert "gone since 2025-10-09 08:53:20 UTC" in texts.field_texts(gone)["Trainer"]


def test_what_is_staged_is_told_beside_what_the_host_would_take_with_it() -> None:
    began = Generation(
        number=1, host="h", pid=7, created_ms=0, age=Age(90.0, "store"), restored_step=None
    )
    staged = StagedRisk(step=1_200, at_risk_seconds=3.0, at_risk_batches=12)
    lag = replace(NOTHING.lag, at_risk_seconds=79.0, overdue=True)
    alive = replace(NOTHING, generation=began, staged=staged, lag=lag)
    assert texts.staged_text(NOTHING) == ""
    assert texts.staged_text(alive) == (
        "step 1,200 is staged on this host and not stored yet; if only the trainer dies, and "
        "recpoint agent stores it, about 3.0 s of training since its cut (12 batches) is lost, "
        "instead of up to 1 min 19 s if this host dies"
    )
    assert texts.staged_text(alive) in texts.figures(alive)[texts.FIGURES[0]].note
    gone = texts.staged_text(replace(alive, gone_ms=1))
    assert gone.endswith(
        "once recpoint agent has stored it, about 3.0 s of training since its cut (12 batches) is "
        "lost"
    )
    ended = replace(alive, ended=Ended(step=1_200, reason="finished", ended_ms=0))
    stored = replace(ended, staged=replace(staged, at_risk_seconds=0.0, at_risk_batches=0))
    assert texts.staged_text(stored).endswith("has stored it, nothing is lost")


def server(number: int, **changed: object) -> ServerFacts:
    fields: dict[str, object] = {
        "number": number,
        "host": "node",
        "pid": 40 + number,
        "address": "127.0.0.1:4000",
        "state": "up",
        "rows": 1_000,
        "known_rows": 1_000,
        "memory_bytes": 64_000,
        "disk_bytes": 0,
        "lost_ms": None,
        "whole_ms": None,
    }
    return ServerFacts.model_validate(fields | changed)


LOST = {"state": "lost", "known_rows": 0, "memory_bytes": None, "lost_ms": 1_700_000_000_000}
REBUILT = {**LOST, "state": "recovering", "known_rows": 419}
AGAIN = {"lost_ms": 1_700_000_000_000, "whole_ms": 1_700_000_005_900}


def served(*each: ServerFacts, parity: int = 1, gave_up: bool = False, **seen: Any) -> RunOverview:
    servers = AllServers(parity=parity, has_given_up=gave_up, each=each)
    given: dict[str, Any] = {"servers": servers, "age_seconds": 0.4, "trainer_lives": True} | seen
    return replace(NOTHING, checkpoints=(facts(10),), servers=ServersSeen(**given))


@pytest.mark.parametrize(
    ("overview", "words"),
    [
        (NOTHING, ""),
        (
            served(server(1), server(2)),
            "All is whole, with its parity. Any one server may be lost.",
        ),
        (
            served(server(1), server(2, **AGAIN), parity=2),
            "All is whole, with its parity. Any 2 servers may be lost. Server 2 was lost, and is "
            "whole again since 2023-11-14 22:13:25 UTC, after 5.9 s.",
        ),
        (
            served(server(1), server(2, **REBUILT)),
            "Server 2 is being rebuilt: 41 %. Losing another one now goes back to the newest "
            "checkpoint.",
        ),
        (
            replace(served(server(1, **LOST)), checkpoints=()),
            "Server 1 is lost, and another process is to take its place. Losing another one now "
            "ends this training, which has no checkpoint yet.",
        ),
        (
            served(server(1), server(2, **REBUILT), parity=2),
            "Server 2 is being rebuilt: 41 %. One more server may be lost meanwhile.",
        ),
        (
            served(server(1, **LOST), server(2, **REBUILT), gave_up=True),
            "Servers 1, 2: more lost at a time than parity makes up for. That goes back to the "
            "newest checkpoint.",
        ),
        (
            served(server(1), parity=0),
            "There is no parity: the loss of a server goes back to the newest checkpoint.",
        ),
        (
            served(server(1), server(2, **LOST), parity=0),
            "Server 2 does not answer. There is no parity: that goes back to the newest "
            "checkpoint.",
        ),
        (
            served(server(1), server(2, **REBUILT), trainer_lives=False, age_seconds=185.0),
            "The trainer does not run any more. This is what it saw last, 3 min 5 s ago.",
        ),
        (
            served(server(1), age_seconds=16.0),
            "The trainer has said nothing for 16.0 s. This is what it saw last.",
        ),
        (
            served(server(1), servers=None, error="servers.json: found \u202eno JSON"),
            "What the trainer says of its servers cannot be read. servers.json: found "
            "\\u202eno JSON",
        ),
    ],
)
def test_how_servers_are_in_one_sentence(overview: RunOverview, words: str) -> None:
    assert server_texts.servers_text(overview) == words
    seen = overview.servers
    told_first = bool(seen and seen.servers and seen.trainer_lives and seen.servers.not_whole)
    assert server_texts.lost_servers_text(overview) == (f"Embedding servers: {words}" * told_first)


def test_a_server_that_is_rebuilt_says_how_far_it_is() -> None:
    assert server_texts.server_row(server(2, **REBUILT), 1) == (
        *("2", "being rebuilt: 41 %", "419 of 1,000", "–", "node", "127.0.0.1:4000", "42"),
        "2023-11-14 22:13:20",
    )
    almost = server(2, **{**REBUILT, "rows": 10**9, "known_rows": 10**9 - 1})
    assert server_texts.server_row(almost, 1)[1] == "being rebuilt: 99 %"
    assert server_texts.server_row(server(1, **AGAIN, disk_bytes=5_000_000), 1) == (
        *("1", "whole", "1,000", "64 kB, 5 MB on disk", "node", "127.0.0.1:4000", "41"),
        "2023-11-14 22:13:20, whole again 22:13:25",
    )
    assert server_texts.server_row(server(1, **LOST), 0)[1:4] == ("lost", "1,000", "–")
    assert server_texts.server_row(server(1), 0)[1] == "up"


def drawn_of(*checkpoints: CheckpointFacts) -> page.Drawn:
    """What the charts draw of these checkpoints, newest first, without a window."""
    return page.drawn(replace(NOTHING, checkpoints=checkpoints), page.WINDOWS["all"])


def test_charts_run_from_old_to_new_and_leave_out_what_cannot_be_read() -> None:
    checkpoints = (
        facts(30, at_risk_seconds=99.0),
        facts(20, error="damaged", stored_bytes=0, full_bytes=0),
        facts(10, at_risk_seconds=None, at_risk_batches=None, stall_seconds=0.009),
    )
    options, words = page.lag_chart(drawn_of(*checkpoints))
    assert options["series"][0]["data"] == [[30_500, 99.0]] and "before step 30" in words
    options, words = page.stall_chart(drawn_of(*checkpoints))
    assert options["series"][0]["data"] == [[10_500, 9.0], [30_500, 2.0]] and "at step 10" in words
    assert "took 200 B" in page.bytes_chart(drawn_of(*checkpoints))[1]
    assert "ahead" not in words


def test_the_stall_names_the_rows_that_were_copied_before_it() -> None:
    copied = CopiedAhead(rows_before=992, bytes_before=9, rows_in_stall=8, bytes_in_stall=1)
    ahead = facts(20, copied_ahead=copied)
    assert texts.checkpoint_row(ahead)[-1] == "99.2% of 1,000 rows copied before the stall"
    _, words = page.stall_chart(drawn_of(facts(30, copied_ahead=copied), ahead, facts(10)))
    assert words.endswith("2 checkpoints read ahead: 99.2% of 2,000 rows copied before the stall.")


def test_a_checkpoint_of_many_widths_says_how_many_rows_have_which() -> None:
    mixed = WidthMix(mean_bits=2.345, row_shares=(("2", 0.8), ("8", 0.19), ("exact", 0.01)))
    (*_, notes) = texts.checkpoint_row(facts(1, widths=mixed))
    assert notes == "2.35 bits a value (of the rows, 80.0% in 2, 19.0% in 8, 1.0% exact)"
    one_width = WidthMix(mean_bits=4.0, row_shares=(("4", 1.0),))
    assert "bits" not in texts.checkpoint_row(facts(1, widths=one_width))[-1]


def test_the_cost_of_rounding_says_what_was_measured_and_what_is_allowed() -> None:
    shown = MeasuredLoss(
        increase=(1e-4).hex(),
        price=(1e-9).hex(),
        low=(-2e-6).hex(),
        high=(8e-5).hex(),
        predicted=(4e-5).hex(),
        batches=312,
    )
    assert loss_text(shown) == (
        "Rounding costs -0.0002% to 0.008% of the loss (95% confidence, 312 measured batches); "
        "0.01% is allowed. Predicted are 0.004%. The price λ of a bit is 1e-09."
    )
    wide = shown.model_copy(update={"price": None, "predicted": None})
    assert loss_text(wide) == (
        "Rounding all rows to 8 bits costs -0.0002% to 0.008% of the loss (95% confidence, 312 "
        "measured batches); 0.01% is allowed. Until a price of a bit is shown to hold, no row has "
        "fewer than 8 bits."
    )
    exact = wide.model_copy(update={"high": (0.25).hex()})
    assert loss_text(exact).endswith("That is too much, so rows are stored exactly.")
    unknown = wide.model_copy(update={"low": None, "high": None, "batches": 1})
    assert loss_text(unknown).startswith(
        "What rounding costs in loss is not known after 1 measured batch; 0.01% is allowed."
    )
    notes = [texts.checkpoint_row(facts(1, loss=loss))[-1] for loss in (shown, exact, unknown)]
    assert notes == [
        "rounding costs at most 0.008% of the loss",
        "8 bits would cost up to 25% of the loss",
        "cost of rounding not known yet",
    ]


def test_keys_of_tables_are_counted_for_the_newest_checkpoint() -> None:
    tables = tuple(
        KeyedTableUse(f"table {n}", capacity_rows=2000, used=n, inserted=1234, evicted=5, refused=0)
        for n in range(12)
    )
    two = facts(1, keyed=KeysOfTables(tables[:2], 0))
    assert texts.checkpoint_row(two)[-1] == "1 key in 4,000 rows"
    newest = replace(NOTHING, checkpoints=(two,), live_checkpoints=1)
    assert texts.field_texts(newest)["Keys of tables"] == (
        "table 0: 0 in 2,000 rows; 1,234 inserted, 5 evicted, 0 refused. "
        "table 1: 1 in 2,000 rows; 1,234 inserted, 5 evicted, 0 refused."
    )
    many = replace(newest, checkpoints=(facts(1, keyed=KeysOfTables(tables, 30)),))
    shown = texts.field_texts(many)["Keys of tables"]
    assert shown.count("inserted") == 10 and shown.endswith(" And 32 more.")


def test_rows_have_a_cell_for_each_heading() -> None:
    assert len(texts.checkpoint_row(facts(1))) == len(texts.CHECKPOINT_HEADINGS)
    row = texts.checkpoint_row(facts(1, error="x\x1b[31m", state="damaged"))
    assert len(row) == len(texts.CHECKPOINT_HEADINGS) and row[-1] == "x\\x1b[31m"
    marked = ExpiringManifest(key="manifests/1", reason="", age=Age(5.0, "store"))
    assert texts.expiring_row(marked)[1:] == (
        "its mark has not been read, or cannot be",
        "5.0 s ago",
    )
    plan = Plan(
        run="0a" * 16,
        rules=PlannedRules(
            last=10,
            within_ms=0,
            hourly=0,
            daily=7,
            weekly=0,
            monthly=0,
            best=(RuleBest(metric="auc", direction="max", count=3),),
            require_validated=True,
        ),
        grace_ms=86_400_000,
        keep=1,
        mark=0,
        wait=0,
        delete=1,
        manifests=(
            PlannedManifest(manifest=MANIFEST_KEY.of(20, 1), action="keep", reason="newest"),
            PlannedManifest(
                manifest=MANIFEST_KEY.of(10, 1), action="delete", reason="no rule\x1b[31m"
            ),
        ),
        host="host",
        pid=7,
        planned_ms=1000,
    )
    rows = texts.plan_rows(plan, 50)
    assert rows[0] == (MANIFEST_KEY.of(10, 1), "is deleted", "no rule\\x1b[31m")
    assert [len(row) for row in rows] == [len(texts.PLAN_HEADINGS)] * 2
    assert texts.plan_rows(plan, 1) == rows[:1] and texts.plan_rows(None, 50) == []
    assert texts.plan_text(plan, 61_000) == (
        "Rules: the newest 10, one of each of 7 days, the 3 best by max auc; what is pinned; "
        "nothing goes unless a validated one stays. Grace 24 h 0 min. Planned 1 min 0 s ago by "
        "process 7 of host: 1 stay, 0 to mark, 0 wait, 1 to delete."
    )
    failure = Failure(kind="chain", subject="a", cause="b", when_ms=None, next_step="c")
    assert texts.failure_row(failure) == (texts.NONE, "a", "b", "c")


def said_of(seen: RunView, now: float = 0.0) -> list[str]:
    """What a page says is wrong with a run, each with what to do."""
    return [f"{cause} Next: {step}" for cause, step in texts.alerts(seen, now)]


def test_what_stands_for_a_run_is_the_worst_of_it(tmp_path: Path) -> None:
    run = WatchedRun(str(tmp_path / "run"), interval_seconds=1.0, intervals=3.0)
    assert run.seen.standing == "reading"
    assert run.refresh().standing == "no answer"
    first = run.seen.failing_since
    assert run.refresh().failing_since == first and run.seen.version == 2
    assert texts.run_row(run)[0] == "NO ANSWER"
    new_run(tmp_path / "run")
    assert run.refresh().standing == "starting" and run.seen.error is None
    assert len(texts.run_row(run)) == len(texts.RUN_HEADINGS)
    alarm = Alarm("no_commit", "late", "look")
    run.seen = replace(run.seen, alarms=(alarm, alarm))
    assert texts.run_row(run)[0] == "ALARM (2)"
    assert texts.alerts(run.seen, time.monotonic()) == [texts.Alert("Late.", "look")] * 2
    assert "1 of 1 run needs a look" in texts.summary_text([run])


def test_a_catalog_that_is_damaged_is_an_alarm_and_no_outage(tmp_path: Path) -> None:
    there = new_run(tmp_path / "run")
    publish(there, build(there, tables(), step=5, generation=there.claim(None).generation))
    watched = WatchedRun(str(tmp_path / "run"), interval_seconds=1.0, intervals=1e9)
    assert watched.refresh().standing == "fine"
    (tmp_path / "run" / GENERATION_KEY.of(1)).unlink()
    assert watched.refresh().standing == "alarm"
    assert texts.run_row(watched)[0] == "ALARM"
    (said,) = said_of(watched.seen)
    assert (
        said.startswith("The catalog cannot be read")
        and f"recpoint relink {tmp_path / 'run'} 1" in said
    )
    fresh = WatchedRun(str(tmp_path / "run"), interval_seconds=1.0, intervals=1e9)
    assert fresh.refresh().standing == "alarm" and "1 of 1 run needs a look" in texts.summary_text(
        [fresh]
    )


def test_so_is_a_run_that_has_lost_what_makes_it_one(tmp_path: Path) -> None:
    new_run(tmp_path / "run").claim(None)
    (tmp_path / "run" / "run.json").unlink()
    watched = WatchedRun(str(tmp_path / "run"), interval_seconds=1.0, intervals=1e9)
    assert watched.refresh().standing == "alarm"
    (said,) = said_of(watched.seen)
    assert f"recpoint bring-back {tmp_path / 'run'}" in said


def test_a_run_that_another_takes_the_place_of_is_that_one(tmp_path: Path) -> None:
    run = WatchedRun(str(tmp_path / "run"), interval_seconds=1.0, intervals=3.0)
    for _ in range(2):
        there = new_run(tmp_path / "run")
        there.claim(None)
        seen = run.refresh()
        assert seen.overview is not None and seen.overview.run == there.id
        shutil.rmtree(tmp_path / "run")


def test_an_error_that_nobody_expected_is_no_answer(tmp_path: Path) -> None:
    there = new_run(tmp_path / "run")
    run = WatchedRun(there.url, interval_seconds=1.0, intervals=3.0)
    assert run.refresh().standing == "starting"

    def before(call: str, key: str) -> None:
        raise MemoryError("no room for a listing")

    run._watch = RunWatch(Run(InterposedStore(there.store, before=before), there.record))
    assert run.refresh().standing == "no answer"
    assert "no room for a listing" in " ".join(said_of(run.seen))
    assert run.refresh().standing == "starting"  # the thread has lived on


def test_a_look_that_does_not_come_back_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = new_run(tmp_path / "run")
    (run,) = WatchedRuns([there.url], interval_seconds=1.0, intervals=3.0).runs
    asked, answer = threading.Event(), threading.Event()

    def before(call: str, key: str) -> None:
        asked.set()
        answer.wait()

    run._watch = RunWatch(Run(InterposedStore(there.store, before=before), there.record))
    run.start()
    try:
        assert asked.wait(60) and not run.seen.overdue
        later = time.monotonic() + 3600
        monkeypatch.setattr("recpoint.dashboards.watched_runs.time.monotonic", lambda: later)
        assert run.seen.standing == "no answer"
        assert "has not come back" in " ".join(said_of(run.seen, later))
        monkeypatch.undo()
        answer.set()
        until(lambda: run.seen.standing == "starting")
    finally:
        answer.set()
        run.stop()


def test_a_credential_in_a_url_is_not_shown() -> None:
    (run,) = WatchedRuns(["s3://key:secret@bucket/run"] * 2, interval_seconds=1, intervals=3).runs
    row = " ".join(texts.run_row(run))
    run.refresh()
    row += " ".join(texts.run_row(run)) + " ".join(said_of(run.seen))
    assert "secret" not in row and "key:" not in row and "NO ANSWER" in row


def test_nothing_seen_has_no_age() -> None:
    assert RunView().age_seconds() is None


def test_a_window_decides_the_time_axis_and_what_is_drawn() -> None:
    now_ms = 10_000_000
    checkpoints = tuple(facts(step) for step in (9_999, 9_000, 5_000))
    seen = replace(NOTHING, checkpoints=checkpoints, live_checkpoints=3, refreshed_ms=now_ms)
    shown = page.drawn(seen, page.WINDOWS["1h"])
    assert (shown.first_ms, shown.last_ms) == (now_ms - 3_600_000, now_ms)
    assert [one.step for one in shown.checkpoints] == [9_000, 9_999]
    options, words = page.stall_chart(shown)
    assert (options["xAxis"]["min"], options["xAxis"]["max"]) == (shown.first_ms, now_ms)
    assert words.startswith("Stall of each of the 2 checkpoints of the last hour: ")
    # Older checkpoints of the window have not been read.
    more = page.drawn(replace(seen, live_checkpoints=4), page.WINDOWS["6h"])
    assert "the newest 3 checkpoints of the last 6 h" in page.stall_chart(more)[1]
    ahead = page.drawn(replace(seen, refreshed_ms=0), page.WINDOWS["1h"])
    assert ahead.last_ms == 9_999_500


@pytest.mark.parametrize(
    ("words", "commands"),
    [
        ("recpoint check /runs/a", ["recpoint check /runs/a"]),
        ("recpoint validate s3://b/a --step 12", ["recpoint validate s3://b/a --step 12"]),
        ("recpoint relink '/runs/of a' 1, then go on", ["recpoint relink '/runs/of a' 1"]),
        ("recpoint bring-back /runs/a; or a backup", ["recpoint bring-back /runs/a"]),
        ("is the trainer alive, and recpoint agent running?", ["recpoint agent"]),
        ("recpoint retain /runs/a finishes it", ["recpoint retain /runs/a"]),
        ("see the log of the trainer before it", []),
    ],
)
def test_commands_are_told_from_words(words: str, commands: list[str]) -> None:
    found = texts.spans(words)
    assert "".join(piece for piece, _ in found) == words
    assert [piece for piece, command in found if command] == commands


def test_an_alarm_says_cause_and_next_step_once() -> None:
    cause = "m.json: m.json: found no JSON; expected JSON. Next: recpoint check /a, and go back"
    seen = RunView(alarms=(Alarm("manifest_damaged", cause, "recpoint check /a"),))
    assert texts.alerts(seen, 0.0) == [
        ("m.json: found no JSON; expected JSON.", "recpoint check /a, and go back")
    ]
    chain = Alarm("chain_broken", "chain of 7: it ends. Next: look", "recpoint check /a --step 7")
    assert texts.alerts(RunView(alarms=(chain,)), 0.0) == [
        ("Chain of 7: it ends.", "recpoint check /a --step 7; look")
    ]
