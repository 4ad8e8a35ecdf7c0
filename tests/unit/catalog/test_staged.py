"""The staging area: paths, queue, answers, lock; and jobs that lie about their slot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import crc32c
import pytest
import torch

from recpoint.catalog.persist import persist
from recpoint.catalog.persist.spool import assemble_parts, digest_parts
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import area, job_files, owned
from recpoint.catalog.staging.agent_lock import AgentLock, agent_lock_path
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.catalog.staging.job import open_slot
from recpoint.catalog.staging.notes import write_status
from recpoint.catalog.staging.slot_reading import PIECE_BYTES, Extent, read_into, read_pieces
from recpoint.errors import (
    DigestMismatch,
    ForeignObject,
    FormatError,
    MalformedObject,
    RecpointError,
    StagingError,
    StagingRefused,
    UnsupportedVersion,
)
from recpoint.format.job import Job, Segment
from recpoint.format.naming import REJECTIONS_KEY
from tests.catalog_builder import tables
from tests.job_builder import rewrite, stage

#: A user that is not the one of the tests.
ANOTHER = 54_321


@pytest.fixture
def job_file(run: Run, tmp_path: Path) -> Path:
    return stage(
        run,
        tmp_path / "s",
        tables(),
        step=1,
        generation=1,
        state={"w": torch.ones(5)},
        dirty=[None, torch.arange(20)],
    )


def test_directories_of_runs_are_apart_and_readable() -> None:
    urls = [
        "s3://b/x",
        "s3://c/x",
        "/data/x",
        "/data/ü x",
        "/data/x/",
        "s3://b/..",
        "/" + "n" * 999,
    ]
    directories = [StagedRun.of("/s", url).path for url in urls]
    assert len(set(directories)) == len(urls)
    for directory in directories:
        assert directory.parent == Path("/s") and len(directory.name) < 120
    assert directories[0].name.startswith("x-") and directories[3].name.startswith("__x-")


def test_the_default_root_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECPOINT_STAGING", "/somewhere/else")
    assert area.default_staging_root() == Path("/somewhere/else")
    monkeypatch.delenv("RECPOINT_STAGING")
    assert area.default_staging_root().name == f"recpoint-{os.getuid()}"


def test_a_staging_area_is_made_for_its_user_only(tmp_path: Path) -> None:
    owned.make_root(tmp_path / "below" / "staging")
    assert (tmp_path / "below" / "staging").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trap", ["writable", "foreign", "link"])
def test_a_staging_area_that_another_user_made_first_is_refused(tmp_path: Path, trap: str) -> None:
    tmp_path.chmod(0o1777)
    root = tmp_path / "recpoint-0"
    owned.make_root(root)
    owned.make_root(root)
    if trap == "writable":
        root.chmod(0o770)
    elif trap == "link":
        root.rmdir()
        (tmp_path / "elsewhere").mkdir()
        root.symlink_to(tmp_path / "elsewhere")
    else:
        os.chown(root, ANOTHER, -1)
    with pytest.raises(StagingError, match="RECPOINT_STAGING"), AgentLock(root):
        pytest.fail("an agent would serve a stranger's jobs")


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    agent_lock_path(tmp_path).symlink_to(victim)
    with pytest.raises(StagingError, match="symbolic links"), AgentLock(tmp_path):
        pytest.fail("the link was followed")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(("rank", "index"), [(-1, 0), (100_000, 0), (0, -1), (0, 10_000)])
def test_slots_have_bounds(rank: int, index: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        StagedRun(Path("/s/run")).slot_path(rank, index)


def test_jobs_come_in_the_order_of_their_commits(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    names = [StagedRun(tmp_path).job_path(g, s, 0) for g, s in ((2, 1), (1, 900), (1, 20), (10, 0))]
    for path in names:
        path.write_text("{}")
    for name in (".tmp-12", "notes.txt", "00000000-000000000001-r00000.json", "1-2-r3.json"):
        (jobs / name).write_text("{}")
    order = [(1, 20), (1, 900), (2, 1), (10, 0)]
    assert StagedRun(tmp_path).staged_jobs() == [
        StagedRun(tmp_path).job_path(g, s, 0) for g, s in order
    ]
    assert StagedRun(tmp_path / "none").staged_jobs() == []


def test_only_real_directories_are_runs(tmp_path: Path) -> None:
    (tmp_path / "run-0123456789ab").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "link-0123456789ab").symlink_to(tmp_path / "notes")
    (tmp_path / "file-0123456789ab").write_text("")
    assert [run.path for run in staged_runs(tmp_path)] == [tmp_path / "run-0123456789ab"]
    assert [run.path for run in staged_runs(tmp_path / "none")] == []


def test_an_answered_job_is_removed_and_one_with_an_older_answer_is_not(
    job_file: Path, run: Run, tmp_path: Path
) -> None:
    data = job_file.read_bytes()
    assert not job_files.finish_answered(job_file)
    persist.persist_job(job_file)
    job_file.write_bytes(data)
    assert job_files.finish_answered(job_file) and not job_file.exists()
    again = stage(run, tmp_path / "s", tables(), step=1, generation=1)
    assert not job_files.finish_answered(again) and again.exists()


def test_cleaning_empties_the_spool_and_leaves_jobs_and_answers(job_file: Path) -> None:
    run_dir = job_file.parent.parent
    opened = persist.PersistJob.open(job_file)
    opened.encode(opened.groups[0])
    half_written = [d / f".tmp-{'0123' * 8}" for d in (run_dir / "outcomes", run_dir)]
    half_written.append(run_dir / ".tmp-status-139")
    for path in half_written:
        path.write_text("half")
    trainers = run_dir / ".tmp-trainer-17"  # which a trainer is just writing
    trainers.write_text("half")
    answer = run_dir / "outcomes" / "00000001-000000000009-r00000.json"
    answer.write_text("x")
    assert list((run_dir / "spool").iterdir())
    StagedRun(run_dir).clean()
    StagedRun(run_dir).clean()
    assert not (run_dir / "spool").exists()
    assert job_file.exists() and answer.exists()
    assert not any(path.exists() for path in half_written) and trainers.exists()


def test_one_agent_holds_the_lock_and_it_dies_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from recpoint.catalog.staging.agent_lock import AgentLock\n"
        "with AgentLock(sys.argv[1]): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(StagingError, match=f"process {holder.pid}"), AgentLock(tmp_path):
            pass
        holder.kill()
    with AgentLock(tmp_path), pytest.raises(StagingError), AgentLock(tmp_path):
        pass
    with AgentLock(tmp_path):
        pass


def test_the_status_is_whole_at_every_moment(tmp_path: Path) -> None:
    write_status(StagedRun(tmp_path), {"job": None})
    write_status(StagedRun(tmp_path), {"job": "x"})
    assert json.loads(StagedRun(tmp_path).status_path.read_text()) == {"job": "x"}
    assert os.listdir(tmp_path) == ["status.json"]


def test_attempts_of_staged_jobs_are_named(job_file: Path) -> None:
    run_dir = job_file.parent.parent
    assert job_files.staged_attempts(StagedRun(run_dir)) == {job_files.read_job(job_file).attempt}
    job_file.write_bytes(b"{}")
    with pytest.raises(FormatError):
        job_files.staged_attempts(StagedRun(run_dir))


def test_verifying_reads_every_byte(job_file: Path) -> None:
    job = open_slot(job_file, job_files.read_job(job_file))
    job.verify()
    for segment in job.job.segments:
        data = bytearray(job.slot.read_bytes())
        data[segment.offset + segment.bytes - 1] ^= 0x80
        original = job.slot.read_bytes()
        job.slot.write_bytes(data)
        with pytest.raises(DigestMismatch, match=segment.name.replace(".", r"\.")):
            job.verify()
        job.slot.write_bytes(original)


def test_pieces_of_files_are_put_together_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    (tmp_path / "b").write_bytes(b"xyz")
    parts = (
        Extent(str(tmp_path / "a"), 10, 20),
        Extent(str(tmp_path / "b"), 0, 3),
        Extent(str(tmp_path / "a"), 0, 0),
        Extent(str(tmp_path / "a"), 99, 1),
    )
    whole = bytes(range(10, 30)) + b"xyz" + b"\x63"
    data = bytearray(len(whole))
    read_into(memoryview(data), *parts)
    assert data == whole
    assert assemble_parts(parts, start=b"head") == b"head" + whole
    assert digest_parts(parts, start=b"head") == crc32c.crc32c(b"head" + whole)
    assert assemble_parts((), start=b"head") == b"head"
    with pytest.raises(StagingError, match="end at byte 100"):
        assemble_parts((Extent(str(tmp_path / "a"), 90, 11),), start=b"")
    with pytest.raises(ValueError, match="23 bytes of room for 24"):
        read_into(memoryview(bytearray(23)), *parts)


@pytest.mark.parametrize("length", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 7])
def test_pieces_of_a_file_are_read_one_after_another(tmp_path: Path, length: int) -> None:
    whole = os.urandom(length + 5)
    (tmp_path / "a").write_bytes(whole)
    found = [bytes(piece) for piece in read_pieces(Extent(str(tmp_path / "a"), 5, length))]
    assert b"".join(found) == whole[5:] and len(found) == -(-length // PIECE_BYTES)


# --- jobs that nobody should trust ----------------------------------------------------------------


def changed(segments: tuple[Segment, ...], chosen: str, /, **fields: Any) -> tuple[Segment, ...]:
    return tuple(
        Segment.model_construct(**{**dict(segment), **fields})
        if segment.name == chosen
        else segment
        for segment in segments
    )


def without(job: Job, name: str) -> tuple[Segment, ...]:
    return tuple(segment for segment in job.segments if segment.name != name)


HOSTILE: dict[str, Any] = {
    "slot outside": lambda job: {"slot": "../../../etc/passwd"},
    "slot of another rank": lambda job: {"slot": "r00001-0.bin"},
    "slot absolute": lambda job: {"slot": "/etc/passwd"},
    "slot newline": lambda job: {"slot": "r00000-0.bin\n"},
    "slot missing": lambda job: {"slot": "r00000-77.bin"},
    "slot longer than its file": lambda job: {"slot_bytes": 1 << 50},
    "another run url": lambda job: {"run_url": "/somewhere/else"},
    "another step": lambda job: {"step": 2},
    "another generation": lambda job: {"generation": 2},
    "bits": lambda job: {"tables": (job.tables[0].model_copy(update={"bits": 7}), *job.tables[1:])},
    "more rows than the table": lambda job: {
        "tables": (job.tables[0].model_copy(update={"row_count": 41}), *job.tables[1:])
    },
    "huge rows": lambda job: {
        "tables": (job.tables[0], job.tables[1].model_copy(update={"row_count": 2**62}))
    },
    "no tree": lambda job: {"segments": without(job, "tree")},
    "no values": lambda job: {"segments": without(job, "t0.values")},
    "no ids": lambda job: {"segments": without(job, "t1.ids")},
    "no tensor 0": lambda job: {"segments": changed(job.segments, "tensor.0", name="tensor.1")},
    "unknown segment": lambda job: {"segments": changed(job.segments, "tensor.0", name="x")},
    "dtype": lambda job: {"segments": changed(job.segments, "t0.values", dtype="I32")},
    "shape": lambda job: {"segments": changed(job.segments, "t0.values", shape=(3, 40))},
    "shape overflows": lambda job: {
        "segments": changed(job.segments, "tensor.0", shape=(2**40, 2**40))
    },
    "shape beyond its bytes": lambda job: {
        "segments": changed(job.segments, "tensor.0", shape=(6,))
    },
    "segment past the slot": lambda job: {
        "segments": changed(job.segments, "tensor.0", offset=1 << 40)
    },
    "segment overlaps": lambda job: {"segments": changed(job.segments, "t1.values", offset=0)},
    "unaligned": lambda job: {"segments": changed(job.segments, "tensor.0", offset=1)},
    "two of a name": lambda job: {"segments": (*job.segments, job.segments[0])},
    "a rank too many": lambda job: {"rank": job.ranks},
    "credential": lambda job: {"run_url": "s3://key:secret@bucket/x"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_job_is_rejected_and_nothing_is_written(
    run: Run, job_file: Path, name: str
) -> None:
    rewrite(job_file, **HOSTILE[name](job_files.read_job(job_file)))
    outcome = persist.persist_job(job_file)
    assert outcome.result == "rejected" and outcome.error_type
    assert not job_file.exists()
    told = {REJECTIONS_KEY.of(0)}  # where the job says which run it was for
    keys = {info.key for info in run.store.list()}
    assert keys - told == {"generations/00000001.json", "run.json"}


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", MalformedObject),
        (b"{", MalformedObject),
        (b"[" * 100_000, MalformedObject),
        (b'{"body":{},"crc32c":0}', MalformedObject),
        (b'{"body":{"format":"recpoint/job","version":9},"crc32c":0}', UnsupportedVersion),
        (b" " * (65 << 20), MalformedObject),
    ],
    ids=["empty", "cut", "deep", "no job", "version", "large"],
)
def test_a_job_file_that_is_no_job_is_rejected_under_its_name(
    job_file: Path, data: bytes, kind: type[RecpointError]
) -> None:
    job_file.write_bytes(data)
    with pytest.raises(kind):
        job_files.read_job(job_file)
    outcome = persist.persist_job(job_file)
    assert (outcome.result, outcome.error_type) == ("rejected", kind.__name__)
    assert (outcome.step, outcome.generation, outcome.attempt) == (1, 1, "0" * 32)
    assert not job_file.exists()


def test_a_credential_in_a_job_is_never_repeated(job_file: Path) -> None:
    rewrite(job_file, run_url="s3://key:verysecret@bucket/x")
    assert "verysecret" not in persist.persist_job(job_file).error


def test_a_slot_that_is_a_link_is_not_followed(job_file: Path, tmp_path: Path) -> None:
    slot = open_slot(job_file, job_files.read_job(job_file)).slot
    slot.rename(tmp_path / "elsewhere")
    slot.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StagingRefused, match="found a symbolic link"):
        open_slot(job_file, job_files.read_job(job_file))


def test_a_copied_job_belongs_to_where_it_came_from(job_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "s" / "other-0123456789ab" / "jobs"
    other.mkdir(parents=True)
    (other / job_file.name).write_bytes(job_file.read_bytes())
    with pytest.raises(ForeignObject, match="another run"):
        job_files.read_job(other / job_file.name)


def test_ids_that_are_not_a_set_in_order_are_refused(run: Run, tmp_path: Path) -> None:
    for number, ids in enumerate(([3, 2], [1, 1], [0, 40], [-1, 5])):
        path = stage(
            run,
            tmp_path / "s",
            tables()[:1],
            step=number,
            generation=1,
            dirty=[torch.tensor(ids) % 40],
        )
        job = job_files.read_job(path)
        segment = job.segment("t0.ids")
        slot = path.parent.parent / "slots" / job.slot
        data = bytearray(slot.read_bytes())
        raw = torch.tensor(ids).numpy().tobytes()
        data[segment.offset : segment.offset + segment.bytes] = raw
        slot.write_bytes(data)
        opened = persist.PersistJob.open(path)
        with pytest.raises(MalformedObject, match="ascending"):
            opened.encode(opened.groups[0])
