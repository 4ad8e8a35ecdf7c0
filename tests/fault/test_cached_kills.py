"""SIGKILL at boundaries of fetches, write-backs, cuts and refills of a cache with a home in files.

`make test` kills at a fixed sample of boundaries; `make nightly` at all of them (`RUNS.md`).
"""

from __future__ import annotations

import json
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fault.cached_lives import HALF, TOTAL, cached_life
from tests.fault.kill_points import FAULTS_EVERY, ended
from tests.forked import ForkedProcess

_AT_ONCE = 2


def live(place: Path, **arguments: Any) -> dict[str, Any] | None:
    """One life; what it told, or None if it was killed."""
    place.mkdir(exist_ok=True)
    told = place / "told"
    told.unlink(missing_ok=True)
    process = ForkedProcess(
        target=cached_life, kwargs={"place": str(place), **arguments}, daemon=True
    )
    process.start()
    code = ended(process)
    assert code == 0 or (code == -signal.SIGKILL and arguments.get("die") is not None), code
    return json.loads(told.read_text()) if code == 0 else None


def chosen(names: list[str], moment: str) -> list[int]:
    """Return numbers of boundaries: the middle one of each kind before or after a call; or all."""
    if FAULTS_EVERY:
        return list(range(1, len(names) + 1, FAULTS_EVERY))
    kinds = {name for name in names if name.startswith(moment)}
    numbers = {
        kind: [number for number, name in enumerate(names, 1) if name == kind] for kind in kinds
    }
    return sorted(of_kind[len(of_kind) // 2] for of_kind in numbers.values())


def spoil(home: Path) -> int:
    """Overwrite what a dead process left; the number of its files."""
    left = [path for path in home.iterdir() if path.name.startswith("table-")]
    for path in left:
        with path.open("r+b") as file:
            file.write(b"\xff" * max(4_096, min(path.stat().st_size, 1 << 20)))
    return len(left)


@pytest.mark.slow
@pytest.mark.parametrize("begins", ["anew", "from a checkpoint"])
def test_a_training_that_is_killed_ends_as_one_that_is_not(begins: str, tmp_path: Path) -> None:
    plain = live(tmp_path / "plain", is_cached=False)
    assert plain is not None
    begun = tmp_path / "begun"
    begun.mkdir()
    if begins == "from a checkpoint":
        assert live(begun, total=HALF) is not None

    counted, names = tmp_path / "counted", tmp_path / "names"
    shutil.copytree(begun, counted)
    whole = live(counted, count_into=str(names))
    assert whole is not None and whole["digest"] == plain["digest"] and whole["written"]
    boundaries = names.read_text().splitlines()
    kinds = {"fetch", "write-back", "freeze", "drain", "release"}
    kinds |= {"refill"} if begins == "from a checkpoint" else set()
    assert {name.split()[1] for name in boundaries} == kinds
    files = []

    def attempt(die: int) -> bool:
        place = tmp_path / f"killed-{die}"
        shutil.copytree(begun, place)
        if live(place, die=die) is not None:
            return False  # threads came to fewer boundaries this time
        files.append(spoil(place / "home"))
        again = live(place)
        assert again is not None, die
        assert (again["end"], again["digest"]) == (TOTAL, plain["digest"]), (die, again)
        assert again["first"] >= (HALF if begins == "from a checkpoint" else 0)
        assert [path.name for path in (place / "home").iterdir()] == ["home.lock"]
        shutil.rmtree(place)
        return True

    wanted = chosen(boundaries, "after" if begins == "anew" else "before")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        killed = list(pool.map(attempt, wanted))
    assert sum(killed) >= 0.9 * len(wanted)
    # Bases, and segments once a block is full: nobody may trust them.
    assert max(files) >= (2 if begins == "anew" else 3), files
