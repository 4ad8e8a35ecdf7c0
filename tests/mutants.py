"""Applies small faults to the code, one at a time, and records which test by day catches each.

    python -m tests.mutants [AREA ...]

Each mutant is one replaced piece of text. It is applied in a copy of the repository, in
build/mutants, where the tests of its area then run until the first fails. The record is
tests/MUTANTS.md. A mutant whose text is no longer there is reported: replace it by one like it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["AREAS", "Area", "Mutant", "main"]

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "mutants"
RECORD = ROOT / "tests" / "MUTANTS.md"
_MOST_SECONDS = 900.0

_HEAD = """# Mutants of the code, and the tests that catch them

`python -m tests.mutants` applies each to a copy of the repository and runs the tests of its area
that belong to `make test`. A mutant without a row has not been tried.

| area | file | text | in its place | caught by |
|---|---|---|---|---|
"""


class Mutant(NamedTuple):
    """One fault: `before`, which stands once in `file`, becomes `after`."""

    file: str
    before: str
    after: str


class Area(NamedTuple):
    """Mutants of one area, and the tests that catch them."""

    tests: tuple[str, ...]
    mutants: tuple[Mutant, ...]


_MARKS = "embeddings/tables/marks.py"
_LOOKUPS = "embeddings/tables/marked_lookups.py"
_CUT = "trainer_plugin/snapshot/cut.py"
_PARTS = "trainer_plugin/snapshot/table_parts.py"
_LOOP = "trainer_plugin/batches/loop.py"
_COMMIT = "catalog/run/commit.py"
_STORED = "catalog/run/stored_chunks.py"
_CHAIN = "catalog/run/chain.py"
_KEEP = "catalog/retention/keep.py"
_PLAN = "catalog/retention/plan.py"
_DELETE = "catalog/retention/delete.py"
_RULES = "catalog/retention/rules.py"
_ORACLE = "lookahead/oracle.py"
_SHARED_ORACLE = "lookahead/shared_oracle.py"
_MOVER = "embeddings/cache/mover.py"
_RESIDENTS = "embeddings/cache/residents.py"
_STEPS = "embeddings/cache/steps.py"
_DIFFERENCES = "embeddings/parity/differences.py"
_STRIPES = "embeddings/parity/stripes.py"
_OWN_ROWS = "embeddings/parity/own_rows.py"
_STREAM = "embeddings/server/stream.py"
_QUANTIZE = "kernels/quantize/reference.py"
_CHOICE = "kernels/quantize/choice.py"

AREAS: Mapping[str, Area] = {
    "marks": Area(
        ("tests/unit/embeddings/tables", "tests/property/test_tracking.py"),
        (
            Mutant(_MARKS, "if count > 1 or (count", "if count > 2 or (count"),
            Mutant(_LOOKUPS, "tracker.set_bits(ids)", "pass"),
            Mutant(
                _MARKS,
                "self._count() > self._lookups.take_rewrites()",
                "self._count() > self._lookups.take_rewrites() + 1",
            ),
            Mutant(
                _MARKS, "dirty_bitmap.mark_nonzero(self.bitmap, gradient, rows=self.rows)", "pass"
            ),
        ),
    ),
    "cut": Area(
        (
            "tests/unit/trainer_plugin/test_cut_plan.py",
            "tests/unit/trainer_plugin/test_loop.py",
            "tests/unit/trainer_plugin/test_batches_in_flight.py",
            "tests/unit/trainer_plugin/test_policies.py",
            "tests/unit/trainer_plugin/test_checkpointing.py",
        ),
        (
            Mutant(_CUT, 'link.kind == "increment" and self._policy.cumulative', "False"),
            Mutant(_PARTS, "and row_count < len(live.held)", "and row_count > len(live.held)"),
            Mutant(_LOOP, "return batches_done >= self.total", "return batches_done > self.total"),
            Mutant(
                _LOOP,
                "self._count.is_between_steps and (self._count.reads_ahead or not self._taken)",
                "self._count.reads_ahead or not self._taken",
            ),
        ),
    ),
    "commit order": Area(
        ("tests/unit/catalog/test_commit.py", "tests/unit/catalog/test_persist_trouble.py"),
        (
            Mutant(_COMMIT, "if newest > generation:", "if newest > generation + 1:"),
            Mutant(_STORED, "sizes.get(entry.key) != entry.bytes", "entry.key not in sizes"),
            Mutant(_COMMIT, "if manifest.run != run.id:", "if not manifest.run:"),
            Mutant(_COMMIT, "if there.attempt != manifest.attempt:", "if not there.attempt:"),
        ),
    ),
    "chain": Area(
        (
            "tests/unit/catalog/test_chain.py",
            "tests/unit/catalog/test_commit.py",
            "tests/unit/catalog/test_restore.py",
            "tests/unit/catalog/test_restore_damage.py",
        ),
        (
            Mutant(_CHAIN, "if child.parent != parent.ref:", "if child.parent is None:"),
            Mutant(
                _CHAIN,
                "if child.chain_length != links.chain_length + 1:",
                "if child.chain_length < links.chain_length + 1:",
            ),
            Mutant(
                _CHAIN,
                "if child.tables != parent.tables:",
                "if len(child.tables) != len(parent.tables):",
            ),
            Mutant(
                _CHAIN,
                'base = parent.ref if links.kind == "full" else links.base',
                "base = links.base",
            ),
        ),
    ),
    "retention": Area(
        (
            "tests/unit/catalog/test_retention.py",
            "tests/unit/catalog/test_prune.py",
            "tests/unit/catalog/test_newcomers.py",
            "tests/property/test_retention_plans.py",
        ),
        (
            Mutant(_RULES, "if len(periods) == count:", "if len(periods) > count:"),
            Mutant(_KEEP, "keep(next(iter(good), None), ", "keep(None, "),
            Mutant(_PLAN, "if age >= max(0.0, grace_seconds) and", "if age >= 0.0 and"),
            Mutant(
                _DELETE, "if (info.key, info.modified_ms) not in self.leases:", "if not info.key:"
            ),
        ),
    ),
    "oracle": Area(
        (
            "tests/unit/lookahead",
            "tests/property/test_oracle.py",
            "tests/property/test_shared_oracle.py",
        ),
        (
            Mutant(
                _ORACLE,
                " - self._map.size + self._map.evictable(self._released)",
                " - self._map.size",
            ),
            Mutant(_ORACLE, "if batch > self._planned:", "if batch > self._planned + 1:"),
            Mutant(_SHARED_ORACLE, "union[users[rank] & (owner == lender)]", "union[users[rank]]"),
            Mutant(
                _SHARED_ORACLE,
                "evicted_ids < self._rows",
                "evicted_ids <= self._rows",
            ),
        ),
    ),
    "cache": Area(
        ("tests/unit/embeddings/cache", "tests/property/test_cached_training.py"),
        (
            Mutant(
                _MOVER,
                "map(_changed, leaving)",
                "map(_changed, leaving[:0])",
            ),
            Mutant(_MOVER, "if not bool(differs.any()):", "if bool(differs.any()):"),
            Mutant(
                _RESIDENTS,
                "if not torch.equal(self.oracle.slots_of(lookup.ids, hold=last_batch), ",
                "if not torch.equal(lookup.slots, ",
            ),
            Mutant(_STEPS, "touches_all |= not parameter.grad.is_sparse", "touches_all |= False"),
        ),
    ),
    "parity": Area(
        (
            "tests/unit/embeddings/parity",
            "tests/property/test_stripes.py",
            "tests/property/test_parity_protocol.py",
            "tests/unit/embeddings/server/test_protected_home.py",
        ),
        (
            Mutant(
                _DIFFERENCES,
                "return sent.number > self.applied",
                "return sent.number >= self.applied",
            ),
            Mutant(
                _DIFFERENCES,
                "if sent.number > self.applied + 1:",
                "if sent.number > self.applied + 2:",
            ),
            Mutant(
                _STRIPES,
                "return servers, slots - self.skipped[(*table_places, servers)]",
                "return servers, slots",
            ),
            Mutant(
                _OWN_ROWS, "if part.generation != table.generation:", "if part.generation is None:"
            ),
        ),
    ),
    "wire": Area(
        ("tests/unit/embeddings/server/test_tcp.py",),
        (
            Mutant(
                _STREAM,
                "if not hmac.compare_digest(mac, self._received.close()):",
                "if not mac:",
            ),
            Mutant(
                _STREAM,
                'if not hmac.compare_digest(proof, secret.digest(b"client proof")):',
                "if not proof:",
            ),
            Mutant(_STREAM, "if greeting != _GREETING:", "if not greeting:"),
            Mutant(_STREAM, "if int(is_present.sum()) != present:", "if present < 0:"),
        ),
    ),
    "quantizers": Area(
        (
            "tests/unit/kernels/test_quantize.py",
            "tests/unit/kernels/test_quantize_rows.py",
            "tests/unit/kernels/test_quantize_searches.py",
        ),
        (
            Mutant(_QUANTIZE, "codes = (steps + 0.5).floor()", "codes = (steps + 0.4999).floor()"),
            Mutant(
                _QUANTIZE,
                "torch.full_like(low, -0.0), low + 0.0)",
                "low + 0.0, low + 0.0)",
            ),
            Mutant(
                _QUANTIZE, "spread = (high - low >= smallest)", "spread = (high - low > smallest)"
            ),
            Mutant(_CHOICE, "min(errors) * (1.0 + MARGIN)", "min(errors) + MARGIN"),
        ),
    ),
}


def _make_copy() -> None:
    shutil.rmtree(COPY, ignore_errors=True)
    COPY.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for path in ROOT.iterdir():
        if path.name.startswith(".") or path.name in ("build", "dist", "site"):
            continue
        if path.is_dir():
            shutil.copytree(path, COPY / path.name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(path, COPY)


def _caught_by(mutant: Mutant, tests: Sequence[str]) -> str:
    """Return the test that fails with the mutant; otherwise what happened, in brackets."""
    path = COPY / mutant.file
    text = path.read_text()
    if text.count(mutant.before) != 1:
        return f"(its text stands {text.count(mutant.before)} times in the file)"
    path.write_text(text.replace(mutant.before, mutant.after))
    try:
        return _first_failure(tests)
    finally:
        path.write_text(text)


def _first_failure(tests: Sequence[str]) -> str:
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *tests]
    paths = os.pathsep.join(map(str, (COPY / "src", COPY, COPY / "examples")))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=COPY, env=environment, stdout=subprocess.PIPE, text=True
    ) as tests_process:
        assert tests_process.stdout is not None
        lines: list[str] = []
        stopwatch = threading.Timer(_MOST_SECONDS, tests_process.kill)
        stopwatch.start()
        for line in tests_process.stdout:
            lines.append(line)
            named = re.match(r"(?:FAILED|ERROR) (\S+)", line)
            if named:
                # A fault may leave a thread that never ends; the first failure is all that counts.
                tests_process.kill()
                stopwatch.cancel()
                return named[1]
        stopwatch.cancel()
        code = tests_process.wait()
    if code == -signal.SIGKILL:
        return f"(no end in {_MOST_SECONDS:g} s)"
    return f"(nothing: exit {code}: {lines[-1:]})"


def _cell(text: str) -> str:
    return "`" + " ".join(text.split()).replace("|", "\\|") + "`"


def _write_record(lines: Mapping[tuple[str, ...], str]) -> None:
    known_lines = [
        key
        for name, area in AREAS.items()
        for mutant in area.mutants
        if (key := (f"| {name}", mutant.file, _cell(mutant.before))) in lines
    ]
    RECORD.write_text(_HEAD + "".join(lines[key] + "\n" for key in known_lines))


def main(names: Sequence[str] = ()) -> int:
    """Try the mutants of these areas, or of all. Return 1 if one was not caught."""
    lines: dict[tuple[str, ...], str] = {}
    if RECORD.exists():
        rows = (line for line in RECORD.read_text().splitlines() if line.startswith("| "))
        lines = {tuple(line.split(" | ")[:3]): line for line in rows}
    _make_copy()
    missed = 0
    for name, area in AREAS.items():
        if names and name not in names:
            continue
        for mutant in area.mutants:
            catch = _caught_by(mutant, area.tests)
            missed += catch.startswith("(")
            cells = (name, mutant.file, _cell(mutant.before), _cell(mutant.after))
            print(*cells, catch, sep=" | ", flush=True)
            line = f"| {' | '.join(cells)} | {catch} |"
            lines[tuple(line.split(" | ")[:3])] = line
            _write_record(lines)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
