"""What the ranks of a host take of its staging area, all together."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from recpoint.catalog.persist import persist
from recpoint.catalog.staging.agent_lock import AgentLock
from recpoint.errors import RanksMissing, SettingsError
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.snapshot import host_memory as host_memory_files
from recpoint.trainer_plugin.snapshot.area_room import (
    HostShare,
    SmallStagingArea,
    host_share,
    share_of,
)
from recpoint.trainer_plugin.snapshot.staging import StagingArea
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
        StagingArea(tmp_path, "file:///run", rank=1).room.warn_if_small(too_much)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StagingArea(tmp_path, "file:///run", rank=2).room.warn_if_small(too_much)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory in memory; its file system has more free room than the tests below say."""
    if not os.access("/dev/shm", os.W_OK) or not host_memory_files.is_in_memory(Path("/dev/shm")):
        pytest.skip("no tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def told(monkeypatch: pytest.MonkeyPatch, directory: Path, files: dict[str, str]) -> None:
    """Have the system's files say this: meminfo, cgroup, and files of control groups."""
    monkeypatch.setattr(host_memory_files, "_MEMINFO", directory / "meminfo")
    monkeypatch.setattr(host_memory_files, "_CGROUPS_OF_PROCESS", directory / "cgroup")
    monkeypatch.setattr(host_memory_files, "_CGROUPS", directory / "groups")
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


MEMINFO = "MemTotal:           1000 kB\nMemFree:  1 kB\nMemAvailable:        600 kB\n"


def test_slots_in_memory_are_compared_with_the_memory_that_is_free(
    in_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, tmp_path, {"meminfo": MEMINFO})
    area = StagingArea(in_memory / "staging", "file:///run")
    assert area.room.free_bytes() == 600 * 1024
    with pytest.warns(SmallStagingArea, match=r"is in memory: its file system has \d+ free") as w:
        area.room.warn_if_small(HostShare((0,), 700_000))
    assert "only 614400 bytes of memory are free" in str(w[0].message)
    assert "may take 700000 bytes" in str(w[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        area.room.warn_if_small(HostShare((0,), 600_000))
        if not host_memory_files.is_in_memory(Path("/var/tmp")):
            with tempfile.TemporaryDirectory(dir="/var/tmp") as on_disk:
                StagingArea(Path(on_disk), "file:///run").room.warn_if_small(
                    HostShare((0,), 700_000)
                )
    with pytest.raises(SettingsError, match="in memory of 1024000 bytes"):
        area.room.refuse_if_small(HostShare((0,), 2_100_000), jobs=2)
    area.room.refuse_if_small(HostShare((0,), 2_000_000), jobs=2)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (1_024_000, 614_400)),
        ({"cgroup": "0::/\n", "groups/memory.max": "max\n"}, (1_024_000, 614_400)),
        (
            {
                "cgroup": "0::/a/b\n",
                "groups/a/b/memory.max": "900000\n",
                "groups/a/b/memory.current": "500000\n",
                "groups/a/b/memory.stat": "anon 1\ninactive_file 100000\n",
                "groups/a/memory.max": "950000\n",
                "groups/a/memory.current": "700000\n",
            },
            (900_000, 250_000),
        ),
        (
            {
                "cgroup": "9:name=systemd:/\n4:memory:/of/the/host\n0::/\n",
                "groups/memory/memory.limit_in_bytes": "800000\n",
                "groups/memory/memory.usage_in_bytes": "300000\n",
                "groups/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 100000\n",
            },
            (800_000, 600_000),
        ),
    ],
    ids=["none", "unlimited", "version 2", "version 1"],
)
def test_a_control_group_may_allow_less_memory(
    files: dict[str, str],
    expected: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told(monkeypatch, tmp_path, {"meminfo": MEMINFO, **files})
    assert host_memory_files.host_memory() == expected


def test_memory_that_the_system_does_not_tell_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, tmp_path, {})
    assert host_memory_files.host_memory() is None


def test_slots_that_ranks_have_already_are_room_for_them(tmp_path: Path) -> None:
    areas = [StagingArea(tmp_path, "file:///run", rank=rank) for rank in (0, 1)]
    for area in areas:
        area.create()
        area.free_slot(set()).reserve(1 << 26)
    free = areas[0].room.free_bytes()
    of_all = areas[0].room.free_bytes(all_ranks=True)
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
            name: sorted(path.name for path in (new.staged_run.path / name).glob("r*"))
            + sorted(
                path.stem.rpartition("-")[2] for path in (new.staged_run.path / name).glob("0*")
            )
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
