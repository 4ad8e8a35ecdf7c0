"""Makes the report of a soak: figures, and notes that explain them."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from benchmarks.report import Report
from benchmarks.soak_deployments import KEEP_LAST
from benchmarks.soak_faults import (
    Happened,
    Spell,
    elsewhere,
    interval_seconds,
    recoveries,
    spells,
)
from benchmarks.soak_scene import Scene
from benchmarks.soak_truth import Ledger
from recpoint.catalog.check.check import check

__all__ = ["Flows", "soak_report"]

_MOST_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Flows:
    """Flow runs as Prefect counts them.

    Attributes:
        deployed: flows with a schedule.
        by_state: flow and state -> number of runs.
        stopped: deployed flows that did not complete again after Prefect's last return.
    """

    deployed: Sequence[str]
    by_state: Counter[str]
    stopped: Sequence[str]


def soak_report(scene: Scene, happened: Sequence[Happened], flows: Flows) -> Report:
    """Restore and check all stored checkpoints, and count; every process must have ended."""
    assert scene.ledger is not None
    ledger = scene.ledger
    ledger.look()
    lost = _lost(scene, ledger)
    progress = scene.progress
    interval = interval_seconds(progress)
    growth = {name: _growth(samples) for name, samples in scene.memory.items()}
    report = Report(name="soak", columns=("killed", "times", "away s", "lag high after s", "late"))
    recovered = recoveries(happened, progress, interval)
    other_spells = elsewhere(happened, progress, interval)
    for kind in sorted({recovery.kinds for recovery in recovered}):
        ones = [recovery for recovery in recovered if recovery.kinds == kind]
        away = statistics.median(recovery.away_seconds for recovery in ones)
        late = sum(recovery.seconds > interval for recovery in ones)
        report.rows.append(
            (kind, len(ones), away, max(recovery.seconds for recovery in ones), late)
        )
    half = len(ledger.bytes_by_look) // 2
    early, end = max(ledger.bytes_by_look[:half]), max(ledger.bytes_by_look[half:])
    report.figures = {
        "checkpoints": len(ledger.committed),
        "kills": sum(len(kill.fault.kinds) for kill in happened),
        "lost": len(lost),
        "wrong_restores": len(scene.wrong_restores),
        "rss_growth_mb": max(growth.values()),
        "lag_late": sum(recovery.seconds > interval for recovery in recovered),
        "lag_high_elsewhere": sum(spell.last - spell.first > interval for spell in other_spells),
        "flows_stopped": len(flows.stopped),
        "store_peak_ratio": end / early,
    }
    dropped = len(ledger.seen) - len(ledger.there)
    compared = scene.verified + len(ledger.restorable) + scene.restarts - 1
    report.notes = [
        *lost[:_MOST_LINES],
        *scene.wrong_restores[:_MOST_LINES],
        f"interval {interval:.2f} s; {scene.restarts - 1} restarts of the trainer; {compared} "
        f"restores compared with the truth",
        f"store: keep the last {KEEP_LAST}; {dropped} of {len(ledger.seen)} manifests dropped by "
        f"retention, each with its reason; at most {ledger.most_manifests} at once; peak "
        f"{early / 1e6:.1f} MB in the first half, {end / 1e6:.1f} MB in the second",
        f"memory: {_memory(scene, growth)}",
        f"flow runs: {', '.join(f'{n} {state}' for state, n in sorted(flows.by_state.items()))}; "
        f"workers ended by themselves {scene.worker_ends} times; not completed since Prefect's "
        f"last return: {', '.join(flows.stopped) or 'none'} of {', '.join(flows.deployed)}",
        "lag_late: faults after which lag was at two intervals or more later than one interval "
        "after the return, however shortly, in a spell that began within four intervals; "
        "lag_high_elsewhere: spells of over an interval that began later than that after any fault",
        *(_spell(scene, happened, spell) for spell in spells(progress, interval)[:_MOST_LINES]),
    ]
    return report


def _spell(scene: Scene, happened: Sequence[Happened], spell: Spell) -> str:
    """Describe a spell of high lag, with the agent's warnings and errors before and in it."""
    last_return = max(
        (kill.back for kill in happened if kill.back < spell.first), default=spell.first
    )
    wall = time.time() - time.monotonic()
    begins, ends = (
        datetime.fromtimestamp(wall + offset).isoformat(" ")
        for offset in (spell.first - 15, spell.last)
    )
    complaints = [
        line[:300]
        for line in scene.agent.output.splitlines()
        if begins <= line[:19] <= ends and (" WARNING " in line or " ERROR " in line)
    ]
    return (
        f"lag was high for {spell.last - spell.first:.1f} s, {spell.first - last_return:.0f} s "
        "after the "
        f"last return; the agent: {' | '.join(complaints[:3]) or 'no complaint'}"
    )


def _lost(scene: Scene, ledger: Ledger) -> list[str]:
    truth = scene.truth
    lost = [f"{key}: gone without a reason" for key in ledger.gone_without_reason]
    lost += scene.wrong
    lost += [
        reason for name in ledger.restorable if (reason := ledger.wrong(name, truth)) is not None
    ]
    checked = check(ledger.run, level="full")
    return lost + [
        f"check: {finding.text}" for finding in checked.findings if finding.severity == "error"
    ]


def _memory(scene: Scene, growth: dict[str, float]) -> str:
    texts = []
    for name, samples in scene.memory.items():
        life = _longest(samples)
        seconds = life[-1][0] - life[0][0]
        tenths = " ".join(f"{megabytes:.0f}" for megabytes in _tenths(life))
        texts.append(
            f"{name} {growth[name]:+.1f} MB on {life[-1][2]:.0f} MB in {seconds:.0f} s, of which "
            f"each tenth: {tenths}"
        )
    return "; ".join(texts)


def _longest(samples: Sequence[tuple[float, int, float]]) -> list[tuple[float, int, float]]:
    """Return the longest life without its first third, in which modules and caches are loaded."""
    lives: dict[int, list[tuple[float, int, float]]] = {}
    for sample in samples:
        lives.setdefault(sample[1], []).append(sample)
    longest = max(lives.values(), key=len)
    return longest[len(longest) // 3 :]


def _growth(samples: Sequence[tuple[float, int, float]]) -> float:
    """Return the growth in megabytes over the longest life after its warm-up."""
    tenths = _tenths(_longest(samples))
    return tenths[-1] - tenths[0]


def _tenths(life: Sequence[tuple[float, int, float]]) -> list[float]:
    """Return the median megabytes of each tenth of a life, in order."""
    parts = np.array_split([megabytes for _, _, megabytes in life], min(10, len(life)))
    return [float(np.median(part)) for part in parts]
