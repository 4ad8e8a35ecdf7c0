"""What the ranks of a host take of its staging area, all together."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from recpoint.catalog.persist import persist
from recpoint.catalog.staging.agent import AgentLock
from recpoint.errors import RanksMissing
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.snapshot.staging import (
    HostShare,
    SmallStagingArea,
    StagingArea,
    host_share,
    share_of,
)
from tests.catalog_builder import new_run, tables
from tests.rank_jobs import RankJobs


def test_ranks_of_one_place_are_added_up() -> None:
    told = [[7, 1, 100], [7, 2, 20], [7, 1, 3], [8, 1, 4000]]
    assert share_of(0, told) == share_of(2, told) == HostShare((0, 2), 103)
    assert share_of(1, told) == HostShare((1,), 20)  # another file system of the same host
    assert share_of(3, told) == HostShare((3,), 4000)


def test_a_single_process_is_alone(tmp_path: Path) -> None:
    assert host_share(Ranks(), tmp_path / "not there" / "yet", 5) == HostShare((0,), 5)


def test_the_first_rank_of_a_host_warns_for_all(tmp_path: Path) -> None:
    system = os.statvfs(tmp_path)
    too_much = HostShare((1, 2), 2 * system.f_blocks * system.f_frsize)
    with pytest.warns(SmallStagingArea, match=r"checkpoints of 2 ranks may take"):
        StagingArea(tmp_path, "file:///run", rank=1).warn_if_small(too_much)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StagingArea(tmp_path, "file:///run", rank=2).warn_if_small(too_much)


def test_slots_that_ranks_have_already_are_room_for_them(tmp_path: Path) -> None:
    areas = [StagingArea(tmp_path, "file:///run", rank=rank) for rank in (0, 1)]
    for area in areas:
        area.create()
        area.free_slot(set()).reserve(1 << 26)
    free = areas[0].free_bytes()
    of_all = areas[0].free_bytes(all_ranks=True)
    assert free is not None and of_all is not None
    assert (1 << 25) < of_all - free < (1 << 27)  # others write to this file system too
    for area in areas:
        area.close()


def test_what_ranks_that_are_gone_left_is_removed(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    jobs = RankJobs(run, [tmp_path / "host"] * 4, tables())
    for job in 2 * jobs.stage(10):
        with suppress(RanksMissing, FileNotFoundError):  # at first; or done already
            persist.persist_job(job)
    jobs.stage(20, slot=1)
    new, training = (StagingArea(tmp_path / "host", run.url, rank=rank) for rank in (0, 3))
    new.lock()
    training.lock()

    def there() -> dict[str, list[str]]:
        return {
            name: sorted(path.name for path in (new.run_directory / name).glob("r*"))
            + sorted(path.stem.rpartition("-")[2] for path in (new.run_directory / name).glob("0*"))
            for name in ("slots", "jobs", "outcomes")
        }

    of = [f"r{rank:05d}" for rank in range(4)]
    slots = [f"{rank}-{slot}.bin" for rank in of for slot in (0, 1)]
    with AgentLock(tmp_path / "host"):
        new.clear_other_ranks((0, 1), generation=2)
    # The agent will reject the job of rank 2, which needs its slot; rank 3 trains.
    kept = [name for name in slots if name != "r00002-0.bin"]
    assert there() == {"slots": kept, "jobs": of, "outcomes": [*of[:2], of[3]]}
    new.clear_other_ranks((0, 1), generation=2)
    kept.remove("r00002-1.bin")
    assert there() == {"slots": kept, "jobs": [*of[:2], of[3]], "outcomes": [*of[:2], of[3]]}
    training.close()
    new.clear_other_ranks((0, 1), generation=1)  # what this very job has staged stays
    assert there()["jobs"] == [*of[:2], of[3]] and "r00003-1.bin" in there()["slots"]
    new.clear_other_ranks((0, 1), generation=2)
    assert there() == {"slots": slots[:4], "jobs": of[:2], "outcomes": of[:2]}
    new.close()
