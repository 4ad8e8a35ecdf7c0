"""Compares the coding of a chunk's row ids with the entropy bound, Roaring and Parquet.

Measured are bytes an id and speed. The sets are as large as a chunk's. Uniform: each row is in the
set with the same probability. Clustered: runs of 16 rows on average, with gaps between them. Zipf:
a row of rank k is drawn with probability ∝ k^-1.05, rows are in the order of their ranks, and draws
are made until the set reaches its density. The bound is the entropy of the source for each id; a
coder that does not know the density, the ranks or the number of draws cannot reach it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.report import Report, alternate
from recpoint.installation import install_command
from recpoint.kernels import row_set
from recpoint.kernels.row_set import cpu, reference

__all__ = ["KEYS", "run"]

KEYS = ("vs_entropy_26pct", "bytes_per_id_1pct", "vs_smallest_coding")

_DENSITIES = (0.001, 0.01, 0.1, 0.26)
_RUN = 16
_ZIPF = 1.05
_CODINGS: tuple[Literal["bitmap", "runs", "delta"], ...] = ("bitmap", "runs", "delta")


@dataclass(frozen=True, kw_only=True)
class _Set:
    name: str
    ids: Tensor
    rows: int
    bound: float  # bytes an id


@dataclass(frozen=True, kw_only=True)
class _Peer:
    """Another library's coding: `encode` returns the bytes of ids, `decode` an array of the ids."""

    name: str
    encode: Callable[[np.ndarray[Any, Any]], bytes]
    decode: Callable[[bytes], np.ndarray[Any, Any]]


def run(*, smoke: bool) -> Report:
    """Measure all sets, after the gate."""
    count, rounds = (10_000, 3) if smoke else (800_000, 9)
    _gate()
    peers = {"roaring": _roaring(), "parquet": _parquet()}
    report = Report(
        name="row_set",
        columns=(
            "rows",
            "ids",
            "coding",
            "entropy",
            "ours",
            "times",
            "M/s",
            *(column for name in peers for column in (name, "M/s")),
        ),
    )
    regrets: dict[str, float] = {}
    for row_ids in _sets(count):
        coded = row_set.encode(row_ids.ids)
        bytes_per_id = _bytes(coded) / row_ids.ids.numel()
        over = bytes_per_id / row_ids.bound if row_ids.bound else 1.0
        figures = _measured(report, row_ids, peers, rounds)
        report.rows.append(
            (
                row_ids.name,
                row_ids.ids.numel(),
                coded.coding,
                row_ids.bound,
                bytes_per_id,
                over,
                *figures,
            )
        )
        regrets[row_ids.name] = _regret(row_ids, coded)
        if row_ids.name == "uniform 26 %":
            report.figures["vs_entropy_26pct"] = over
        elif row_ids.name == "uniform 1 %":
            report.figures["bytes_per_id_1pct"] = bytes_per_id
    worst = max(regrets, key=lambda name: regrets[name])
    report.figures["vs_smallest_coding"] = regrets[worst]
    report.notes = [
        "Bytes an id (int64: 8); times: ours over the entropy; M/s: million ids in a second,"
        " encoded / decoded, from and to an int64 array.",
        "vs_smallest_coding: the coding chosen from three counts against the smallest of all three,"
        f" at worst ({worst})",
    ]
    missing = [name for name, peer in peers.items() if peer is None]
    if missing:
        report.notes.append(f"not run: {', '.join(missing)}; {install_command('bench')}")
    return report


def _gate() -> None:
    """Check that each kind of set decodes to its ids, and is coded in the reference's bytes."""
    for row_ids in _sets(3000):
        coded = row_set.encode(row_ids.ids)
        decoded = row_set.decode(*coded, count=row_ids.ids.numel(), rows=row_ids.rows)
        if coded != reference.encode(row_ids.ids) or not torch.equal(decoded, row_ids.ids):
            raise AssertionError(f"{row_ids.name}: other ids came back, or another coding")


def _bytes(coded: row_set.RowSet) -> int:
    return len(coded.payload) if coded.payload is not None else 0


def _regret(row_ids: _Set, coded: row_set.RowSet) -> float:
    if coded.payload is None:
        return 1.0
    span = int(row_ids.ids[-1] - row_ids.ids[0]) + 1
    runs = int((row_ids.ids.diff() != 1).sum()) + 1
    # A bitmap of a sparse set would be larger than the machine's memory.
    codings = _CODINGS if span < 200 * row_ids.ids.numel() else _CODINGS[1:]
    sizes = [len(cpu.payload_as(coding, row_ids.ids, span=span, runs=runs)) for coding in codings]
    return len(coded.payload) / min(sizes)


