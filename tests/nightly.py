"""Runs the parts of `make nightly`: all that `make test` leaves out.

    python -m tests.nightly [PART ...] [--minutes N] [--since COMMIT] [--record FILE]

Prints one line for each part and writes one to the record. A part that has passed on the same files
is not repeated, so a run that was stopped goes on where it was. The output of a part is in
build/nightly.

A test belongs to a part by a mark: `pytestmark = pytest.mark.nightly("ray")`. Some combinations of
parameters belong to the part `combinations` (tests/combinations.py).
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tests.changed import changed_files, touched_tests

__all__ = [
    "MARKED",
    "PARTS",
    "PartRecord",
    "NightlyPart",
    "commit_name",
    "in_order",
    "main",
    "outcome_of",
    "read_record",
    "write_record",
]

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "nightly"
RECORD = ROOT / "tests" / "NIGHTLY.md"

_HEAD = """# The last run of each part of `make nightly`

`make nightly` writes this table. Seconds depend on what else the machine did.

| part | outcome | seconds | date | commit |
|---|---|---:|---|---|
"""


@dataclass(frozen=True, kw_only=True)
class NightlyPart:
    """What `make nightly PART=name` runs.

    Attributes:
        goal: of make, with its variables.
        files: the tests that it runs, as paths from the root.
        watches: beginnings of paths: a change below them touches the part, whatever imports them.
        seconds: an estimate until the record has a figure.
        installs: it installs packages, so a run with a limit of minutes leaves it out.
    """

    goal: tuple[str, ...]
    files: tuple[str, ...] = ()
    watches: tuple[str, ...] = ()
    seconds: float = 300.0
    installs: bool = False


@dataclass(frozen=True)
class PartRecord:
    """One line of the record."""

    part: str
    outcome: str
    seconds: float
    date: str
    commit: str

    @property
    def passed(self) -> bool:
        """Whether the part need not be repeated on the same files."""
        return self.outcome.startswith("passed")


class MarkedPart(NamedTuple):
    """What is known of a part beside its tests: see `NightlyPart`.

    `target` is of make; another than `unit` installs packages first.
    """

    seconds: float
    watches: tuple[str, ...]
    target: str = "unit"


#: The parts that tests belong to by their marks. The seconds are of two idle cores.
MARKED: Mapping[str, MarkedPart] = {
    "aarch64": MarkedPart(60, ("kernels/",)),
    "accelerate": MarkedPart(40, ("examples/",)),
    "azure": MarkedPart(240, ("catalog/store/",), target="azure"),
    "benchmarks": MarkedPart(710, ("benchmarks/",)),
    "bounds": MarkedPart(100, ("trainer_plugin/loss/",)),
    "browser": MarkedPart(150, ("dashboards/",)),
    "dask": MarkedPart(120, ("flows/", "tasks/")),
    "demo": MarkedPart(500, ("dashboards/demo", "examples/")),
    "deployments": MarkedPart(250, ("flows/", "prefect.yaml")),
    "kills": MarkedPart(280, ("catalog/", "flows/", "trainer_plugin/")),
    "loops": MarkedPart(200, ("trainer_plugin/",)),
    "plain-demo": MarkedPart(45, ("dashboards/demo", "examples/", "flows/", "trainer_plugin/")),
    "prefect": MarkedPart(100, ("flows/",)),
    "prometheus": MarkedPart(160, ("dashboards/",)),
    "ray": MarkedPart(600, ("embeddings/",)),
    "runbook": MarkedPart(200, ("docs/how-to/", "flows/")),
    "sink_budget": MarkedPart(400, ("serving/sinks/",)),
    "sinks": MarkedPart(900, ("serving/sinks/",)),
    "sinks_in_files": MarkedPart(400, ("serving/sinks/",)),
    "site": MarkedPart(120, ("docs/", "mkdocs.yml")),
    "triton": MarkedPart(95, ("kernels/",)),
    "tutorials": MarkedPart(120, ("docs/tutorials/", "examples/")),
    "wheel": MarkedPart(240, ("build_backend/", "pyproject.toml", "MANIFEST.in")),
}

#: Of files whose tests take every place of a fault; others are taken to need ten minutes.
_FAULT_SECONDS = {
    "interrupted_calls": 3_500.0,
    "trainers_killed": 2_700.0,
    "killed_on_ray": 3_300.0,
    "cached_kills": 330.0,
    "every_call_may_fail": 60.0,
}


@functools.cache
def _test_files() -> Mapping[str, str]:
    """Return the text of each test file by its path from the root."""
    paths = sorted(ROOT.glob("tests/**/test_*.py"))
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def _files_with(pattern: str) -> tuple[str, ...]:
    return tuple(path for path, text in _test_files().items() if re.search(pattern, text))


def _parts() -> dict[str, NightlyPart]:
    parts = {}
    for name, (seconds, watches, target) in MARKED.items():
        files = _files_with(rf'mark\.nightly\("{name}"\)')
        arguments = f"PYTEST_ARGS=--nightly {name} {' '.join(files)}"
        parts[name] = NightlyPart(
            goal=(target, arguments),
            files=files,
            watches=watches,
            seconds=seconds,
            installs=target != "unit",
        )
    examples = _files_with(r"@given\(|RuleBasedStateMachine|example_counts")
    examples += tuple(path for path in _test_files() if path.startswith("tests/unit/kernels/"))
    parts["examples"] = NightlyPart(
        goal=("unit", "ALL_EXAMPLES=1", f"PYTEST_ARGS={' '.join(examples)}"),
        files=examples,
        seconds=530.0,
    )
    combined = _files_with(r"\bcombinations\(")
    parts["combinations"] = NightlyPart(
        goal=("unit", f"PYTEST_ARGS=--nightly combinations {' '.join(combined)}"),
        files=combined,
        seconds=160.0,
    )
    for file in _files_with(r"FAULTS_EVERY|\bat_steps\b"):
        name = Path(file).stem.removeprefix("test_")
        arguments = f"PYTEST_ARGS=--nightly all {file}"
        parts[f"faults-{name}"] = NightlyPart(
            goal=("unit", "FAULTS=1", arguments),
            files=(file,),
            seconds=_FAULT_SECONDS.get(name, 600.0),
        )
    parts["byte-flips"] = NightlyPart(
        goal=("byte-flips",), watches=("format/", "catalog/check/"), seconds=2_800.0
    )
    parts["sanitizers"] = NightlyPart(goal=("sanitize",), watches=("kernels/",))
    parts["fuzzers"] = NightlyPart(
        goal=("fuzz", "FUZZ_SECONDS=60"), watches=("format/",), installs=True
    )
    parts["tutorials-installed"] = NightlyPart(
        goal=("tutorials",), watches=("docs/tutorials/",), seconds=2_500.0, installs=True
    )
    parts["installations"] = NightlyPart(
        goal=("installations",), watches=("build_backend/",), seconds=600.0, installs=True
    )
    return dict(sorted(parts.items()))


PARTS: Mapping[str, NightlyPart] = _parts()


def read_record(text: str) -> dict[str, PartRecord]:
    """Return the lines of a record by part."""
    lines = {}
    for row in text.splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if row.startswith("| ") and len(cells) == 5 and cells[0] != "part":
            lines[cells[0]] = PartRecord(cells[0], cells[1], float(cells[2]), cells[3], cells[4])
    return lines


def write_record(path: Path, lines: Mapping[str, PartRecord]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        f"| {line.part} | {line.outcome} | {line.seconds:.0f} | {line.date} | {line.commit} |\n"
        for _, line in sorted(lines.items())
    ]
    path.write_text(_HEAD + "".join(rows))


def in_order(parts: Mapping[str, NightlyPart], changed: Sequence[str], commit: str) -> list[str]:
    """Return the names of the parts: those that the change touches first.

    These are the parts that watch a changed path, and then those whose tests import a changed
    module. Among equals the commit draws the order, so that runs with a limit of minutes take
    different parts.

    Args:
        parts: by name.
        changed: paths from the root.
        commit: what the order is drawn by.
    """
    near, far = touched_tests(changed)

    def rank(name: str) -> tuple[int, int]:
        part = parts[name]
        watched = any(
            path.removeprefix("src/recpoint/").startswith(part.watches) for path in changed
        )
        if watched:
            nearness = 0
        elif near.intersection(part.files):
            nearness = 1
        else:
            nearness = 2 if far.intersection(part.files) else 3
        return nearness, zlib.crc32(f"{commit} {name}".encode())

    return sorted(parts, key=rank)


@dataclass
class _Night:
    """One run: its limit, and the record that it reads and writes."""

    record: Path
    deadline: float
    lines: dict[str, PartRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.record.exists():
            self.lines = read_record(self.record.read_text())

    def run(self, name: str, part: NightlyPart) -> bool:
        """Run a part unless it has passed or does not fit. Return whether it did not fail."""
        last = self.lines.get(name)
        if last is not None and last.passed and _same_files(last.commit, self.record):
            print(f"{name}: {last.outcome} at {last.commit}, not repeated", flush=True)
            return True
        estimate = last.seconds if last is not None else part.seconds
        left_seconds = self.deadline - time.monotonic()
        if estimate > left_seconds:
            print(f"{name}: not run: {estimate:.0f} s do not fit into {left_seconds:.0f} s")
            return True
        began = time.monotonic()
        log = LOGS / f"{name}.log"
        outcome = _outcome(part, log, None if left_seconds == float("inf") else left_seconds)
        seconds = time.monotonic() - began
        print(f"{name}: {outcome}, {seconds:.0f} s ({log.relative_to(ROOT)})", flush=True)
        today = datetime.now(UTC).date().isoformat()
        self.lines[name] = PartRecord(name, outcome, seconds, today, commit_name(RECORD))
        write_record(self.record, self.lines)
        return not outcome.startswith("failed")


def _outcome(part: NightlyPart, log: Path, limit_seconds: float | None) -> str:
    """Run the part's goal of make. Return `passed …`, `failed …`, `skipped …` or `stopped`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["make", "--no-print-directory", "COLLECTED=1", *part.goal],
            cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return "stopped at the limit of minutes"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                process.wait()
    return outcome_of(code, log.read_text(errors="replace"))


