"""Faults of stored bytes: flips, truncation, lost or mixed up increments, hostile descriptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks.faults.system import Hostile, NotApplicable, Place, normal
from benchmarks.faults.trials import Trials, not_applicable
from benchmarks.faults.verdicts import Outcome, Verdict, worst

__all__ = ["bit_flip", "disturbed", "falsified", "truncation"]

_STATES = normal()[:1], normal()[:2]
_FLIPS_A_FILE = 6


def bit_flip(trials: Trials) -> Verdict:
    """Flip one bit of each file of the newest checkpoint, at places spread over the file."""

    def flips(path: Path) -> Iterator[bytes]:
        data = path.read_bytes()
        count = min(_FLIPS_A_FILE, len(data))
        for number in range(count):
            offset = (2 * number + 1) * len(data) // (2 * count)
            yield data[:offset] + bytes([data[offset] ^ (1 << offset % 8)]) + data[offset + 1 :]

    return _each_file(trials, flips)


def truncation(trials: Trials) -> Verdict:
    """Cut each file of the newest checkpoint: by its last byte, in half, to nothing."""

    def cuts(path: Path) -> Iterator[bytes]:
        data = path.read_bytes()
        for length in sorted({len(data) - 1, len(data) // 2, 0}):
            if 0 <= length < len(data):
                yield data[:length]

    return _each_file(trials, cuts)


def _each_file(trials: Trials, damages: Callable[[Path], Iterable[bytes]]) -> Verdict:
    place = trials.prepared(*_STATES)
    verdicts = []
    for path in trials.kind(place).files(2):
        for data in list(damages(path)):
            trials.put_back(place)
            path.write_bytes(data)
            names = [path.name, *trials.names(place, 2)]
            # A flip that changes nothing that is restored leaves the newest state sound.
            verdict = trials.judge(trials.restored(place), newest=_STATES, names=names)
            verdicts.append(_at(path, place, verdict))
    return worst(verdicts)


def _at(path: Path, place: Place, verdict: Verdict) -> Verdict:
    if not verdict.why:
        return verdict
    file_name = path.relative_to(place.store).as_posix()
    return Verdict(verdict.outcome, f"{file_name}: {verdict.why}")


def disturbed(trials: Trials, what: str) -> Verdict:
    """Take away, repeat or exchange stored increments."""
    states = [normal()[:step] for step in (1, 2, 3, 4)]
    sound = {"missing increment": 2, "duplicate increment": 3, "out-of-order increment": 2}[what]
    place = trials.prepared(*states)
    trials.kind(place).disturb(what)
    names = trials.names(place, 3, 4)
    return trials.judge(trials.restored(place), newest=[normal()[:sound]], names=names)


def falsified(trials: Trials, what: Hostile) -> Verdict:
    """Change the description of the newest checkpoint as an adversary would.

    A checkpoint of an unknown version is the work of a later release, and sound: to restore an
    older one without a word would lose it. This release cannot read it, so a clear error counts.
    """
    place = trials.prepared(*_STATES)
    try:
        changed = trials.kind(place).falsify(what, 2)
    except NotApplicable as error:
        return not_applicable(str(error))
    names = [*(path.name for path in changed), *trials.names(place, 2)]
    if what != "unknown version":
        return trials.judge(trials.restored(place), newest=_STATES, names=names)
    verdict = trials.judge(trials.restored(place), newest=_STATES[1:], names=names)
    if verdict.outcome is Outcome.CLEAR:
        return Verdict(Outcome.SURVIVED, f"refused by name: {verdict.why}")
    return verdict
