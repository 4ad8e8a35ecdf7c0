"""Lays out the staging area that trainer and agent share: paths, job queue, cancel marks, notes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

from recpoint.catalog.staging import owned
from recpoint.catalog.staging.locks import is_held
from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import now_ms
from recpoint.catalog.store.run_url import parse_run_url
from recpoint.errors import (
    CheckpointCancelled,
    ForeignObject,
    FormatError,
    SettingsError,
    StagingRefused,
)
from recpoint.format.job import Cancel, Job, Outcome
from recpoint.format.naming import MAX_RANK, job_stem, parse_job_stem
from recpoint.format.records import MAX_RECORD_BYTES, CheckpointRef, pack_record, unpack_record

__all__ = [
    "NoteState",
    "TrainerState",
    "answer_given",
    "cancel_path",
    "cancels_directory",
    "clean",
    "consolidated_run",
    "default_staging_root",
    "finish",
    "finish_answered",
    "is_cancelled",
    "job_path",
    "jobs_directory",
    "outcome_path",
    "outcomes_directory",
    "raise_if_cancelled",
    "read_job",
    "read_note",
    "read_outcome",
    "remember_consolidated_run",
    "remove_mark",
    "run_directories",
    "run_directory",
    "slot_name",
    "slot_path",
    "slots_directory",
    "spool_directory",
    "staged_attempts",
    "staged_jobs",
    "status_path",
    "trainer_is_running",
    "trainer_lock_path",
    "trainer_state",
    "write_mark",
    "write_note",
    "write_status",
]


# The staging area: its paths, which trainer and agent share, and its queue of jobs (format §7).


MAX_SLOT = 9_999

_RUN_DIRECTORY = re.compile(r"-[0-9a-f]{12}\Z")
_TRAINER_LOCK = re.compile(r"trainer(-r[0-9]{5})?\.lock\Z")
#: Answers of this process that nobody has asked for yet, by job file; a trainer removes the files.
_answers: dict[str, Outcome] = {}
_MOST_ANSWERS = 64
#: What `durable` and `write_status` write to first.
_HALF_WRITTEN = re.compile(rf"{re.escape(durable.TEMPORARY_PREFIX)}([0-9a-f]{{32}}|status-\d+)\Z")

_REJECTED = "nothing: the job is rejected, and the trainer stages its rows again"
#: To who only wants to know what is needed, and answers no job.
_REJECT_FIRST = (
    "try again in a moment where an agent runs: it rejects the job; else recpoint sweep URL does"
)


def default_staging_root() -> Path:
    """`RECPOINT_STAGING`, else in memory (`/dev/shm`), else in the temporary directory."""
    chosen = os.environ.get("RECPOINT_STAGING")
    if chosen:
        return Path(chosen)
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return parent / f"recpoint-{os.getuid()}"


def run_directory(staging: Path | str, run_url: str) -> Path:
    """The directory of one run in the staging area `staging`; two runs never share one."""
    name = run_url.rstrip("/").rpartition("/")[2]
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100] or "run"
    digest = hashlib.sha256(run_url.encode("utf-8", errors="surrogatepass")).hexdigest()
    return Path(staging) / f"{safe}-{digest[:12]}"


def slots_directory(run_dir: Path | str) -> Path:
    """Where the trainer's slots are."""
    return Path(run_dir) / "slots"


def jobs_directory(run_dir: Path | str) -> Path:
    """Where job files are."""
    return Path(run_dir) / "jobs"


def outcomes_directory(run_dir: Path | str) -> Path:
    """Where the agent's answers are."""
    return Path(run_dir) / "outcomes"


def spool_directory(run_dir: Path | str) -> Path:
    """Where the agent keeps encoded parts on their way to the store."""
    return Path(run_dir) / "spool"


def slot_name(rank: int, index: int) -> str:
    """Name of the file of slot `index` of `rank`."""
    if not (0 <= rank <= MAX_RANK and 0 <= index <= MAX_SLOT):
        raise ValueError(f"rank {rank}, slot {index}: outside 0 … {MAX_RANK}, 0 … {MAX_SLOT}")
    return f"r{rank:05d}-{index}.bin"


