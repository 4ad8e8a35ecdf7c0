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
from recpoint.catalog.staging.locks import holder
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
    "SERVER_WORDS",
    "BEAT_SECONDS",
    "NoteState",
    "TrainerState",
    "answer_given",
    "beat",
    "cancel_path",
    "cancels_directory",
    "clean",
    "consolidated_run",
    "default_staging_root",
    "finish",
    "finish_answered",
    "is_cancelled",
    "job_path",
    "make_directories",
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

#: How an embedding server describes itself in the lock of its part.
SERVER_WORDS: Final = "embedding server"


# The paths of the staging area, which trainer and agent share, and its queue of jobs (format §7).


MAX_SLOT = 9_999

_RUN_DIRECTORY = re.compile(r"-[0-9a-f]{12}\Z")
_TRAINER_LOCK = re.compile(r"trainer(-r[0-9]{5})?\.lock\Z")
#: Outcomes that this process has written and not returned yet, by job file. They are kept in
#: memory too, because a trainer removes the files.
_answers: dict[str, Outcome] = {}
_MOST_ANSWERS = 64
#: Names of the temporary files of `durable` and `write_status`.
_HALF_WRITTEN = re.compile(rf"{re.escape(durable.TEMPORARY_PREFIX)}([0-9a-f]{{32}}|status-\d+)\Z")

_REJECTED = "nothing: the job is rejected, and the trainer stages its rows again"
#: The next step for a caller that only reads jobs and does not reject them.
_REJECT_FIRST = (
    "try again in a moment if an agent runs, which rejects the job; if none runs, recpoint sweep "
    "URL rejects it"
)


def default_staging_root() -> Path:
    """Returns `RECPOINT_STAGING`, else a path in memory (`/dev/shm`) or a temporary directory."""
    chosen = os.environ.get("RECPOINT_STAGING")
    if chosen:
        return Path(chosen)
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return parent / f"recpoint-{os.getuid()}"


def run_directory(staging: Path | str, run_url: str) -> Path:
    """Returns the directory of a run in the staging area `staging`; no two runs share one."""
    name = run_url.rstrip("/").rpartition("/")[2]
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100] or "run"
    digest = hashlib.sha256(run_url.encode("utf-8", errors="surrogatepass")).hexdigest()
    return Path(staging) / f"{safe}-{digest[:12]}"


def slots_directory(run_dir: Path | str) -> Path:
    """Returns the directory of the trainer's slots."""
    return Path(run_dir) / "slots"


def jobs_directory(run_dir: Path | str) -> Path:
    """Returns the directory of the job files."""
    return Path(run_dir) / "jobs"


def outcomes_directory(run_dir: Path | str) -> Path:
    """Returns the directory of the agent's answers."""
    return Path(run_dir) / "outcomes"


def spool_directory(run_dir: Path | str) -> Path:
    """Returns the directory in which the agent keeps encoded parts on their way to the store."""
    return Path(run_dir) / "spool"


def slot_name(rank: int, index: int) -> str:
    """Returns the file name of slot `index` of `rank`."""
    if not (0 <= rank <= MAX_RANK and 0 <= index <= MAX_SLOT):
        raise ValueError(f"rank {rank}, slot {index}: outside 0 … {MAX_RANK}, 0 … {MAX_SLOT}")
    return f"r{rank:05d}-{index}.bin"


def slot_path(run_dir: Path | str, rank: int, index: int) -> Path:
    """Returns the path of slot `index` of `rank`."""
    return slots_directory(run_dir) / slot_name(rank, index)


def job_path(run_dir: Path | str, generation: int, step: int, rank: int) -> Path:
    """Returns the path of the job file of one snapshot."""
    return jobs_directory(run_dir) / f"{job_stem(generation, step, rank)}.json"


def outcome_path(run_dir: Path | str, generation: int, step: int, rank: int) -> Path:
    """Returns the path of the outcome file that answers the job of the same name."""
    return outcomes_directory(run_dir) / f"{job_stem(generation, step, rank)}.json"


def status_path(run_dir: Path | str) -> Path:
    """Returns the path of the agent's status file for this run, which is for people."""
    return Path(run_dir) / "status.json"


