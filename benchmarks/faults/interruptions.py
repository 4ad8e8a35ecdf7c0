"""Faults that end or fail a write: disk errors, SIGKILL, a full disk, stale files, a clock."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.io_faults import CHANGES, DATA, Cause, IoFault
from benchmarks.faults.system import Place, System, Tags, normal
from benchmarks.faults.trials import Trials, not_applicable, save, spread
from benchmarks.faults.verdicts import Outcome, Verdict, is_clear, worst

__all__ = [
    "clock_skew",
    "disk_full",
    "killed_at_each_boundary",
    "killed_in_an_overwrite",
    "stale_files",
    "worker_killed",
    "writer_dies",
]

_ONE, _TWO = normal()[:1], normal()[:2]
_DAY_SECONDS = 86_400
_DISK_BYTES = 64 << 10


def _save_two(system: System) -> None:
    save(system, _TWO)


def _judged(trials: Trials, place: Place, *, acknowledged: bool, tags: Tags = _TWO) -> Verdict:
    """Judge the state after a save of `tags`; what was acknowledged must be there."""
    newest = [tags] if acknowledged else [_ONE, tags]
    names = trials.names(place, 1, len(tags))
    return trials.judge(
        trials.restored(place), newest=newest, names=names, acknowledged=acknowledged
    )


def writer_dies(trials: Trials) -> Verdict:
    """Let each write of data fail once with EIO, in whatever thread or process writes."""
    place = trials.prepared(_ONE)
    how: dict[str, Any] = {"threaded": True}
    count = trials.operations(place, _save_two, kinds=DATA, **how)
    verdicts = []
    for operation in spread(max(count, 3), trials.places):
        trials.put_back(place)
        fault = IoFault(
            cause=Cause.FAIL, at=operation, kinds=DATA, below=place.folder, error=errno.EIO
        )
        saved = trials.perform(place, _save_two, fault=fault, **how)
        verdicts.append(_judged(trials, place, acknowledged=saved.ok))
    return worst(verdicts)


def killed_at_each_boundary(trials: Trials) -> Verdict:
    """Kill the process group of a save before each of its file operations."""
    return _killed(trials, trials.prepared(_ONE), _save_two)


def killed_in_an_overwrite(trials: Trials) -> Verdict:
    """Save other values of a step that is there, and be killed before each file operation.

    The state before, the state after or step 1 must be there, whole. recpoint has no overwrite: a
    trainer that goes back to step 1 takes the step again.
    """
    second_save = (1, 902)

    def overwrite(system: System) -> None:
        save(system, second_save, overwrite=True)

    place = trials.prepared(_ONE, _TWO)
    refused = trials.perform(place, overwrite)
    if not refused.ok and trials.restored(place).value == (2, trials.digest(_TWO)):
        return not_applicable(f"refuses to write over a checkpoint: {refused.error_type}")
    trials.put_back(place)
    return _killed(trials, place, overwrite, sound=[_ONE, _TWO, second_save])


def _killed(
    trials: Trials,
    place: Place,
    does: Callable[[System], None],
    *,
    sound: Sequence[Tags] = (_ONE, _TWO),
) -> Verdict:
    count = trials.operations(place, does)
    verdicts = []
    chosen = spread(count, 3 * trials.places)
    for operation in chosen:
        trials.put_back(place)
        fault = IoFault(cause=Cause.KILL_GROUP, at=operation, kinds=CHANGES, below=place.folder)
        trials.perform(place, does, fault=fault)
        restored = trials.restored(place)
        names = trials.names(place, 1, 2)
        verdicts.append(trials.judge(restored, newest=sound, names=names))
    verdict = worst(verdicts)
    part = "" if len(chosen) == count else f"{len(chosen)} of {count} places tried"
    return Verdict(verdict.outcome, "; ".join(filter(None, (verdict.why, part))))


def worker_killed(trials: Trials) -> Verdict:
    """Kill the process that writes for the trainer, in the middle of a save."""
    place = trials.prepared(_ONE)
    verdicts = []
    for operation in (1, 4, 7):
        trials.put_back(place)
        fault = IoFault(
            cause=Cause.KILL_SELF,
            at=operation,
            below=place.store,
            only_children=True,
            kinds=CHANGES,
        )
        saved = trials.perform(place, _save_two, fault=fault, worker=True)
        verdicts.append(_judged(trials, place, acknowledged=saved.ok))
    return worst(verdicts)


def disk_full(trials: Trials) -> Verdict:
    """Save where a file system of 64 KiB is what is written first: staging, or the store itself.

    The file system is mounted for the trial, which needs root.
    """
    place = trials.prepared(_ONE)
    first = place.staging if trials.kind.name == "recpoint" else place.store
    filled = first.with_name("before")
    first.rename(filled)
    first.mkdir()
    size = _DISK_BYTES + sum(path.stat().st_size for path in filled.rglob("*") if path.is_file())
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "recpoint-faults", str(first)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        return not_applicable(f"not run: no file system could be mounted: {mounted.stderr.strip()}")
    verdicts = []
    try:
        subprocess.run(["cp", "-a", f"{filled}/.", str(first)], check=True)
        free_bytes = _fill(first / "filler")
        for room in (0, 4096, 8192, free_bytes // 2):
            _fill(first / "filler", leave=room)
            saved = trials.perform(place, _save_two)
            # After the trouble, there is room again.
            (first / "filler").unlink()
            verdicts.append(_judged(trials, place, acknowledged=saved.ok))
            subprocess.run(f"rm -rf {first}/* && cp -a {filled}/. {first}", shell=True, check=True)
    finally:
        subprocess.run(["umount", "-l", str(first)], check=True)
        first.rmdir()
        filled.rename(first)
    return worst(verdicts)


def _fill(path: Path, *, leave: int = 0) -> int:
    """Fill a file system with a file, but for `leave` bytes; return the file's length."""
    path.unlink(missing_ok=True)
    written = 0
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                written += file.write(bytes(4096))
        except OSError:
            pass
        file.truncate(max(0, written - leave))
    return written


