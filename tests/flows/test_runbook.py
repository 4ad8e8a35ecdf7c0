"""docs/how-to, played: each page in the situation that it describes, all of it real."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.testing.seaweed import SeaweedServer
from tests.agent_process import AgentProcess
from tests.catalog_builder import new_run, tables
from tests.flows.runbook import HOW_TO, Site, entries
from tests.polling import until
from tests.rank_jobs import RankJobs
from tests.retained_run import age_file, make_old

pytestmark = pytest.mark.nightly("runbook")

ENTRIES = entries()


def test_every_page_of_a_symptom_is_played_here() -> None:
    index = (HOW_TO / "index.md").read_text("utf-8")
    _, symptoms, _ = re.split(r"(?m)^## ", index, maxsplit=2)
    pages = set(re.findall(r"\(([a-z-]+)\.md\)", symptoms))
    assert len(pages) > 10 and pages <= ENTRIES.keys()


def test_every_entry_is_played_here() -> None:
    played: dict[str, set[str]] = {}
    calls = re.findall(r'play\(\w+, "([a-z-]+)"(?:, (\d))?\)', Path(__file__).read_text())
    for name, block in calls:
        played.setdefault(name, set()).add(block)
    assert played.keys() == ENTRIES.keys()
    for name, blocks in ENTRIES.items():
        assert blocks and all(block for block in blocks), name
        assert "" in played[name] or played[name] == {str(n) for n in range(len(blocks))}, name


def play(site: Site, entry: str, block: int | None = None) -> None:
    for number, steps in enumerate(ENTRIES[entry]):
        if block in (None, number):
            site.play(steps)


@contextmanager
def agent_of(site: Site) -> Iterator[AgentProcess]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in site.environment.items():
            patch.setenv(name, value)
        with AgentProcess(site.staging, site.directory / "agent.log") as agent:
            yield agent


def train(site: Site, batches: int) -> None:
    """Train to `batches` in all, with an agent at hand; everything is committed afterwards."""
    with agent_of(site) as agent:
        until(lambda: agent.logged("serving") > 0)
        said = site.shell(f"python train.py {batches}; echo exit $?")
    assert said.endswith("exit 0\n"), said
    assert not StagedRun.of(site.staging, site.environment["RUN"]).staged_jobs()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at 10, 20 and 30. Nothing in a run names where it is: copy it."""
    directory = tmp_path_factory.mktemp("trained")
    site = Site(directory, str(directory / "run"))
    train(site, 30)
    return directory / "run"


@pytest.fixture
def site(tmp_path: Path, trained: Path) -> Site:
    """A run of three checkpoints in a directory."""
    shutil.copytree(trained, tmp_path / "run")
    return Site(tmp_path, str(tmp_path / "run"))


@pytest.fixture
def s3_site(tmp_path: Path, trained: Path, own_seaweed: SeaweedServer) -> Site:
    """The same on an S3 server of this test's own."""
    url = own_seaweed.run_url()
    store = open_store(url)
    for path in sorted(trained.rglob("*.*")):
        store.put(path.relative_to(trained).as_posix(), path.read_bytes())
    return Site(tmp_path, url, own_seaweed.environment())


def damage(site: Site, step: int) -> None:
    """Change a byte of a row chunk; the good one stays in the replica."""
    run = Path(site.environment["RUN"])
    shutil.copytree(run, site.directory / "replica")
    chunk = next(run.glob(f"chunks/{step:012d}-*/*-t00000-*"))
    data = bytearray(chunk.read_bytes())
    data[-5] ^= 1
    chunk.write_bytes(data)


def stage(site: Site, batches: int) -> None:
    """Train on without an agent: the last checkpoint stays staged."""
    said = site.shell(f"python train.py {batches}")
    run_dir = StagedRun.of(site.staging, site.environment["RUN"]).path
    assert len(StagedRun(run_dir).staged_jobs()) == 1, said


def test_restore_now(site: Site) -> None:
    play(site, "restore-now")


def test_export(site: Site) -> None:
    pytest.importorskip("pandas")
    play(site, "export")


def test_check_failed(site: Site) -> None:
    damage(site, 30)
    play(site, "check-failed", 0)
    play(site, "check-failed", 1)
    (Path(site.environment["RUN"]) / "run.json").unlink()
    play(site, "check-failed", 2)
    train(site, 40)
    (Path(site.environment["RUN"]) / "generations" / "00000002.json").unlink()
    play(site, "check-failed", 3)


def test_validation_failed(site: Site) -> None:
    damage(site, 30)
    site.shell("recpoint validate $RUN")  # as the schedule did
    play(site, "validation-failed")


def test_agent_dead(tmp_path: Path) -> None:
    site = Site(tmp_path, str(tmp_path / "run"))
    stage(site, 10)
    play(site, "agent-dead", 0)
    site.environment["GONE"] = str(tmp_path / "gone")
    site.shell("RUN=$GONE python train.py 10; rm -r $GONE")
    play(site, "agent-dead", 1)
    play(site, "agent-dead", 2)


