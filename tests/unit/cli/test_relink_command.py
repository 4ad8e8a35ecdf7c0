from __future__ import annotations

from pathlib import Path

import pytest

from recpoint.format.naming import GENERATION_KEY
from tests.catalog_builder import build, new_run, publish, tables
from tests.unit.cli.conftest import Invoke


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """10 and 20 of generation 1, 30 of generation 2, which went on from 10; its record is lost."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    first = publish(run, build(run, tables(), step=10, generation=1))
    publish(run, build(run, tables(), step=20, generation=1))
    run.claim(first.ref)
    publish(run, build(run, tables(), step=30, generation=2))
    run.store.delete(GENERATION_KEY.of(2))
    return tmp_path / "run"


def test_every_command_says_what_is_lost(recpoint: Invoke, url: Path) -> None:
    checked = recpoint("check", url)
    assert checked.code == 1 and "damaged" in checked.stdout
    said = recpoint("lag", url)
    assert (
        said.code == 4 and "GenerationRecordLost" in said.stdout and "--from-nothing" in said.stdout
    )
    (told,) = recpoint("lag", url, "--json").json["runs"]
    assert f"recpoint relink {url} 2" in told["next_step"]
    for command in (
        ["list"],
        ["restore", "--to", "x.pt"],
        ["publish"],
        ["retain", "--keep-last=1"],
    ):
        name, *rest = command
        ended = recpoint(name, url, *rest, "--json")
        assert ended.code == 4, command
        assert ended.json["subject"] == GENERATION_KEY.of(2)
        assert f"recpoint relink {url} 2" in ended.json["next_step"]
        assert "generation 2" in ended.json["found"]


def test_all_are_listed_although_nobody_knows_which_count(recpoint: Invoke, url: Path) -> None:
    ended = recpoint("list", url, "--all", "--json")
    assert ended.code == 4 and ended.json["error"] == "GenerationRecordLost"
    assert [(one["step"], one["live"]) for one in ended.json["checkpoints"]] == [
        (30, None),
        (20, None),
        (10, None),
    ]
    shown = recpoint("list", url, "--all")
    assert shown.code == 4 and "superseded" not in shown.stdout
    assert f"recpoint relink {url} 2" in shown.stdout


def test_what_is_said_counts(recpoint: Invoke, url: Path) -> None:
    said = recpoint("relink", url, "2", "--step", "10", "--json")
    assert said.code == 0
    assert said.json["generation"] == 2 and said.json["restored"]["step"] == 10
    assert said.json["restored"]["generation"] == 1
    steps = [one["step"] for one in recpoint("list", url, "--json").json["checkpoints"]]
    assert steps == [30, 10]
    again = recpoint("relink", url, "2", "--step", "10", "--json")
    assert again.code == 2 and again.json["found"] == "a generation record"


def test_from_nothing(recpoint: Invoke, url: Path) -> None:
    said = recpoint("relink", url, "2", "--from-nothing")
    assert said.code == 0 and "it went on from nothing" in said.stdout
    assert recpoint("check", url).code == 0


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], 2),
        (["--step", "10", "--from-nothing"], 2),
        (["--from-nothing", "--generation", "1"], 2),
        (["--step", "15"], 1),
        (["--step", "15", "--generation", "1"], 1),
        (["--step", "30", "--generation", "2"], 2),
    ],
)
def test_what_cannot_be_is_refused(
    recpoint: Invoke, url: Path, options: list[str], code: int
) -> None:
    ended = recpoint("relink", url, "2", *options)
    assert ended.code == code and ended.stderr
    assert recpoint("check", url).code == 1


def test_an_increment_tells_from_where_its_trainer_cannot_have_come(
    recpoint: Invoke, tmp_path: Path
) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    publish(run, build(run, tables(), step=10, generation=1))
    second = publish(run, build(run, tables(), step=20, generation=1))
    run.claim(second.ref)
    publish(run, build(run, tables(), step=30, generation=2, parent=second))
    run.store.delete(GENERATION_KEY.of(2))
    for said in (["--from-nothing"], ["--step", "10"]):
        ended = recpoint("relink", tmp_path / "run", 2, *said)
        assert ended.code == 2 and "step 20 (generation 1)" in ended.stderr
    assert recpoint("relink", tmp_path / "run", 2, "--step", "20").code == 0