def stale_files(trials: Trials) -> Verdict:
    """An earlier run left its checkpoints; a new one begins anew, saves two steps and is killed."""
    earlier = tuple(range(101, 107))
    place = trials.prepared(earlier[:4], earlier[:5], earlier)
    names = trials.names(place, 2, len(earlier))
    saved = trials.perform(place, lambda system: save(system, _ONE, _TWO, start="anew"))
    if not saved.ok:
        clear = is_clear(saved, [*trials.names(place, 1), *names])
        reason = f"does not begin: {saved}"[:160]
        return Verdict(Outcome.CLEAR if clear else Outcome.UNCLEAR, reason)
    return trials.judge(
        trials.restored(place),
        newest=[_TWO],
        names=names,
        acknowledged=True,
        earlier=[earlier[:4], earlier[:5], earlier],
    )


def clock_skew(trials: Trials) -> Verdict:
    """The clock is put back by a day, or forward, between two saves, and then put right."""
    verdicts = []
    for offset in (-_DAY_SECONDS, _DAY_SECONDS):
        place = trials.prepared(_ONE)
        old_paths = {path for path in place.folder.rglob("*")}
        saved = trials.perform(place, _save_two, clock_offset_seconds=offset)
        # The kernel's stamps are made as that clock would have.
        for path in place.folder.rglob("*"):
            if path not in old_paths:
                time_s = time.time() + offset
                os.utime(path, (time_s, time_s), follow_symlinks=False)
        third = trials.perform(place, lambda system: save(system, normal()[:3]))
        verdicts.append(_judged(trials, place, acknowledged=third.ok, tags=normal()[:3]))
        if not saved.ok:
            verdicts.append(Verdict(Outcome.CLEAR, f"a save fails: {saved}"))
    return worst(verdicts)
