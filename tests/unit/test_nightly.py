"""Each test that `make test` leaves out belongs to a part of `make nightly`, and goes on there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import nightly
from tests.nightly import MARKED, PARTS, NightlyPart, PartRecord, in_order, read_record

ROOT = Path(__file__).resolve().parents[2]


def test_each_mark_names_a_part_and_each_part_has_tests() -> None:
    named = {
        part
        for path in ROOT.glob("tests/**/test_*.py")
        for part in re.findall(r'mark\.nightly\("([^"]+)"\)', path.read_text())
    }
    assert named == MARKED.keys()
    assert all(PARTS[name].files for name in MARKED)
    assert all((ROOT / file).is_file() for part in PARTS.values() for file in part.files)


def test_each_watched_path_exists() -> None:
    paths = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name, part in PARTS.items():
        for watched in part.watches:
            assert any(path.startswith(watched) for path in paths), (name, watched)


@pytest.mark.parametrize(
    ("option", "counts"),
    [
        ([], r"no tests collected \(\d+ deselected\)"),
        (["--nightly", "ray"], r"no tests collected \(\d+ deselected\)"),
        (["--nightly", "wheel"], r"^\d+ tests collected"),
        (["--nightly", "all"], r"^\d+ tests collected"),
    ],
)
def test_a_part_is_selected_by_its_name(option: list[str], counts: str) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command += ["tests/unit/test_wheel.py", *option]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert re.search(counts, done.stdout, re.MULTILINE), done.stdout + done.stderr


def test_what_a_change_touches_comes_first() -> None:
    assert in_order(PARTS, ["kernels/README.md"], "0")[0] in {"aarch64", "sanitizers", "triton"}
    assert in_order(PARTS, ["tests/flows/test_parts_on_dask.py"], "0")[0] == "dask"
    assert in_order(PARTS, ["embeddings/server/tcp.py"], "0")[0] == "ray"
    assert sorted(in_order(PARTS, [], "0")) == sorted(PARTS)
    assert in_order(PARTS, [], "0") != in_order(PARTS, [], "1")


def test_a_part_that_passed_is_not_repeated_and_a_failed_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The goals are two of make that take no time, one of which fails."""
    parts = {"good": NightlyPart(goal=("help",)), "bad": NightlyPart(goal=("no-such-goal",))}
    parts["long"] = NightlyPart(goal=("help",), seconds=10_000.0)
    monkeypatch.setattr(nightly, "PARTS", parts)
    monkeypatch.setattr(nightly, "LOGS", ROOT / "build" / "nightly-test")
    record = tmp_path / "record.md"
    arguments = ["--minutes", "10", "--record", str(record), "--since", "HEAD"]
    for _ in range(2):
        assert nightly.main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("bad: failed: exit 2, ") for line in lines) == 2
    assert sum(line.startswith("long: not run: 10000 s do not fit into ") for line in lines) == 2
    good = [line for line in lines if line.startswith("good: passed")]
    assert len(good) == 2
    outcomes = read_record(record.read_text())
    assert (
        outcomes.keys() == {"good", "bad"}
        and outcomes["good"].passed
        and not outcomes["bad"].passed
    )
    changed = outcomes["good"].commit.endswith("+")
    assert good[1].endswith("not repeated") is not changed


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    lines = {
        "ray": PartRecord("ray", "passed: 64 passed, 2 skipped", 312.0, "2026-11-28", "450951b"),
        "dask": PartRecord("dask", "failed: exit 2", 4.0, "2026-11-28", "450951b+"),
    }
    nightly.write_record(tmp_path / "record.md", lines)
    assert read_record((tmp_path / "record.md").read_text()) == lines


@pytest.mark.parametrize(
    ("code", "output", "outcome"),
    [
        (0, "== 3 passed, 1 skipped in 4.1s ==", "passed: 3 passed, 1 skipped"),
        (0, "== 5 skipped in 3.2s ==\nwhat", "skipped: 5 skipped"),
        (2, "== 1 failed, 2 passed in 61.00s (0:01:01) ==", "failed: 1 failed, 2 passed"),
        (2, "make: no rule", "failed: exit 2"),
        (0, "sanitize: nothing was found", "passed"),
        (0, "sanitize: not run, since there is no g++", "skipped: not run, since there is no g++"),
    ],
)
def test_the_outcome_is_that_of_the_tests(code: int, output: str, outcome: str) -> None:
    assert nightly.outcome_of(code, output) == outcome