def slot_path(run_dir: Path | str, rank: int, index: int) -> Path:
    """Slot `index` of `rank`."""
    return slots_directory(run_dir) / slot_name(rank, index)


def job_path(run_dir: Path | str, generation: int, step: int, rank: int) -> Path:
    """The job file of one snapshot."""
    return jobs_directory(run_dir) / f"{job_stem(generation, step, rank)}.json"


def outcome_path(run_dir: Path | str, generation: int, step: int, rank: int) -> Path:
    """The outcome file that answers the job of the same name."""
    return outcomes_directory(run_dir) / f"{job_stem(generation, step, rank)}.json"


def status_path(run_dir: Path | str) -> Path:
    """What the agent is doing with this run, for people."""
    return Path(run_dir) / "status.json"


def trainer_lock_path(run_dir: Path | str, rank: int = 0) -> Path:
    """Locked by the training process of a rank."""
    return Path(run_dir) / ("trainer.lock" if rank == 0 else f"trainer-r{rank:05d}.lock")


def trainer_is_running(run_dir: Path | str) -> bool:
    """Whether a training process of any rank holds its lock.

    Raises:
        StagingRefused: the directory, or a lock in it, is not this user's own.
        OSError: the file system does not say.
    """
    run_dir = Path(run_dir)
    locks = [name for name in owned.names(run_dir.parent, run_dir) if _TRAINER_LOCK.match(name)]
    return any(is_held(run_dir / name, root=run_dir.parent) for name in locks)


# --- the queue ------------------------------------------------------------------------------------


def run_directories(
    staging: Path | str, *, refused: Callable[[Path, StagingRefused], None] | None = None
) -> list[Path]:
    """Directories of the runs staged here, by name; links are not followed.

    Those of other users are left out: in a directory where everybody may write, anybody can make
    one.

    Args:
        staging: the staging area.
        refused: is told of each that was left out.

    Raises:
        StagingRefused: the staging area itself is another user's.
        OSError: it cannot be read.
    """
    root, found = Path(staging), []
    for name in sorted(owned.names(root, root)):
        if not _RUN_DIRECTORY.search(name):
            continue
        try:
            there = owned.require_own(root, root / name)
        except StagingRefused as error:
            if not (root / name).is_symlink() and refused is not None:
                refused(root / name, error)
            continue
        if there is not None and stat.S_ISDIR(there.st_mode):
            found.append(root / name)
    return found


def staged_jobs(run_dir: Path | str) -> list[Path]:
    """The job files of a run in the order in which they must be committed.

    Raises:
        StagingRefused: their directory, or the run's, is not this user's own.
        OSError: it cannot be read.
    """
    names = owned.names(Path(run_dir).parent, jobs_directory(run_dir))
    named = [
        (stem, name)
        for name in names
        if name.endswith(".json") and (stem := parse_job_stem(name.removesuffix(".json")))
    ]
    return [jobs_directory(run_dir) / name for _, name in sorted(named)]


def read_job(path: Path | str) -> Job:
    """The job in a job file, checked for form, and that it lies where it says it belongs.

    Raises:
        FileNotFoundError: it is not there (any more).
        FormatError: it is not a job, or not this run's.
        StagingRefused: it, or a directory above it, is not this user's own.
    """
    path = Path(path)
    data = _read_record(_area_of(path), path)
    job = unpack_record(Job, data, name=str(path), next_step=_REJECTED)
    if path.name != f"{job.stem}.json":
        raise ForeignObject(
            str(path), found=f"the job {job.stem}", expected=path.stem, next_step=_REJECTED
        )
    run_dir = path.parent.parent
    if run_directory(run_dir.parent, job.run_url).name != run_dir.name:
        raise ForeignObject(
            str(path),
            found="a job for another run",  # whose URL may hold a credential
            expected=f"a job for the run of {run_dir.name}",
            next_step=_REJECTED,
        )
    return job


