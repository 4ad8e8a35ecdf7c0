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
    """Restores and checks all stored checkpoints, and counts; every process must have ended."""
    assert scene.ledger is not None
    ledger = scene.ledger
    ledger.look()
    lost = _lost(scene, ledger)
    progress = scene.progress
    interval = interval_seconds(progress)
    growth = {name: _growth(samples) for name, samples in scene.memory.items()}
    report = Report(name="soak", columns=("killed", "times", "away s", "lag high after s", "late"))
    back = recoveries(happened, progress, interval)
    others = elsewhere(happened, progress, interval)
    for kind in sorted({one.kinds for one in back}):
        ones = [one for one in back if one.kinds == kind]
        away = statistics.median(one.away_seconds for one in ones)
        late = sum(one.seconds > interval for one in ones)
        report.rows.append((kind, len(ones), away, max(one.seconds for one in ones), late))
    half = len(ledger.bytes_by_look) // 2
    early, end = max(ledger.bytes_by_look[:half]), max(ledger.bytes_by_look[half:])
    report.figures = {
        "checkpoints": len(ledger.committed),
        "kills": sum(len(one.fault.kinds) for one in happened),
        "lost": len(lost),
        "wrong_restores": len(scene.wrong_restores),
        "rss_growth_mb": max(growth.values()),
        "lag_late": sum(one.seconds > interval for one in back),
        "lag_high_elsewhere": sum(one.last - one.first > interval for one in others),
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
        f"flow runs: {', '.join(f'{n} {what}' for what, n in sorted(flows.by_state.items()))}; "
        f"workers ended by themselves {scene.worker_ends} times; not completed since Prefect's "
        f"last return: {', '.join(flows.stopped) or 'none'} of {', '.join(flows.deployed)}",
        "lag_late: faults after which lag was at two intervals or more later than one interval "
        "after the return, however shortly, in a spell that began within four intervals; "
        "lag_high_elsewhere: spells of over an interval that began later than that after any fault",
        *(_spell(scene, happened, one) for one in spells(progress, interval)[:_MOST_LINES]),
    ]
    return report


def _spell(scene: Scene, happened: Sequence[Happened], spell: Spell) -> str:
    """Describes a spell of high lag, with the agent's warnings and errors before and in it."""
    since = max((one.back for one in happened if one.back < spell.first), default=spell.first)
    wall = time.time() - time.monotonic()
    begins, ends = (
        datetime.fromtimestamp(wall + at).isoformat(" ") for at in (spell.first - 15, spell.last)
    )
    said = [
        line[:300]
        for line in scene.agent.output.splitlines()
        if begins <= line[:19] <= ends and (" WARNING " in line or " ERROR " in line)
    ]
    return (
        f"lag was high for {spell.last - spell.first:.1f} s, {spell.first - since:.0f} s after the "
        f"last return; the agent: {' | '.join(said[:3]) or 'no complaint'}"
    )


def _lost(scene: Scene, ledger: Ledger) -> list[str]:
    truth = scene.truth
    lost = [f"{key}: gone without a reason" for key in ledger.gone_without_reason]
    lost += scene.wrong
    lost += [why for name in ledger.restorable if (why := ledger.wrong(name, truth)) is not None]
    checked = check(ledger.run, level="full")
    return lost + [f"check: {one.text}" for one in checked.findings if one.severity == "error"]


def _memory(scene: Scene, growth: dict[str, float]) -> str:
    said = []
    for name, samples in scene.memory.items():
        life = _longest(samples)
        seconds = life[-1][0] - life[0][0]
        tenths = " ".join(f"{megabytes:.0f}" for megabytes in _tenths(life))
        said.append(
            f"{name} {growth[name]:+.1f} MB on {life[-1][2]:.0f} MB in {seconds:.0f} s, of which "
            f"each tenth: {tenths}"
        )
    return "; ".join(said)


def _longest(samples: Sequence[tuple[float, int, float]]) -> list[tuple[float, int, float]]:
    """Returns the longest life without its first third, in which modules and caches are loaded."""
    lives: dict[int, list[tuple[float, int, float]]] = {}
    for sample in samples:
        lives.setdefault(sample[1], []).append(sample)
    longest = max(lives.values(), key=len)
    return longest[len(longest) // 3 :]


def _growth(samples: Sequence[tuple[float, int, float]]) -> float:
    """Returns the growth in megabytes over the longest life after its warm-up."""
    tenths = _tenths(_longest(samples))
    return tenths[-1] - tenths[0]


def _tenths(life: Sequence[tuple[float, int, float]]) -> list[float]:
    """Returns the median megabytes of each tenth of a life, in order."""
    parts = np.array_split([megabytes for _, _, megabytes in life], min(10, len(life)))
    return [float(np.median(part)) for part in parts]
