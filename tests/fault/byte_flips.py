"""Flips one bit of every byte of every object of a run, and says what a check and a restore find.

`make nightly` runs this for every byte: `python -m tests.fault.byte_flips`. `make test` takes every
193rd (`test_byte_flips.py`). Byte number n of an object has its bit n mod 8 flipped.

After each flip the whole run is checked at the level `full`. Then its newest checkpoint is restored
and, if the object belongs to one checkpoint, that checkpoint by its step. Whatever a restore
returns is compared bit for bit with the same checkpoint before the flip.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.restore.order import NEWEST, Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.local import LocalStore
from recpoint.errors import RecpointError
from recpoint.format.naming import generation_in_key
from tests.catalog_builder import copy_run
from tests.every_record import every_record, kind_name

__all__ = ["Flip", "Tally", "flip_run", "table"]

#: What a restore of the newest checkpoint did after a flip: `newest`: it restored that checkpoint;
#: `around`: an older one; `refused`: none, by an error.
_RESTORES = ("newest", "around", "refused", "wrong")

#: The bits of a checkpoint: every table and row state, and the tensors of its state trees.
Bits = list[bytes]


class Flip(NamedTuple):
    """One byte of one object."""

    key: str
    at: int


class Tally:
    """Counts what was found, by kind of object.

    Attributes:
        counts: (kind, what) -> number of flips; what is `flips`, `objects`, `found` or how the
            restore of the newest checkpoint ended.
        missed: the flips that the check did not find, and those that a restore got wrong.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.missed: list[tuple[Flip, str]] = []

    def add(self, other: Tally) -> None:
        """Adds the counts of `other`."""
        self.counts.update(other.counts)
        self.missed += other.missed

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of objects, sorted."""
        return sorted({kind for kind, _ in self.counts})


def flip_run(run: Run, *, every: int, share: tuple[int, int] = (0, 1)) -> Tally:
    """Flips a bit of every `every`-th byte of a run in a local directory, one at a time.

    Args:
        run: the run; each byte is put back after its flip.
        every: of so many bytes one is flipped.
        share: (number, of) selects the flips of one of several processes.
    """
    tally, truth = Tally(), _truth(run)
    sizes = {info.key: info.size_bytes for info in run.store.list()}
    offset, flips = 0, list[Flip]()
    for key, size in sorted(sizes.items()):
        # Counted through all objects, so that a small object is not left out each time.
        flips += [Flip(key, at) for at in range(-offset % every, size, every)]
        offset += size
        tally.counts[kind_name(key), "objects"] += share[0] == 0
    number, of = share
    for flip in flips[number::of]:
        path = Path(run.url, flip.key)
        data = path.read_bytes()
        path.write_bytes(_flipped(data, flip.at))
        _look(run.url, flip, truth, tally)
        path.write_bytes(data)
    assert check(run, level="full").ok
    return tally


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]


def _look(url: str, flip: Flip, truth: Mapping[int, Bits], tally: Tally) -> None:
    """Checks and restores a run with one flipped bit."""
    kind = kind_name(flip.key)
    tally.counts[kind, "flips"] += 1
    if _is_found(url, flip.key):
        tally.counts[kind, "found"] += 1
    else:
        tally.missed.append((flip, "not found by the check"))
    for selection in (NEWEST, *_of_its_own(flip.key, truth)):
        ended = _restored(url, selection, truth)
        if selection is NEWEST:
            tally.counts[kind, ended] += 1
        if ended == "wrong":
            tally.missed.append((flip, f"restored wrong: {selection.in_words}"))


def _is_found(url: str, key: str) -> bool:
    """Tells whether a check names the object."""
    try:
        report = check(Run.open(LocalStore(Path(url))), level="full", threads=1)
    except RecpointError as error:
        return error.subject.endswith(key)
    return any(key == found.key and found.severity != "info" for found in report.findings)


def _of_its_own(key: str, truth: Mapping[int, Bits]) -> Iterable[Selection]:
    """Selects the checkpoint that an object is part of."""
    directory, _, name = key.partition("/")
    if directory not in ("chunks", "manifests", "consolidated"):
        return
    step = int(name[:12])
    if step in truth:
        yield Selection(step=step, generation=generation_in_key(key))


def _restored(url: str, selection: Selection, truth: Mapping[int, Bits]) -> str:
    target = MemoryTarget()
    try:
        restore(Run.open(LocalStore(Path(url))), target, selection)
    except RecpointError:
        return "refused"
    assert target.manifest is not None
    step = target.manifest.step
    if _bits(target) != truth[step]:
        return "wrong"
    return "newest" if step == max(truth) else "around"


def _truth(run: Run) -> dict[int, Bits]:
    found = {}
    for name in run.live_line():
        target = MemoryTarget()
        restore(run, target, Selection.of(name))
        found[name.step] = _bits(target)
    return found


def _bits(target: MemoryTarget) -> Bits:
    tensors = [
        part for table in target.tables.values() for part in (table.values, *table.row_states)
    ]
    found = [tensor for tensor in tensors if tensor is not None]
    text = [repr(sorted(target.state.items(), key=lambda item: item[0])).encode()]
    return text + [t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in found]


# --- the command ----------------------------------------------------------------------------------


def table(tally: Tally) -> str:
    """Return the counts as a table in Markdown."""
    columns = ("objects", "flips", "found", *_RESTORES)
    lines = [
        "| object | objects | flips | found by the check | newest restored | older restored | "
        "refused by name | restored wrong |",
        "|---|" + "---:|" * len(columns),
    ]
    for kind in tally.kinds:
        counts = (f"{tally.counts[kind, column]:,}" for column in columns)
        lines.append(f"| {kind} | {' | '.join(counts)} |")
    total = (f"{sum(tally.counts[kind, column] for kind in tally.kinds):,}" for column in columns)
    return "\n".join([*lines, f"| all | {' | '.join(total)} |"])


def _share(url: str, folder: str, every: int, share: tuple[int, int]) -> Tally:
    torch.set_num_threads(1)
    run = Run.open(LocalStore(Path(url)))
    return flip_run(copy_run(run, Path(folder, f"copy-{share[0]}")), every=every, share=share)


def main() -> int:
    """Run as a command; return the exit code: 1 if a flip was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fault.byte_flips", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="of so many bytes one is flipped")
    parser.add_argument("--workers", type=int, default=2, help="processes that share the bytes")
    given = parser.parse_args()
    memory = Path("/dev/shm")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        run = every_record(Path(folder))
        shares = [(run.url, folder, given.every, (n, given.workers)) for n in range(given.workers)]
        with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
            tallies = pool.starmap(_share, shares)
    tally = tallies[0]
    for other in tallies[1:]:
        tally.add(other)
    print(table(tally))
    print(f"{time.monotonic() - began:.0f} s, {given.workers} processes")
    for flip, why in tally.missed:
        print(f"MISSED: byte {flip.at} of {flip.key}: {why}")
    return 1 if tally.missed else 0


if __name__ == "__main__":
    sys.exit(main())