def staged_attempts(run_dir: Path | str, *, besides: Collection[Path] = ()) -> set[str]:
    """Attempts whose chunks an agent on this host may still need.

    Args:
        run_dir: the run's directory.
        besides: jobs that are not asked, since they would be rejected.

    Raises:
        FormatError, StagingRefused: a job cannot be read, so that it is unknown what it needs.
    """
    attempts = set()
    for path in staged_jobs(run_dir):
        if path in besides:
            continue
        try:
            attempts.add(read_job(path).attempt)
        except FileNotFoundError:
            continue  # finished since
        except FormatError as error:
            error.next_step = _REJECT_FIRST
            raise
    return attempts


def read_outcome(path: Path | str) -> Outcome:
    """The outcome in an outcome file.

    Raises:
        FileNotFoundError: there is none yet.
        FormatError: it is not an outcome.
        StagingRefused: it, or a directory above it, is not this user's own.
    """
    data = _read_record(_area_of(Path(path)), Path(path))
    return unpack_record(Outcome, data, name=str(path), next_step="recpoint check RUN")


def finish(job_file: Path | str, outcome: Outcome) -> None:
    """Answer a job; the job file goes last, so that no slot is free unanswered.

    This is rule 7 of the staging order (format §7).

    Raises:
        StagingRefused: one of the directories is not this user's own.
        OSError: the answer could not be written, or the job could not be removed.
    """
    job_file = Path(job_file)
    area, run_dir = _area_of(job_file), job_file.parent.parent
    answer = outcomes_directory(run_dir) / job_file.name
    # Before the answer, which may need its room; a later try answers the same without it.
    with suppress(OSError, StagingRefused):
        owned.remove_tree(area, spool_directory(run_dir) / job_file.stem, ignore_errors=True)
    owned.make_directory(area, answer.parent)
    owned.write_atomically(area, answer, pack_record(outcome))
    _note_answer(job_file, outcome)
    owned.remove(area, job_file)


def finish_answered(job_file: Path | str) -> bool:
    """Remove a job that was answered already, by an agent killed before it could remove it."""
    job_file = Path(job_file)
    try:
        outcome = read_outcome(outcomes_directory(job_file.parent.parent) / job_file.name)
        job = read_job(job_file)
    except (FileNotFoundError, FormatError):
        return False
    if outcome.attempt != job.attempt:
        return False  # the answer to an earlier job of this name, not fetched yet
    _note_answer(job_file, outcome)
    owned.remove(_area_of(job_file), job_file)
    return True


def answer_given(job_file: Path | str) -> Outcome | None:
    """What this process has answered a job, once: its trainer may have removed the file already."""
    return _answers.pop(str(job_file), None)


def _note_answer(job_file: Path, outcome: Outcome) -> None:
    while len(_answers) >= _MOST_ANSWERS:
        _answers.pop(next(iter(_answers)), None)
    _answers[str(job_file)] = outcome


def clean(run_dir: Path | str) -> None:
    """Empty the spool and remove half-written outcomes and notes; only while no agent works on it.

    Beside an agent's notes a trainer writes its own, whose temporary names are others.

    Raises:
        StagingRefused: one of the directories is not this user's own.
        OSError: something cannot be removed.
    """
    run_dir = Path(run_dir)
    with suppress(OSError):
        owned.remove_tree(run_dir.parent, spool_directory(run_dir), ignore_errors=True)
    for directory in (outcomes_directory(run_dir), run_dir):
        with suppress(FileNotFoundError), owned.directory(run_dir.parent, directory) as opened:
            for name in os.listdir(opened):
                if _HALF_WRITTEN.match(name):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=opened)