def make_directories(root: Path, run_dir: Path) -> None:
    """Make the directories for what is staged that are missing.

    Each is private: other users of the host must not read a model's weights.

    Raises:
        StagingRefused: a directory belongs to another user, is a link, or is open to other users.
        OSError: a directory cannot be made.
    """
    owned.make_root(root)
    for directory in (
        slots_directory(run_dir),
        jobs_directory(run_dir),
        outcomes_directory(run_dir),
    ):
        owned.make_directory(root, directory)


def trainer_lock_path(run_dir: Path | str, rank: int = 0) -> Path:
    """Returns the path of the file that the training process of a rank locks."""
    return Path(run_dir) / ("trainer.lock" if rank == 0 else f"trainer-r{rank:05d}.lock")


def trainer_is_running(run_dir: Path | str) -> bool:
    """Says whether a training process of any rank holds its lock.

    An embedding server that has staged rows holds one, too, and may outlive its training.

    Raises:
        StagingRefused: the directory, or a lock in it, is not this user's own.
        OSError: the file system does not say.
    """
    run_dir = Path(run_dir)
    locks = [name for name in owned.names(run_dir.parent, run_dir) if _TRAINER_LOCK.match(name)]
    holders = (holder(run_dir / name, root=run_dir.parent) for name in locks)
    return any(one is not None and one.words != SERVER_WORDS for one in holders)


# --- the queue ------------------------------------------------------------------------------------


def run_directories(
    staging: Path | str, *, refused: Callable[[Path, StagingRefused], None] | None = None
) -> list[Path]:
    """Returns the directories of the runs staged here, sorted by name; follows no links.

    Directories of other users are left out, because in a directory where everybody may write,
    anybody can make them.

    Args:
        staging: the staging area.
        refused: called with each directory that is left out, and the error.

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
    """Returns the job files of a run in the order in which they must be committed.

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
    """Returns the job in a job file, after checking its form, its name and its run.

    Raises:
        FileNotFoundError: the file does not exist (any more).
        FormatError: it is not a job, or a job of another run or name.
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
    """Returns the attempts whose chunks an agent on this host may still need.

    Args:
        run_dir: the run's directory.
        besides: jobs that are not read, because they would be rejected.

    Raises:
        FormatError, StagingRefused: a job cannot be read, so it is unknown what it needs.
    """
    attempts = set()
    for path in staged_jobs(run_dir):
        if path in besides:
            continue
        try:
            attempts.add(read_job(path).attempt)
        except FileNotFoundError:
            continue  # finished meanwhile
        except FormatError as error:
            error.next_step = _REJECT_FIRST
            raise
    return attempts


def read_outcome(path: Path | str) -> Outcome:
    """Returns the outcome in an outcome file.

    Raises:
        FileNotFoundError: there is no such file yet.
        FormatError: it is not an outcome.
        StagingRefused: it, or a directory above it, is not this user's own.
    """
    data = _read_record(_area_of(Path(path)), Path(path))
    return unpack_record(Outcome, data, name=str(path), next_step="recpoint check RUN")


def finish(job_file: Path | str, outcome: Outcome) -> None:
    """Answer a job (format §7, staging order, rule 7).

    The job file is removed last, so no slot becomes free before its job is answered.

    Raises:
        StagingRefused: one of the directories is not this user's own.
        OSError: the answer could not be written, or the job could not be removed.
    """
    job_file = Path(job_file)
    area, run_dir = _area_of(job_file), job_file.parent.parent
    answer = outcomes_directory(run_dir) / job_file.name
    # The spool goes first, because the answer may need its room. A retry needs no spool.
    with suppress(OSError, StagingRefused):
        owned.remove_tree(area, spool_directory(run_dir) / job_file.stem, ignore_errors=True)
    owned.make_directory(area, answer.parent)
    owned.write_atomically(area, answer, pack_record(outcome))
    _note_answer(job_file, outcome)
    owned.remove(area, job_file)


def finish_answered(job_file: Path | str) -> bool:
    """Remove a job that an agent has answered before it was killed; returns whether it did."""
    job_file = Path(job_file)
    try:
        outcome = read_outcome(outcomes_directory(job_file.parent.parent) / job_file.name)
        job = read_job(job_file)
    except (FileNotFoundError, FormatError):
        return False
    if outcome.attempt != job.attempt:
        return False  # the answer to an earlier job of this name, which no trainer has read yet
    _note_answer(job_file, outcome)
    owned.remove(_area_of(job_file), job_file)
    return True


def answer_given(job_file: Path | str) -> Outcome | None:
    """Returns this process's answer to a job, once, even if its trainer has removed the file."""
    return _answers.pop(str(job_file), None)


