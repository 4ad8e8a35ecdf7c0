"""What the benchmark of faults makes of its trials: the rule for outcomes, and its instruments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks.faults import FAULTS, KEYS, SYSTEMS, _put_figures
from benchmarks.faults.acts import Ended
from benchmarks.faults.io_faults import Cause, compiled
from benchmarks.faults.matrix import system_of
from benchmarks.faults.system import digest, truth
from benchmarks.faults.systems.torch_save import falsified_zip
from benchmarks.faults.table import markdown
from benchmarks.faults.trials import spread
from benchmarks.faults.verdicts import Outcome, Verdict, is_clear, judge, worst
from benchmarks.report import Report

NAMES = ["step_2", "model.pt"]


def raised(kind: str, text: str) -> Ended:
    return Ended(error_type=kind, error=text)


def test_there_are_25_faults_and_nine_systems() -> None:
    assert (len(FAULTS), len(SYSTEMS)) == (25, 9)
    for name in SYSTEMS:
        system = system_of(name)
        assert system.name == name
        assert system.lacks.keys() <= FAULTS.keys()


@pytest.mark.parametrize(
    ("ended", "clear"),
    [
        (raised("RuntimeError", "step_2/data is damaged"), True),
        (raised("RuntimeError", "something is damaged"), False),
        (raised("KeyError", "step_2"), False),
        (raised("OSError", "model.pt: short"), True),
        (Ended(signal=11), False),
        (Ended(hung=True), False),
    ],
)
def test_an_error_is_clear_if_it_names_what_is_damaged(ended: Ended, clear: bool) -> None:
    assert is_clear(ended, NAMES) is clear


@pytest.mark.parametrize(
    ("ended", "acknowledged", "outcome"),
    [
        (Ended(ok=True, value=(2, "two")), False, Outcome.SURVIVED),
        (Ended(ok=True, value=(1, "one")), False, Outcome.SILENT),
        (Ended(ok=True, value=(2, "neither")), False, Outcome.SILENT),
        (raised("RuntimeError", "step_2"), False, Outcome.CLEAR),
        (raised("RuntimeError", ""), False, Outcome.UNCLEAR),
        (raised("RuntimeError", "step_2"), True, Outcome.SILENT),
    ],
)
def test_the_outcome_of_a_restore(ended: Ended, acknowledged: bool, outcome: Outcome) -> None:
    verdict = judge(
        ended,
        newest=["two"],
        other_states={"one": "the state of step 1"},
        names=NAMES,
        acknowledged=acknowledged,
    )
    assert verdict.outcome is outcome


def test_the_worst_trial_decides() -> None:
    trials = [Verdict(Outcome.SURVIVED), Verdict(Outcome.SILENT, "gone"), Verdict(Outcome.CLEAR)]
    assert worst(trials) == Verdict(Outcome.SILENT, "1 of 3; gone")
    absent = Verdict(Outcome.NOT_APPLICABLE, "no part")
    assert worst([absent]) == absent
    assert worst([absent, trials[0]]).outcome is Outcome.SURVIVED


def test_places_are_spread_and_hold_the_last() -> None:
    assert spread(5, 0) == spread(5, 9) == [1, 2, 3, 4, 5]
    found = spread(130, 12)
    assert len(found) == 12 and found[0] == 1 and found[-1] == 130


def cell(outcome: Outcome) -> dict[str, str]:
    return {"outcome": outcome.value, "why": "because of a | in /tmp/x/y/step_2"}


def test_figures_and_table_count_the_same() -> None:
    found = {
        "recpoint": {
            "not_run": "",
            "versions": {"recpoint": "0.1.0"},
            "cells": {"bit flip": cell(Outcome.SURVIVED), "truncation": cell(Outcome.SURVIVED)},
        },
        "torch_save": {
            "not_run": "",
            "versions": {"torch": "2.13.0"},
            "cells": {"bit flip": cell(Outcome.SILENT), "truncation": cell(Outcome.NOT_APPLICABLE)},
        },
        "orbax": {"not_run": "No module named 'orbax'", "versions": {}, "cells": {}},
    }
    report = Report(name="faults", columns=("fault",))
    _put_figures(report, found)
    assert [report.figures[key] for key in KEYS] == [0, 2, 2, 1, 0]
    text = markdown(["bit flip", "truncation"], found)
    assert "| bit flip | survived | **silent loss** |" in text
    assert "| Orbax | No module named 'orbax' |" in text
    assert "because of a / in …/step\\_2 |" in text


def test_states_are_the_same_bits_for_all() -> None:
    assert digest(truth((1, 2))) == digest(truth((1, 2)))
    assert digest(truth((1, 2))) != digest(truth((1, 3)))


def test_what_is_falsified_is_what_a_reader_meets(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(4), "b": torch.zeros(4)}, path)
    falsified_zip(path, "overlapping ranges")
    with zipfile.ZipFile(path) as archive:
        offsets = [one.header_offset for one in archive.infolist() if "/data/" in one.filename]
    assert len(set(offsets)) == 1
    assert not torch.load(path, weights_only=True)["a"].any()


PROGRAM = """
import ctypes, os, sys
from benchmarks.faults.io_faults import IoFault, Cause, arm, done
from pathlib import Path
below = Path(sys.argv[1])
arm(IoFault(cause=Cause(int(sys.argv[2])), at=int(sys.argv[3]), below=below))
for number in range(3):
    (below / str(number)).write_bytes(b"x")
os.rename(below / "0", below / "9")
print(done())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = compiled(tmp_path_factory.mktemp("library"))
    if found is None:
        pytest.skip("no C compiler")
    return found


def struck(library: Path, below: Path, cause: Cause, at: int) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", PROGRAM, str(below), str(cause.value), str(at)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, start_new_session=True
    )


def test_operations_are_counted(library: Path, tmp_path: Path) -> None:
    done = struck(library, tmp_path, Cause.COUNT, 0)
    assert done.stdout == "7\n", done.stderr  # three times open and write, and a rename


@pytest.mark.parametrize(("at", "left"), [(1, []), (3, ["0"]), (7, ["0", "1", "2"])])
def test_a_kill_comes_before_its_operation(
    library: Path, tmp_path: Path, at: int, left: list[str]
) -> None:
    done = struck(library, tmp_path, Cause.KILL_GROUP, at)
    assert done.returncode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_an_operation_fails_once(library: Path, tmp_path: Path) -> None:
    done = struck(library, tmp_path, Cause.FAIL, 2)
    assert "Input/output error" in done.stderr and done.returncode == 1