def test_rank_missing(tmp_path: Path) -> None:
    there = tmp_path / "there"
    site = Site(tmp_path, str(tmp_path / "run"), {"THERE": str(there)})
    run = new_run(tmp_path / "run")
    run.claim(None)
    RankJobs(run, [site.staging, there], tables()).stage(10)
    play(site, "rank-missing")


def test_roll_back_serving(site: Site) -> None:
    play(site, "roll-back-serving")


def test_upgrade(site: Site) -> None:
    stage(site, 40)
    play(site, "upgrade")


def test_lag_alarm(s3_site: Site) -> None:
    stage(s3_site, 40)
    status = StagedRun.of(s3_site.staging, s3_site.environment["RUN"]).status_path
    right = s3_site.environment["AWS_SECRET_ACCESS_KEY"]
    s3_site.environment["AWS_SECRET_ACCESS_KEY"] = "wrong"
    with agent_of(s3_site):
        until(lambda: status.exists() and "StoreAccessDenied" in status.read_text())
    s3_site.environment["AWS_SECRET_ACCESS_KEY"] = right
    play(s3_site, "lag-alarm")


def test_store_gone(s3_site: Site, own_seaweed: SeaweedServer) -> None:
    stage(s3_site, 40)
    own_seaweed.kill()
    play(s3_site, "store-gone", 0)
    own_seaweed.start()
    play(s3_site, "store-gone", 1)


def test_credentials_rotated(s3_site: Site, own_seaweed: SeaweedServer) -> None:
    stage(s3_site, 40)
    own_seaweed.kill()
    own_seaweed.access_key, own_seaweed.secret_key = "rotated", "0123456789abcdef"
    own_seaweed.start()
    s3_site.environment |= {"NEW_KEY": "rotated", "NEW_SECRET": "0123456789abcdef"}
    play(s3_site, "credentials-rotated")


def test_move_a_run(s3_site: Site, own_seaweed: SeaweedServer) -> None:
    if shutil.which("rclone") is None:
        pytest.skip("no rclone: apt install rclone")
    bucket, _, prefix = s3_site.environment["RUN"].removeprefix("s3://").partition("/")
    s3_site.environment |= {
        "RCLONE_CONFIG_STORE_TYPE": "s3",
        "RCLONE_CONFIG_STORE_PROVIDER": "Other",
        "RCLONE_CONFIG_STORE_ENV_AUTH": "true",
        "RCLONE_CONFIG_STORE_ENDPOINT": own_seaweed.endpoint,
        "OLD_PATH": f"store:{bucket}/{prefix}",
        "NEW_PATH": "store:other/moved/ranker",
        "NEW": "s3://other/moved/ranker",
    }
    made = s3_site.shell("rclone mkdir store:other; echo exit $?")
    assert made.endswith("exit 0\n"), made
    play(s3_site, "move-a-run")


def test_prefect_gone(tmp_path: Path, trained: Path) -> None:
    # The installed programs, once: nothing here takes them seconds to import.
    shutil.copytree(trained, tmp_path / "run")
    site = Site(tmp_path, str(tmp_path / "run"), forked=False)
    try:
        play(site, "prefect-gone")
    finally:
        site.shell("recpoint server stop")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", str(path)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def leave_room(disk: Path, pages: int) -> None:
    """Fill a file system with a file `ballast`, but for so many pages."""
    (disk / "ballast").unlink(missing_ok=True)
    left = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes((left.f_bavail - pages) * left.f_frsize))


def test_disk_full(tmp_path: Path, trained: Path, small_disk: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    site = Site(tmp_path, str(tmp_path / "run"), {"RECPOINT_STAGING": str(small_disk)})
    with agent_of(site) as agent:
        until(lambda: agent.logged("serving") > 0)
        site.shell("python train.py 30; rm -r $RECPOINT_STAGING/*/slots")
        leave_room(small_disk, 8)  # for a lock and a few words
        said = site.shell("python train.py 40")
        assert "a checkpoint failed: StagingFull" in said, said
        play(site, "disk-full", 0)


def full_store(directory: Path, disk: Path) -> tuple[Site, Run]:
    """A run of two chains in a small store, and a checkpoint that finds no room there."""
    site = Site(directory, str(disk / "run"))
    script = directory / "train.py"
    script.write_text(script.read_text().replace("nn.Linear(8, 1)", "nn.Linear(8, 1500)"))
    train(site, 20)
    site.shell("recpoint consolidate $RUN")
    train(site, 30)
    run = Run.open(open_store(site.environment["RUN"]))
    for info in list(run.store.list("")):
        age_file(run, info.key, 3 * 86400)
    leave_room(disk, 4)
    stage(site, 40)
    return site, run


def test_store_full(tmp_path: Path, small_disk: Path) -> None:
    site, run = full_store(tmp_path, small_disk)
    # For the rows, and for the few words that retention writes, and not for the dense layers.
    leave_room(small_disk, 20)
    play(site, "disk-full", 1)
    make_old(run, 2 * 86400)
    play(site, "disk-full", 2)


def test_store_full_to_the_last_byte(tmp_path: Path, small_disk: Path) -> None:
    site, run = full_store(tmp_path, small_disk)
    said = site.shell("recpoint validate $RUN")  # its record is the newest object then
    assert "passed" in said, said
    leave_room(small_disk, 0)
    play(site, "disk-full", 3)