def _note_answer(job_file: Path, outcome: Outcome) -> None:
    while len(_answers) >= _MOST_ANSWERS:
        _answers.pop(next(iter(_answers)), None)
    _answers[str(job_file)] = outcome


def clean(run_dir: Path | str) -> None:
    """Empty the spool and remove half-written outcomes and notes; only while no agent is at work.

    A trainer's notes are left alone, because their temporary files have other names.

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
    """Note the URL of a run to consolidate in the background; None removes the note."""
    area, path = Path(run_dir).parent, _consolidated_path(run_dir)
    if run_url is None:
        with suppress(FileNotFoundError), owned.directory(area, path.parent) as opened:
            os.unlink(path.name, dir_fd=opened)
    elif consolidated_run(run_dir) != run_url:
        owned.write_atomically(area, path, json.dumps({"run_url": run_url}).encode())


def consolidated_run(run_dir: Path | str) -> str | None:
    """Returns the noted URL; None if there is no readable note."""
    try:
        found = json.loads(_read_record(Path(run_dir).parent, _consolidated_path(run_dir)))
        run_url = found["run_url"]
    except (OSError, StagingRefused, ValueError, KeyError, TypeError):
        return None
    return run_url if isinstance(run_url, str) else None


def _consolidated_path(run_dir: Path | str) -> Path:
    return Path(run_dir) / "consolidate.json"


def write_status(run_dir: Path | str, status: dict[str, object]) -> None:
    """Replace the run's status file so that it is whole at every moment, but not durably.

    If there is no room for a second file, the old one is overwritten, because just then it says
    what is wrong. A reader may then find it half written.

    Raises:
        StagingRefused: the directory is not this user's own.
        OSError: it could not be overwritten either.
    """
    area, path = Path(run_dir).parent, status_path(run_dir)
    data = (json.dumps(status, indent=1, sort_keys=True) + "\n").encode()
    try:
        temporary = f"{durable.TEMPORARY_PREFIX}status-{threading.get_ident()}"
        owned.replace(area, path, data, temporary=temporary)
    except OSError:
        if not path.is_file():
            raise
        # A file system in memory has pages for the old text. If the new text needs more and there
        # are none, the file stays as it is, because half a text says nothing. A shorter text is
        # padded with blanks, so that nothing of the old text is left.
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
    """Returns the staging area of a job or an outcome: `<area>` in `<area>/<run>/jobs/<name>`."""
    return path.parent.parent.parent


def _read_record(area: Path, path: Path) -> bytes:
    # With one byte more than the bound the parser refuses a larger file, whatever its size.
    return owned.read(area, path, MAX_RECORD_BYTES + 1)


# Cancel marks: a trainer asks the agent to drop a staged job (format §7, staging order, rule 5).


def cancels_directory(run_dir: Path | str) -> Path:
    """Returns the directory of the cancel marks."""
    return Path(run_dir) / "cancels"


def cancel_path(run_dir: Path | str, ref: CheckpointRef, rank: int) -> Path:
    """Returns the path of the cancel mark for the job of one snapshot."""
    return cancels_directory(run_dir) / f"{job_stem(ref.generation, ref.step, rank)}.json"


def write_mark(run_dir: Path | str, ref: CheckpointRef, rank: int) -> None:
    """Ask the agent to drop a job; durable when it returns.

    The agent may still commit the job if it has already looked for a mark.

    Raises:
        StagingRefused: the directory is not this user's own; the job goes on.
        OSError: the mark could not be written; most likely the job goes on.
    """
    path, area = cancel_path(run_dir, ref, rank), Path(run_dir).parent
    owned.make_directory(area, path.parent)
    mark = Cancel(step=ref.step, generation=ref.generation, attempt=ref.attempt)
    owned.write_atomically(area, path, pack_record(mark))


def remove_mark(run_dir: Path | str, ref: CheckpointRef, rank: int) -> None:
    """Remove the mark of an answered job; a mark that stays means nothing for other jobs."""
    owned.remove(Path(run_dir).parent, cancel_path(run_dir, ref, rank))


def is_cancelled(job_file: Path | str) -> bool:
    """Says whether the trainer wants this job dropped; False if the mark is unreadable or old.

    Raises:
        FileNotFoundError: there is no such job (any more).
        FormatError, StagingRefused: the job cannot be read.
    """
    marked = _marked_attempt(Path(job_file))
    return marked is not None and marked == read_job(job_file).attempt


def raise_if_cancelled(job_file: Path | str, job: Job) -> None:
    """Raise if the trainer wants a job dropped, or if its file does not exist any more.

    Args:
        job_file: the job file.
        job: the job that was read from it.

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
    """Returns the attempt in the mark with a job's name; None if there is no readable mark.

    A mark has the name of its job, so it may be for an earlier attempt at the same step.
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


# A trainer's note in the staging area: the run that it trains, and whether it has ended.
#
# A trainer touches its note every few seconds, so the file's time is its last sign of life.
#
# A lock shows whether a trainer is alive. Only the trainer's note shows whether a trainer that is
# gone had finished or obeyed a signal, or was killed, which is worth an alarm.


NoteState = Literal["training", "ended"]
TrainerState = Literal["training", "ended", "lost", "unknown"]

#: A trainer touches its note this often, unless its background thread is staging a checkpoint.
BEAT_SECONDS: Final = 5.0

_FILE: Final = "trainer.json"
_MOST_BYTES: Final = 65_536


class TrainerNote(NamedTuple):
    """A trainer's note about itself.

    Attributes:
        run_url: the run that it trains.
        state: whether it trains or has ended.
        at_ms: when it wrote the note, in ms since the epoch by this host's clock.
        seen_ms: when it touched the note last; see `beat`.
    """

    run_url: str
    state: NoteState
    at_ms: int
    seen_ms: int


def write_note(run_dir: Path, run_url: str, state: NoteState) -> None:
    """Replace the note so that it is whole at every moment, but not durably.

    It need not survive a reboot, because no trainer does.

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