def outcome_of(code: int, output: str) -> str:
    """Return the outcome from make's exit code and, of tests, from pytest's last line."""
    counts = re.findall(r"((?:\d+ [a-z]+, )*\d+ [a-z]+) in [\d.]+s", output)
    summary = f": {counts[-1]}" if counts else ""
    if code:
        return f"failed{summary or f': exit {code}'}"
    if counts and "passed" not in summary:
        return f"skipped{summary}"
    if absent := re.search(r"^\w+: (not run.*)", output, re.MULTILINE):
        return f"skipped: {absent[1]}"
    return f"passed{summary}"


def _same_files(commit: str, record: Path) -> bool:
    """Return whether the work tree has the files of `commit`, the record aside."""
    if commit.endswith("+"):
        return False
    try:
        files = ["--", ".", f":!{record.relative_to(ROOT)}"]
    except ValueError:  # the record is outside the repository
        files = []
    comparison = subprocess.run(["git", "diff", "--quiet", commit, *files], cwd=ROOT, check=False)
    return comparison.returncode == 0


def commit_name(record: Path) -> str:
    """Return the short name of HEAD, with a `+` if files differ from it, the record aside."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return commit if _same_files(commit, record) else f"{commit}+"


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the parts that the arguments name. Return 1 if one has failed."""
    parser = argparse.ArgumentParser(description="Runs the parts of `make nightly`.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--minutes", type=float, help="begin no part that does not fit")
    parser.add_argument("--since", default="HEAD", help="parts that changes touch come first")
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args(None if arguments is None else list(arguments))
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: expected one of {', '.join(PARTS)}")
    limited = options.minutes is not None
    parts = {
        name: part
        for name, part in PARTS.items()
        if name in (options.parts or PARTS) and not (limited and part.installs)
    }
    seconds = 60 * options.minutes if limited else float("inf")
    night = _Night(options.record.resolve(), time.monotonic() + seconds)
    names = in_order(parts, changed_files(options.since), commit_name(RECORD))
    return 0 if all([night.run(name, parts[name]) for name in names]) else 1


if __name__ == "__main__":
    sys.exit(main())
