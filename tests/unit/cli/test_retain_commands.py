"""retain, pin, unpin and metric on real committed checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recpoint.catalog.check.check import check
from recpoint.format.naming import MANIFEST_KEY, PIN_KEY
from tests.unit.cli.conftest import Invoke, SavedRun


@pytest.fixture(autouse=True)
def staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty staging area of this test's own."""
    monkeypatch.setenv("RECPOINT_STAGING", str(tmp_path / "staging"))


def files(run: SavedRun) -> set[str]:
    return {str(path.relative_to(run.directory)) for path in run.directory.rglob("*.*")}


#: Whether anything was validated is not what these are about.
ANY = ("--no-require-validated",)
LAST = ("--keep-last", 1, *ANY)


def test_nothing_is_marked_before_a_checkpoint_was_validated(
    recpoint: Invoke, saved_run: SavedRun
) -> None:
    before = files(saved_run)
    ended = recpoint("retain", saved_run.directory, "--keep-last", 1, "--json")
    assert ended.code == 1 and ended.json["error"] == "NothingValidated"
    assert f"recpoint validate {saved_run.directory}" in ended.json["next_step"]
    assert files(saved_run) == before
    assert recpoint("validate", saved_run.directory).code == 0
    ended = recpoint("retain", saved_run.directory, "--keep-last", 1, "--json")
    assert ended.code == 0 and ended.json["marked"] == [MANIFEST_KEY.of(25, 1)]


def test_a_dry_run_prints_each_manifest_with_its_reason(
    recpoint: Invoke, saved_run: SavedRun
) -> None:
    before = files(saved_run)
    ended = recpoint("retain", saved_run.directory, *LAST, "--dry-run", "--json")
    assert ended.code == 0 and files(saved_run) == before
    document = ended.json
    assert document["dry_run"] and document["grace_seconds"] == 86400
    rows = {row["step"]: row for row in document["manifests"]}
    assert [row["step"] for row in document["manifests"]] == [30, 25, 20, 10]
    assert {step: row["action"] for step, row in rows.items()} == {
        30: "keep",
        25: "mark",
        20: "keep",
        10: "keep",
    }
    assert rows[25]["reason"] == "superseded, and no rule keeps it"
    assert "one of the last 1" in rows[30]["reason"] and "needs it" in rows[10]["reason"]
    table = recpoint("retain", saved_run.directory, *LAST, "--dry-run").stdout
    assert "3 to keep, 1 to mark, 0 to wait, 0 to delete" in table
    assert "superseded, and no rule keeps it" in table


def test_the_manifests_of_one_checkpoint_are_told_apart(
    recpoint: Invoke, saved_run: SavedRun
) -> None:
    assert recpoint("consolidate", saved_run.directory, "--links", 2).code == 0
    assert recpoint("consolidate", saved_run.directory).code == 0
    table = recpoint("retain", saved_run.directory, *LAST, "--dry-run").stdout
    lines = [line.split("keep")[0].split() for line in table.splitlines() if "newest" in line]
    assert sorted(lines) == [
        ["30", "2"],
        ["30", "2", "after", "10"],
        ["30", "2", "into", "a", "full"],
    ]


def test_it_marks_and_waits_for_the_grace(recpoint: Invoke, saved_run: SavedRun) -> None:
    ended = recpoint("retain", saved_run.directory, *LAST, "--grace", "2h", "--json")
    assert ended.json["marked"] == [MANIFEST_KEY.of(25, 1)] and ended.json["deleted"] == []
    table = recpoint("retain", saved_run.directory, *LAST, "--grace", "2h").stdout
    assert "2.0 h of grace are left" in table and "marked 0, deleted 0 manifests" in table
    assert check(saved_run.run, level="full").ok


def test_pins_are_set_shown_and_removed(recpoint: Invoke, saved_run: SavedRun) -> None:
    ended = recpoint(
        "pin", saved_run.directory, 25, "--generation", 1, "--name", "demo", "--why", "x", "--json"
    )
    assert ended.code == 0 and ended.json["name"] == "demo" and ended.json["why"] == "x"
    assert PIN_KEY.of(25, 1, "demo") in files(saved_run)
    rows = recpoint("retain", saved_run.directory, *LAST, "--dry-run", "--json").json
    assert [row["action"] for row in rows["manifests"]] == ["keep"] * 4
    assert "pinned (demo)" in rows["manifests"][1]["reason"]
    listed = recpoint("list", saved_run.directory, "--all", "--json").json["checkpoints"]
    assert [entry["pins"] for entry in listed] == [[], ["demo"], [], []]
    assert "pinned (demo)" in recpoint("list", saved_run.directory, "--all").stdout
    # Its name is left out where nobody gave it one.
    assert recpoint("pin", saved_run.directory, 30).code == 0
    rows = recpoint("retain", saved_run.directory, *LAST, "--dry-run", "--json").json
    assert "pinned" in rows["manifests"][0]["reason"].split(", ")
    newest = recpoint("list", saved_run.directory).stdout.splitlines()[2]
    assert newest.rstrip().endswith("pinned")
    assert recpoint("pin", saved_run.directory, 30, "--name", "x").code == 0
    assert "pinned (pin, x)" in recpoint("list", saved_run.directory).stdout
    # Superseded, and yet found by its pin.
    assert recpoint("unpin", saved_run.directory, 25, "--name", "demo").code == 0
    assert PIN_KEY.of(25, 1, "demo") not in files(saved_run)
    ended = recpoint("unpin", saved_run.directory, 20, "--json")
    assert ended.code == 1 and ended.json["error"] == "NothingToRestore"