def _measured(
    report: Report, row_ids: _Set, peers: dict[str, _Peer | None], rounds: int
) -> list[object]:
    """Measure recpoint's speeds, then size and speeds of each peer, all called in turn."""
    count, array = row_ids.ids.numel(), row_ids.ids.numpy()
    coded = row_set.encode(row_ids.ids)
    calls: list[Callable[[], object]] = [
        lambda: row_set.encode(row_ids.ids),
        lambda: row_set.decode(*coded, count=count, rows=row_ids.rows),
    ]
    coders = ["ours"]
    sizes: list[float | None] = []
    for peer in peers.values():
        if peer is None:
            sizes.append(None)
            continue
        data = peer.encode(array)
        if not np.array_equal(peer.decode(data), array):
            raise AssertionError(f"{peer.name}: other ids came back")
        sizes.append(len(data) / count)
        coders.append(peer.name)
        calls += [_bound(peer.encode, array), _bound(peer.decode, data)]
    seconds = alternate(rounds + 1, *calls)
    names = [
        f"{row_ids.name}, {coder} {does}" for coder in coders for does in ("encodes", "decodes")
    ]
    speeds = [
        count / report.timed(name, times[1:]) / 1e6
        for name, times in zip(names, seconds, strict=True)
    ]
    paired = iter([f"{a:.0f} / {b:.0f}" for a, b in zip(speeds[::2], speeds[1::2], strict=True)])
    cells: list[object] = [next(paired)]
    for size in sizes:
        cells += ["not run", ""] if size is None else [size, next(paired)]
    return cells


def _bound(function: Callable[[Any], object], argument: object) -> Callable[[], object]:
    return lambda: function(argument)


def _sets(count: int) -> list[_Set]:
    draw = np.random.default_rng(0)
    sets = []
    for density in _DENSITIES:
        sets.append(_uniform(count, density, draw))
        sets.append(_clustered(count, density, draw))
        sets.append(_zipf(count, density, draw))
    sets.append(_Set(name="all rows", ids=torch.arange(count), rows=count, bound=0.0))
    return sets


def _uniform(count: int, density: float, draw: np.random.Generator) -> _Set:
    steps = draw.geometric(density, count)
    ids = np.cumsum(steps) - 1
    bound = float(_entropy(density)) / density / 8
    return _set(f"uniform {100 * density:g} %", ids, int(ids[-1]) + 1, bound)


def _clustered(count: int, density: float, draw: np.random.Generator) -> _Set:
    runs = count // _RUN
    gap = _RUN * (1 - density) / density
    lengths, gaps = draw.geometric(1 / _RUN, runs), draw.geometric(1 / gap, runs)
    first_of_run = np.cumsum(lengths) - lengths
    starts = np.cumsum(gaps) + first_of_run
    ids = np.repeat(starts - first_of_run, lengths) + np.arange(int(lengths.sum()))
    # The entropy of a geometric distribution of mean m is m · H(1 / m).
    bits = _RUN * _entropy(1 / _RUN) + gap * _entropy(1 / gap)
    bound = float(bits) / _RUN / 8
    return _set(f"clustered {100 * density:g} %", ids, int(ids[-1]) + 1, bound)


def _zipf(count: int, density: float, draw: np.random.Generator) -> _Set:
    rows = int(count / _DENSITIES[-1])
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -_ZIPF
    low, high = 0.0, 1e9 * rows
    for _ in range(60):
        draws = (low + high) / 2
        reached = float(-np.expm1(-draws * weights[::101]).mean())
        low, high = (draws, high) if reached < density else (low, draws)
    probability = -np.expm1(-low * weights)
    ids = np.flatnonzero(draw.random(rows) < probability)
    bound = float(_entropy(probability).sum()) / len(ids) / 8
    return _set(f"Zipf {100 * density:g} %", ids, rows, bound)


def _set(name: str, ids: np.ndarray[Any, Any], rows: int, bound: float) -> _Set:
    return _Set(name=name, ids=torch.from_numpy(ids.astype(np.int64)), rows=rows, bound=bound)


def _entropy(p: float | np.ndarray[Any, Any]) -> Any:
    """Return the entropy, in bits, of a coin that shows heads with probability p."""
    probability = np.clip(p, 1e-300, 1 - 2**-53)
    return -(
        probability * np.log2(probability) + (1 - probability) * np.log1p(-probability) / np.log(2)
    )


def _roaring() -> _Peer | None:
    """Roaring bitmaps of 64-bit ids, with runs where they are smaller."""
    try:
        pyroaring = importlib.import_module("pyroaring")
    except ImportError:
        return None

    def encode(ids: np.ndarray[Any, Any]) -> bytes:
        bitmap = pyroaring.BitMap64(ids.astype(np.uint64))
        bitmap.run_optimize()
        return bytes(bitmap.serialize())

    def decode(data: bytes) -> np.ndarray[Any, Any]:
        decoded = pyroaring.BitMap64.deserialize(data).to_array()
        return np.frombuffer(decoded, np.uint64).astype(np.int64)

    return _Peer(name="roaring", encode=encode, decode=decode)


def _parquet() -> _Peer | None:
    """One column of DELTA_BINARY_PACKED, without further compression."""
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        return None

    def encode(ids: np.ndarray[Any, Any]) -> bytes:
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(
            pyarrow.table({"ids": ids}),
            sink,
            use_dictionary=False,
            column_encoding={"ids": "DELTA_BINARY_PACKED"},
            compression="none",
            write_statistics=False,
        )
        return bytes(sink.getvalue())

    def decode(data: bytes) -> np.ndarray[Any, Any]:
        column = parquet.read_table(pyarrow.BufferReader(data))["ids"]
        decoded: np.ndarray[Any, Any] = column.to_numpy()
        return decoded

    return _Peer(name="parquet", encode=encode, decode=decode)