def remember_consolidated_run(run_dir: Path | str, run_url: str | None) -> None:
    """Note the URL of the run, whose chain is to be consolidated; None: it no longer is."""
    area, path = Path(run_dir).parent, _consolidated_path(run_dir)
    if run_url is None:
        with suppress(FileNotFoundError), owned.directory(area, path.parent) as opened:
            os.unlink(path.name, dir_fd=opened)
    elif consolidated_run(run_dir) != run_url:
        owned.write_atomically(area, path, json.dumps({"run_url": run_url}).encode())


def consolidated_run(run_dir: Path | str) -> str | None:
    """The URL that was noted; None if there is none that can be read."""
    try:
        found = json.loads(_read_record(Path(run_dir).parent, _consolidated_path(run_dir)))
        run_url = found["run_url"]
    except (OSError, StagingRefused, ValueError, KeyError, TypeError):
        return None
    return run_url if isinstance(run_url, str) else None


def _consolidated_path(run_dir: Path | str) -> Path:
    return Path(run_dir) / "consolidate.json"


def write_status(run_dir: Path | str, status: dict[str, object]) -> None:
    """Replace the run's status file; whole at every moment, but not made durable: it is news.

    Where there is no room for a second file it is written over, since it says just then what is
    wrong: who reads it in that moment may find it half written.

    Raises:
        StagingRefused: the directory is not this user's own.
        OSError: that could not be done either.
    """
    area, path = Path(run_dir).parent, status_path(run_dir)
    data = (json.dumps(status, indent=1, sort_keys=True) + "\n").encode()
    try:
        temporary = f"{durable.TEMPORARY_PREFIX}status-{threading.get_ident()}"
        owned.replace(area, path, data, temporary=temporary)
    except OSError:
        if not path.is_file():
            raise
        # It has its pages in a file system in memory. Where it needs more of them it stays as it
        # is: half of it would say nothing at all. One that is shorter ends in blanks, and not in
        # what was there before.
        with open(owned.open_file(area, path, os.O_RDWR), "rb+", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            if before < len(data):
                try:
                    os.posix_fallocate(file.fileno(), 0, len(data))
                except OSError:
                    file.truncate(before)
                    raise
            file.write(data.ljust(before))


def _area_of(path: Path) -> Path:
    """The staging area that a job or an outcome lies in, as `<area>/<run>/jobs/<name>`."""
    return path.parent.parent.parent


def _read_record(area: Path, path: Path) -> bytes:
    # One byte past the bound is enough for the parser to refuse the rest, whatever its size.
    return owned.read(area, path, MAX_RECORD_BYTES + 1)


# Cancel marks: a trainer asks for a staged job to be dropped (format §7, staging order, rule 5).


def cancels_directory(run_dir: Path | str) -> Path:
    """Where cancel marks are."""
    return Path(run_dir) / "cancels"


def cancel_path(run_dir: Path | str, ref: CheckpointRef, rank: int) -> Path:
    """The cancel mark of the job of one snapshot."""
    return cancels_directory(run_dir) / f"{job_stem(ref.generation, ref.step, rank)}.json"


def write_mark(run_dir: Path | str, ref: CheckpointRef, rank: int) -> None:
    """Ask for a job to be dropped; durable when it returns.

    The agent may commit the job all the same, when it is past the point where it looks.

    Raises:
        StagingRefused: the directory is not this user's own; the job goes on.
        OSError: it could not be written; the job then goes on, most likely.
    """
    path, area = cancel_path(run_dir, ref, rank), Path(run_dir).parent
    owned.make_directory(area, path.parent)
    mark = Cancel(step=ref.step, generation=ref.generation, attempt=ref.attempt)
    owned.write_atomically(area, path, pack_record(mark))


def remove_mark(run_dir: Path | str, ref: CheckpointRef, rank: int) -> None:
    """The job has been answered. A mark that is left behind means nothing for any other job."""
    owned.remove(Path(run_dir).parent, cancel_path(run_dir, ref, rank))


def is_cancelled(job_file: Path | str) -> bool:
    """Whether the trainer wants this job dropped; False when its mark cannot be read or is older.

    Raises:
        FileNotFoundError: there is no such job (any more).
        FormatError, StagingRefused: the job cannot be read.
    """
    marked = _marked_attempt(Path(job_file))
    return marked is not None and marked == read_job(job_file).attempt


def raise_if_cancelled(job_file: Path | str, job: Job) -> None:
    """Stop the work on a job that the trainer wants dropped, or that is not there any more.

    Args:
        job_file: the job.
        job: what was read from it.

    Raises:
        CheckpointCancelled: the trainer wants it dropped.
        FileNotFoundError: there is no such job any more.
        StagingRefused: it, or a directory above it, is not this user's own.
    """
    job_file = Path(job_file)
    owned.file_status(job_file.parent.parent.parent, job_file)
    if _marked_attempt(job_file) == job.attempt:
        raise CheckpointCancelled(
            str(job_file),
            found="a cancel mark of the trainer",
            expected="a job that is still wanted",
            next_step="nothing: the next checkpoint holds these rows too",
        )


def _marked_attempt(job_file: Path) -> str | None:
    """The attempt that the mark of a job's name is for; None: there is no mark to be read.

    Marks are named as their jobs are: one of an earlier attempt at the step is not for this one.
    """
    run_dir = job_file.parent.parent
    path = cancels_directory(run_dir) / job_file.name
    try:
        data = owned.read(run_dir.parent, path, MAX_RECORD_BYTES + 1)
    except (OSError, StagingRefused):
        return None
    try:
        mark = unpack_record(Cancel, data, name=os.fspath(path), next_step="nothing: it is ignored")
    except FormatError:
        return None
    return mark.attempt


# The note that a trainer leaves in the staging area: which run it trains, and whether it ended.
#
# A lock says whether a trainer is alive. Only the trainer can say whether one that is gone had
# finished, or obeyed a signal, or was killed: what is worth waking somebody up for.


NoteState = Literal["training", "ended"]
TrainerState = Literal["training", "ended", "lost", "unknown"]

_FILE: Final = "trainer.json"
_MOST_BYTES: Final = 65_536


class TrainerNote(NamedTuple):
    """What a trainer said of itself; `at_ms`: when, on this host's clock."""

    run_url: str
    state: NoteState
    at_ms: int


def write_note(run_dir: Path, run_url: str, state: NoteState) -> None:
    """Replace the note; whole at every moment, but not made durable: it is about this boot.

    Raises:
        StagingRefused: the directory is not this user's own.
        OSError: it cannot be written.
    """
    document = {"run_url": run_url, "state": state, "at_ms": now_ms()}
    owned.replace(
        run_dir.parent,
        run_dir / _FILE,
        (json.dumps(document) + "\n").encode(),
        temporary=f".tmp-trainer-{os.getpid()}",
    )


def read_note(run_dir: Path) -> TrainerNote | None:
    """The newest trainer's note; None if none can be read, or it is another run's."""
    try:
        found = json.loads(owned.read(run_dir.parent, run_dir / _FILE, _MOST_BYTES))
        run_url = parse_run_url(str(found["run_url"])).url
        state, at_ms = found["state"], found["at_ms"]
    except (
        OSError,
        StagingRefused,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
        SettingsError,
    ):
        return None
    if state not in get_args(NoteState) or type(at_ms) is not int:
        return None
    if run_directory(run_dir.parent, run_url).name != run_dir.name:
        return None
    return TrainerNote(run_url, state, at_ms)


def trainer_state(run_dir: Path, note: TrainerNote | None) -> TrainerState:
    """What has become of the newest trainer of a run on this host.

    Args:
        run_dir: the run's directory.
        note: what it has said.

    Returns:
        `training`; `ended`: it said goodbye; `lost`: it is gone without a word; `unknown`: it never
        said anything, or the file system does not say whether it holds its lock.
    """
    try:
        if trainer_is_running(run_dir):
            return "training"
    except (OSError, StagingRefused):
        return "unknown"  # whoever needs that lock tries to take it, and says what is wrong there
    if note is None:
        return "unknown"
    return "ended" if note.state == "ended" else "lost"