def test_a_listing_says_what_is_marked(recpoint: Invoke, saved_run: SavedRun) -> None:
    recpoint("retain", saved_run.directory, *LAST)
    listed = recpoint("list", saved_run.directory, "--all", "--json").json["checkpoints"]
    assert [entry["expires"] for entry in listed] == [False, True, False, False]
    assert "superseded, expires" in recpoint("list", saved_run.directory, "--all").stdout


def test_the_best_by_a_metric(recpoint: Invoke, saved_run: SavedRun) -> None:
    assert recpoint("metric", saved_run.directory, 10, "auc=0.75", "--json").json["value"] == 0.75
    rows = recpoint(
        "retain", saved_run.directory, "--best-by", "max:auc:2", *ANY, "--dry-run", "--json"
    ).json["manifests"]
    assert "best by max auc (0.75)" in rows[3]["reason"]
    for wrong in ("auc", "auc=", "auc=x", "auc=nan", "auc=-inf", "=1"):
        assert recpoint("metric", saved_run.directory, 10, wrong).code == 2


def test_a_name_that_no_key_can_hold_is_refused_by_what_was_typed(
    recpoint: Invoke, saved_run: SavedRun
) -> None:
    for command in ("pin", "unpin"):
        ended = recpoint(command, saved_run.directory, 30, "--name", "A b")
        assert ended.code == 2
        assert "--name" in ended.stderr and "'A b' is no name of 1 to 64 of" in ended.stderr
    ended = recpoint("metric", saved_run.directory, 30, "AUC=0.5")
    assert ended.code == 2
    assert "METRIC" in ended.stderr and "'AUC' is no name of 1 to 64 of" in ended.stderr


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([], "SettingsError"),
        (["--keep-last", "0"], "SettingsError"),
        (["--keep-last", "1", "--grace", "59m"], "SettingsError"),
        (["--best-by", "auc"], "UsageError"),
        (["--best-by", "max:auc:x"], "UsageError"),
        (["--best-by", "max:auc:0"], "SettingsError"),
        (["--keep-within", "1y"], "UsageError"),
    ],
)
def test_what_is_refused(
    recpoint: Invoke, saved_run: SavedRun, options: list[str], error: str
) -> None:
    ended = recpoint("retain", saved_run.directory, *options, "--json")
    assert ended.code == 2 and json.loads(ended.stdout)["error"] == error


def test_it_deletes_nothing_while_a_manifest_cannot_be_read(
    recpoint: Invoke, saved_run: SavedRun
) -> None:
    (saved_run.directory / MANIFEST_KEY.of(20, 1)).write_bytes(b"damaged")
    ended = recpoint("retain", saved_run.directory, *LAST, "--json")
    assert ended.code == 1 and ended.json["error"] == "RetentionRefused"
    assert str(saved_run.directory) in ended.json["next_step"]


def test_without_a_rule_the_next_command_is_named(recpoint: Invoke, saved_run: SavedRun) -> None:
    for wrong in ([], ["--keep-last", "-1"]):
        ended = recpoint("retain", saved_run.directory, *wrong, "--json")
        assert ended.code == 2
        expected = f"recpoint retain {saved_run.directory} --keep-last 10 --dry-run"
        assert ended.json["next_step"] == expected


def test_a_checkpoint_that_is_not_there_or_cannot_be(recpoint: Invoke, saved_run: SavedRun) -> None:
    for command in (["pin"], ["unpin"], ["metric"]):
        rest = ["auc=0.5"] if command == ["metric"] else []
        for where, code in (
            (["99"], 1),
            (["99", "--generation", "1"], 1),
            (["10", "--generation", "0"], 2),
            (["10000000000000"], 2),
        ):
            ended = recpoint(*command, saved_run.directory, where[0], *rest, *where[1:], "--json")
            assert ended.code == code, (command, where)
            assert ended.json["error"] in ("NothingToRestore", "ObjectNotFound", "UsageError")
    assert not list(saved_run.run.store.list("pins/"))
