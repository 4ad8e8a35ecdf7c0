"""SIGKILL at random moments of window, copier and cut: the run goes on as if nothing had happened.

`make test` kills a fixed sample of lives; `make nightly` some hundreds (`RUNS.md`).
"""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.naming import ManifestName
from tests.fault.kill_points import FAULTS_EVERY
from tests.fault.window_lives import TOTAL, Kill, window_life
from tests.forked import ForkedProcess
from tests.polling import PATIENCE_SECONDS

_SEEDS = range(0, 16, FAULTS_EVERY) if FAULTS_EVERY else range(1)
_POLICIES = ("consecutive", "one_shot", "intermittent", "continuous")
_MOMENTS: tuple[Literal["batch", "step"], ...] = ("batch", "step")
#: By day: one policy with increments on increments, and one whose increments stand on a full.
_EXACT = [
    (policy, "lossless") for policy in (_POLICIES if FAULTS_EVERY else ("consecutive", "one_shot"))
]
_ROUNDED = (
    [(policy, bits) for policy in _POLICIES for bits in (8, 4, 2)]
    if FAULTS_EVERY
    else [("intermittent", 4)]
)


def live(place: Path, **arguments: Any) -> dict[str, Any] | None:
    """One life; what it told, or None if it was killed."""
    place.mkdir(exist_ok=True)
    told = place / "told"
    told.unlink(missing_ok=True)
    process = ForkedProcess(
        target=window_life, kwargs={"place": str(place), **arguments}, daemon=True
    )
    process.start()
    process.join(PATIENCE_SECONDS)
    is_killed = arguments.get("kill") is not None
    assert process.exitcode == (-signal.SIGKILL if is_killed else 0)
    return None if is_killed else json.loads(told.read_text())


def tables(place: Path) -> dict[int, dict[str, list[Tensor]]]:
    """All tables of each checkpoint that counts, by its step."""
    run = Run.open(open_store(str(place / "run")))
    found = {}
    for name in run.live_line():
        target = MemoryTarget()
        restore(run, target, Selection.of(ManifestName(*name)))
        found[name.step] = {
            key: [table.values, *[state for state in table.row_states if state is not None]]
            for key, table in target.tables.items()
        }
    return found


def compare(found: Path, expected: dict[int, dict[str, list[Tensor]]]) -> int:
    """Compare each checkpoint with the uninterrupted run's of the same step; their number."""
    checkpoints = tables(found)
    for step, by_name in checkpoints.items():
        for name, arrays in by_name.items():
            assert len(arrays) == len(expected[step][name]) == 2, name
            for one, other in zip(arrays, expected[step][name], strict=True):
                assert torch.equal(one, other), (step, name)
    return len(checkpoints)


def kill(draw: random.Random) -> Kill:
    # Half of the lives die near a cut, which takes some milliseconds.
    batch = draw.choice([draw.randint(2, TOTAL), draw.choice([5, 10, 15, TOTAL])])
    most_seconds = draw.choice([0, 0.001, 0.003, 0.009])
    return Kill(batch, draw.choice(_MOMENTS), most_seconds * draw.random())


def whole(folder: Path, **chosen: Any) -> tuple[dict[str, Any], dict[int, Any]]:
    """An uninterrupted run that looks ahead, which ends as one that does not."""
    told = live(folder / "whole", window=12, **chosen)
    plain = live(folder / "plain", window=None, **chosen)
    assert told is not None and plain is not None
    assert told["end"] == plain["end"] and plain["rows_before"] == 0 < told["rows_before"]
    expected = tables(folder / "plain")
    assert compare(folder / "whole", expected) == len(expected) == 4
    return told, expected


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "bits"), _EXACT)
def test_a_training_that_is_killed_ends_as_one_that_is_not(
    policy: str, bits: str, tmp_path: Path
) -> None:
    chosen = {"policy": policy, "bits": bits}
    told, expected = whole(tmp_path, **chosen)
    for seed in _SEEDS:
        draw = random.Random(f"{policy} {seed}")
        place = tmp_path / f"killed-{seed}"
        for _ in range(2 if FAULTS_EVERY else 1):
            live(place, window=draw.choice([1, 3, 12]), kill=kill(draw), **chosen)
        ended = live(place, window=draw.choice([1, 12]), **chosen)
        assert ended is not None and ended["end"] == told["end"], seed
        compare(place, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "bits"), _ROUNDED)
def test_checkpoints_of_rounded_rows_are_those_of_a_training_that_is_not_killed(
    policy: str, bits: int, tmp_path: Path
) -> None:
    """A restore of rounded rows changes them, so nothing is trained after it."""
    chosen = {"policy": policy, "bits": bits}
    _, expected = whole(tmp_path, **chosen)
    for seed in _SEEDS:
        draw = random.Random(f"{policy} {bits} {seed}")
        place = tmp_path / f"killed-{seed}"
        killed = kill(draw)
        live(place, window=draw.choice([3, 12]), kill=killed, **chosen)
        restored = live(place, window=12, trains=False, **chosen)
        assert restored is not None
        step, _ = restored["restored"]
        # At least what was committed before the batch that was killed.
        assert step >= (killed.batch - 1) // 5 * 5, seed
        assert step == 0 or compare(place, expected) == step // 5
