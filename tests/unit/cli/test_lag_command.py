"""recpoint lag: what a run would lose now, for people, scripts and cron."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.contract import now_ms
from tests.agent_process import AgentProcess
from tests.catalog_builder import new_run
from tests.forked_program import ForkedProgram, be_code
from tests.polling import PATIENCE_SECONDS, until
from tests.training_builder import Place, checkpointer, simple_training, train
from tests.unit.cli.conftest import Invoke, SavedRun

ROOT = Path(__file__).resolve().parents[3]


def test_it_says_what_the_overview_says(recpoint: Invoke, saved_run: SavedRun) -> None:
    before = time.monotonic()
    ended = recpoint("lag", saved_run.directory, "--json")
    (run,) = ended.json["runs"]
    seen = RunWatch(saved_run.run).refresh()
    assert ended.code == 0
    assert (run["url"], run["run"]) == (saved_run.run.url, saved_run.run.id)
    slack = time.monotonic() - before + 0.1
    assert run["at_risk_seconds"] == pytest.approx(seen.lag.at_risk_seconds, abs=slack)
    assert (run["step"], run["checkpoints"], run["restarts"]) == (30, 3, 1)
    assert run["manifests_to_read"] == 3
    assert run["ended"] is run["validated"] is None and run["above"] is False
    table = recpoint("lag", saved_run.directory)
    assert table.code == 0
    assert "going on" in table.stdout and "never" in table.stdout


def test_a_url_is_never_cut(
    recpoint: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / ("of-a-long-name-" * 8)
    new_run(directory)
    monkeypatch.setenv("COLUMNS", "80")
    assert str(directory) in recpoint("lag", directory).stdout.replace("\n", "")


def test_it_fits_80_columns_and_shows_more_where_there_is_room(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = recpoint("lag", saved_run.directory, tmp_path / "none").stdout
    monkeypatch.setenv("COLUMNS", "80")
    narrow = recpoint("lag", saved_run.directory, tmp_path / "none").stdout
    monkeypatch.setenv("COLUMNS", "200")
    widest = recpoint("lag", saved_run.directory).stdout.splitlines()
    error = [line for line in narrow.splitlines() if "NothingToRestore" in line]
    assert len(error) == 1 and error[0].startswith(f"{tmp_path / 'none'}: ")
    url, heading, row = str(saved_run.directory), "training  newest  would be lost", "going on"
    on_lines = "\n".join(url[at : at + 80] for at in range(0, len(url), 80))
    assert f"\n{on_lines}\n" in narrow.replace("\r", "") and heading in narrow
    (line,) = [line for line in narrow.splitlines() if line.startswith(row)]
    assert len(line) <= 80 and "never" in line and "30" in line.split()
    assert len(widest) == 2 and "0.1 ms" in widest[1] and widest[1].startswith(url)
    assert "validated" in wide


def test_above_the_limit_it_ends_with_1(recpoint: Invoke, saved_run: SavedRun) -> None:
    assert recpoint("lag", saved_run.directory, "--max-seconds", 1e9).code == 0
    above = recpoint("lag", saved_run.directory, "--max-seconds", 0, "--json")
    assert above.code == 1 and above.json["runs"][0]["above"] is True


def test_a_run_that_has_ended_would_lose_nothing(recpoint: Invoke, tmp_path: Path) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    training = simple_training()
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 3)
    ended = recpoint("lag", place.run, "--max-seconds", 0, "--json")
    (run,) = ended.json["runs"]
    assert ended.code == 0
    assert (run["at_risk_seconds"], run["step"], run["ended"]) == (0, 3, "finished")


def test_one_run_that_cannot_be_read_hides_no_other(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path
) -> None:
    damaged = new_run(tmp_path / "damaged")
    damaged.claim(None)
    for record in (tmp_path / "damaged" / "generations").iterdir():
        record.write_bytes(b"{")
    secret = "s3://key:secret@bucket/run"
    ended = recpoint("lag", tmp_path / "none", secret, saved_run.directory, "--json")
    none, refused, good = ended.json["runs"]
    assert ended.code == 2
    assert none["error"] == "NothingToRestore" and refused["error"] == "SettingsError"
    assert good["step"] == 30
    assert "secret" not in ended.stdout
    assert recpoint("lag", tmp_path / "none").code == 1
    both = recpoint("lag", tmp_path / "none", tmp_path / "damaged")
    assert both.code == 4 and "generations" in both.stdout.replace("\n", "")


def test_a_run_without_a_checkpoint_loses_what_was_trained(
    recpoint: Invoke, tmp_path: Path
) -> None:
    run = new_run(tmp_path / "run")
    early = recpoint("lag", tmp_path / "run")
    assert early.code == 0 and "not started" in early.stdout
    run.claim(None)
    ended = recpoint("lag", tmp_path / "run", "--max-seconds", 0, "--json")
    assert ended.code == 1
    assert ended.json["runs"][0]["step"] is None


def test_a_training_that_counted_no_batch_is_told_what_to_do(
    recpoint: Invoke, tmp_path: Path
) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    training = simple_training()
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        training.batch()  # and no step()
    ended = recpoint("lag", place.run, "--max-seconds", 0, "--json")
    (run,) = ended.json["runs"]
    assert ended.code == 1
    assert (run["ended"], run["step"], run["at_risk_batches"]) == ("finished", None, None)
    assert run["at_risk_seconds"] > 0
    (alarm,) = run["alarms"]
    assert "counted no batch: nothing is stored" in alarm["text"]
    assert "call step() after each batch" in alarm["next_step"]
    shown = " ".join(recpoint("lag", place.run).stdout.split())
    assert "no batch was counted" in shown and "all is stored" not in shown
    listed = " ".join(recpoint("list", place.run).stdout.split())
    assert "no checkpoint yet" in listed and "call step() after each batch" in listed


@contextmanager
def killed(place: Place, *, interval_batches: int = 1000) -> Iterator[ForkedProgram]:
    """A trainer that has committed nothing after 3 batches; killed at the end of the block."""
    program = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from tests.training_builder import Place, checkpointer, simple_training, train\n"
        "training = simple_training()\n"
        "place = Place(sys.argv[1], Path(sys.argv[2]))\n"
        f"ckpt = checkpointer(training, place, interval_batches={interval_batches})\n"
        "ckpt.restore()\n"
        "train(training, ckpt, 3)\n"
        f"while ckpt.stats.staged < 3 // {interval_batches}: pass\n"
        "print('trains', flush=True)\n"
        "signal.pause()\n"
    )
    log = place.staging.with_name(f"{Path(place.run).name}.log")
    trainer = ForkedProgram(
        be_code,
        (program, place.run, str(place.staging)),
        environment=os.environ,
        output=(log, log),
        directory=ROOT,
    )
    try:
        until(lambda: log.read_text().endswith("trains\n"))
        yield trainer
    finally:
        trainer.kill()
        trainer.wait()


def test_a_trainer_that_was_killed_before_its_first_commit_is_gone(
    recpoint: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    monkeypatch.setenv("RECPOINT_STAGING", str(place.staging))
    with killed(place) as trainer:
        alive = recpoint("lag", place.run, "--json").json["runs"][0]
        assert (alive["trainer_gone"], alive["alarms"]) == (False, [])
        assert "going on" in recpoint("lag", place.run).stdout
    (run,) = recpoint("lag", place.run, "--json").json["runs"]
    assert run["trainer_gone"] is True and run["ended"] is None
    (alarm,) = run["alarms"]
    assert f"process {trainer.pid} of" in alarm["text"]
    assert "is gone and did not say that it ended (last sign of life" in alarm["text"]
    assert alarm["text"].endswith("; no checkpoint is stored")
    assert "start the training again" in alarm["next_step"]
    shown = " ".join(recpoint("lag", place.run).stdout.split())
    assert "gone" in shown and "going on" not in shown
    assert "is gone and did not say" in " ".join(recpoint("list", place.run).stdout.split())
    # Another staging area, as on another host, does not know it.
    monkeypatch.setenv("RECPOINT_STAGING", str(tmp_path / "elsewhere"))
    assert recpoint("lag", place.run, "--json").json["runs"][0]["trainer_gone"] is False


def test_what_a_killed_trainer_has_lost_stands_still(
    recpoint: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    monkeypatch.setenv("RECPOINT_STAGING", str(place.staging))
    began = time.monotonic()
    with killed(place):
        pass
    trained_seconds = time.monotonic() - began
    time.sleep(1.0)
    (first,) = recpoint("lag", place.run, "--json").json["runs"]
    (later,) = recpoint("lag", place.run, "--json").json["runs"]
    assert first["at_risk_seconds"] == later["at_risk_seconds"] <= trained_seconds
    assert first["last_sign_of_life_ms"] == later["last_sign_of_life_ms"] > 1.7e12
    assert "last sign of life" in first["alarms"][0]["text"] and first["overdue"] is False


def test_what_is_staged_is_not_lost_with_the_trainer(
    recpoint: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    monkeypatch.setenv("RECPOINT_STAGING", str(place.staging))
    with killed(place, interval_batches=2):
        (alive,) = recpoint("lag", place.run, "--json").json["runs"]
        assert (alive["step"], alive["staged"]["step"]) == (None, 2)
        assert 0 < alive["staged"]["at_risk_seconds"] < alive["at_risk_seconds"]
        shown = " ".join(recpoint("lag", place.run).stdout.split())
        assert "step 2 is staged on this host and not stored yet; if only the trainer dies" in shown
        assert alive["staged"]["agent_error"] is None
        status = {"alive_ms": now_ms(), "failures": 3, "last_error": "StoreFull: x. Next: free it"}
        StagedRun(place.run_directory).status_path.write_text(json.dumps(status))
        (full,) = recpoint("lag", place.run, "--json").json["runs"]
        assert full["staged"]["agent_error"] == "StoreFull: x. Next: free it"
    (gone,) = recpoint("lag", place.run, "--json").json["runs"]
    (alarm,) = gone["alarms"]
    assert "no checkpoint is stored, and step 2 is staged" in alarm["text"]
    assert "run recpoint agent, which stores what is staged, then start" in alarm["next_step"]
    with AgentProcess(place.staging, tmp_path / "log", once=True) as agent:
        assert agent.process.wait(PATIENCE_SECONDS) == 0
    (stored,) = recpoint("lag", place.run, "--json").json["runs"]
    assert (stored["step"], stored["staged"], stored["trainer_gone"]) == (2, None, True)
    assert stored["at_risk_seconds"] <= gone["at_risk_seconds"]


def test_slots_of_a_killed_trainer_are_named_with_what_frees_them(
    recpoint: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    monkeypatch.setenv("RECPOINT_STAGING", str(place.staging))
    assert recpoint("info", "--json").json["left_behind"] == []
    with killed(place):
        assert recpoint("info", "--json").json["left_behind"] == []
    (left,) = recpoint("info", "--json").json["left_behind"]
    slots = StagedRun(place.run_directory).slots_directory.iterdir()
    assert left == {"run_url": place.run, "size_bytes": sum(one.stat().st_size for one in slots)}
    assert left["size_bytes"] > 0
    advice = f"recpoint sweep {place.run} --grace 1h"
    monkeypatch.setenv("COLUMNS", "2000")
    told = recpoint("info").stdout
    assert advice in told and f"recpoint sweep {place.run} --discard-staged" in told
    with AgentProcess(place.staging, tmp_path / "log", once=True) as agent:
        assert agent.process.wait(PATIENCE_SECONDS) == 0
        assert agent.logged(advice) == 1
    other = Place(str(tmp_path / "other"), place.staging)
    with killed(other):
        pass
    with AgentProcess(place.staging, tmp_path / "log of both", once=True) as agent:
        assert agent.process.wait(PATIENCE_SECONDS) == 0
        assert agent.logged("of slots of 2 runs wait for new starts") == 1
        assert agent.logged("recpoint sweep") == 0
    assert f"recpoint sweep {other.run} --grace 1h" in recpoint("info").stdout
    old = time.time() - 7200
    for path in place.run_directory.rglob("*"):
        os.utime(path, (old, old))
    assert recpoint("sweep", place.run, "--grace", "1h").code == 0
    (left,) = recpoint("info", "--json").json["left_behind"]
    assert left["run_url"] == other.run


def test_watching_shows_each_look_until_it_is_interrupted(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path
) -> None:
    assert recpoint("lag", saved_run.directory, "--watch", 1, "--json").code == 2
    seen = tmp_path / "seen"
    with seen.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "recpoint", "lag", str(saved_run.directory), "--watch", "0.1"],
            stdout=file,
            stderr=subprocess.PIPE,
            env={**os.environ, "FORCE_COLOR": "1", "TERM": "xterm"},
        )
    try:
        until(lambda: seen.read_text().count("going on") > 2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 130 and b"interrupted" in said
    finally:
        process.kill()
        process.communicate()