def beat(run_dir: Path) -> None:
    """Touch the trainer's note, as a sign that the trainer lives.

    Raises:
        FileNotFoundError: there is no note.
        StagingRefused: it, or a directory above it, is not this user's own.
        OSError: its time cannot be changed.
    """
    descriptor = owned.open_file(run_dir.parent, run_dir / _FILE)
    try:
        os.utime(descriptor)
    finally:
        os.close(descriptor)


def read_note(run_dir: Path) -> TrainerNote | None:
    """Returns the newest trainer's note; None if it cannot be read, or is of another run."""
    try:
        with open(owned.open_file(run_dir.parent, run_dir / _FILE), "rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
            seen_ms = os.fstat(file.fileno()).st_mtime_ns // 10**6
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
    return TrainerNote(run_url, state, at_ms, seen_ms)


def trainer_state(run_dir: Path, note: TrainerNote | None) -> TrainerState:
    """Returns the state of the newest trainer of a run on this host.

    Args:
        run_dir: the run's directory.
        note: the trainer's note.

    Returns:
        `training`: it is alive; `ended`: it is gone and noted its end; `lost`: it is gone without
        noting its end; `unknown`: there is no note, or the file system does not say whether it
        holds its lock.
    """
    try:
        if trainer_is_running(run_dir):
            return "training"
    except (OSError, StagingRefused):
        return "unknown"  # a process that needs this lock takes it, and reports the error then
    if note is None:
        return "unknown"
    return "ended" if note.state == "ended" else "lost"
