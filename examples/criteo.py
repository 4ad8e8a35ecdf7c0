"""Reads Criteo's click logs, and draws logs of the same shape at any size, as training tasks.

`CriteoReader` reads the files that Criteo publishes. Each line is a sample, with fields separated
by tabs: the label (0 or 1), 13 integers, 26 categorical values of 8 hexadecimal digits. Any of the
39 values may be missing. `CriteoShapeReader` draws any number of samples. The ids in their
categorical columns have the frequencies in examples/data/criteo_shape.json; it uses no data of
Criteo's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from batches import Batch, hash_rows, mix64

__all__ = [
    "ColumnShape",
    "CriteoReader",
    "CriteoShapeReader",
    "MalformedLine",
    "SHAPE_PATH",
    "load_shape",
]

SHAPE_PATH = Path(__file__).parent / "data" / "criteo_shape.json"

INTEGERS = 13
CATEGORIES = 26
_FIELDS = 1 + INTEGERS + CATEGORIES
_HEX_DIGITS = 8
_MAX_LINE_BYTES = 1 << 16
# Values have 32 bits, so this is not one of them. A missing field is its own category.
_MISSING = np.uint64(1 << 32)

_NIBBLES = np.full(256, 255, np.uint8)
_NIBBLES[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_NIBBLES[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)

_F64 = npt.NDArray[np.float64]


class MalformedLine(ValueError):
    """A line is not in Criteo's format; the message names the file and the line's byte offset."""


class CriteoReader:
    """Streams a Criteo TSV file in the order of its lines; holds only one batch in memory.

    Args:
        path: an uncompressed file, such as `train.txt` of the Kaggle challenge.
        lines: samples in each batch; the last batch may have fewer.
        rows: rows of each of the 26 tables; values are hashed to rows.
        skip_malformed: leave out lines that do not parse and count them in `malformed_lines`,
            instead of raising MalformedLine.
    """

    dense_width = INTEGERS

    def __init__(
        self,
        path: Path | str,
        *,
        lines: int = 512,
        rows: int = 1 << 18,
        skip_malformed: bool = False,
    ) -> None:
        self._path = Path(path)
        self._lines, self._rows, self._skip_malformed = lines, rows, skip_malformed
        self._offset_bytes = 0
        self.malformed_lines = 0
        self.tables = {f"C{column + 1}": rows for column in range(CATEGORIES)}
        self.total_batches: int | None = None
        self._file_bytes = os.path.getsize(self._path)

    def __iter__(self) -> Iterator[Batch]:
        with self._path.open("rb") as file:
            file.seek(self._offset_bytes)
            while batch := self._next(file):
                yield batch

    def _next(self, file: BinaryIO) -> Batch | None:
        samples: list[list[bytes]] = []
        while len(samples) < self._lines and (line := file.readline(_MAX_LINE_BYTES)):
            try:
                samples.append(_split(line))
            except ValueError as error:
                if not self._skip_malformed:
                    raise self._malformed(file.tell() - len(line), str(error)) from error
                self.malformed_lines += 1
        # Set before the batch is returned, so that a state taken after training on the batch points
        # to the next batch.
        self._offset_bytes = file.tell()
        return _batch(samples, self._rows) if samples else None

    def _malformed(self, offset_bytes: int, found: str) -> MalformedLine:
        return MalformedLine(
            f"{self._path}, line at byte {offset_bytes}: {found}; expected label 0 or 1, "
            f"{INTEGERS} integers and {CATEGORIES} values of {_HEX_DIGITS} hexadecimal digits, "
            f"separated by tabs. Next: repair the line, or skip such lines (skip_malformed)"
        )

    def state_dict(self) -> dict[str, object]:
        """Return the reader's position between two batches."""
        return {
            "file_bytes": self._file_bytes,
            "malformed_lines": self.malformed_lines,
            "offset_bytes": self._offset_bytes,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue after the last batch that was read before `state` was taken.

        Raises:
            ValueError: the file ends before the position in `state`.
        """
        offset, malformed = state["offset_bytes"], state["malformed_lines"]
        if not isinstance(offset, int) or not 0 <= offset <= self._file_bytes:
            raise ValueError(f"byte {offset!r} of {self._path}, which has {self._file_bytes} bytes")
        if not isinstance(malformed, int):
            raise ValueError(f"{malformed!r} malformed lines")
        self._offset_bytes, self.malformed_lines = offset, malformed


def _split(line: bytes) -> list[bytes]:
    """Return the 40 fields of a line, after checking that `_batch` can convert each of them.

    Raises:
        ValueError: a field cannot be converted.
    """
    if not line.endswith(b"\n") and len(line) >= _MAX_LINE_BYTES:
        raise ValueError(f"more than {_MAX_LINE_BYTES} bytes without a line end")
    fields = line.rstrip(b"\r\n").split(b"\t")
    if len(fields) != _FIELDS:
        raise ValueError(f"{len(fields)} fields")
    if fields[0] not in (b"0", b"1"):
        raise ValueError(f"label {fields[0]!r:.40}")
    for field in fields[1 : 1 + INTEGERS]:
        digits = field.removeprefix(b"-")
        if field and not (digits.isdigit() and len(digits) <= 18):
            raise ValueError(f"integer {field!r:.40}")
    for field in fields[1 + INTEGERS :]:
        if field and len(field) != _HEX_DIGITS:
            raise ValueError(f"categorical value {field!r:.40}")
    # One table look-up for the whole line is far cheaper than 26 conversions.
    digits_read = _NIBBLES[np.frombuffer(b"".join(fields[1 + INTEGERS :]), np.uint8)]
    if (digits_read == 255).any():
        raise ValueError("a categorical value with characters that are not hexadecimal digits")
    return fields


def _batch(samples: list[list[bytes]], rows: int) -> Batch:
    label = torch.tensor([float(fields[0] == b"1") for fields in samples])
    dense = np.array(
        [[int(field or b"0") for field in fields[1 : 1 + INTEGERS]] for fields in samples],
        dtype=np.float64,
    )
    # Short fields are padded with NUL, so the first byte of a missing field is 0.
    digits = np.array([fields[1 + INTEGERS :] for fields in samples], dtype=f"S{_HEX_DIGITS}")
    characters = digits.view(np.uint8).reshape(len(samples), CATEGORIES, _HEX_DIGITS)
    missing = characters[:, :, 0] == 0
    shifts = np.arange(4 * (_HEX_DIGITS - 1), -1, -4, dtype=np.uint64)
    values = (_NIBBLES[characters].astype(np.uint64) << shifts).sum(axis=2, dtype=np.uint64)
    values[missing] = _MISSING
    sparse = np.stack(
        [hash_rows(values[:, c], column=c, rows=rows) for c in range(CATEGORIES)], axis=1
    )
    return Batch(_compressed(dense), torch.from_numpy(sparse), label)


def _compressed(integers: _F64) -> torch.Tensor:
    """Return log(1 + x) of counts, F32; the few negative counts, of unknown meaning, become 0."""
    return torch.from_numpy(np.log1p(np.maximum(integers, 0)).astype(np.float32))


@dataclass(frozen=True, kw_only=True)
class ColumnShape:
    """The frequencies of one column's ids.

    Id 0 means missing, ids 1 … h are the head, and the others are a Zipf-Mandelbrot tail: id = h +
    floor(x), where x has a density proportional to (x + q)^-s on [1, k + 1).
    """

    name: str
    cardinality: int
    p_missing: float
    head: tuple[float, ...]  # frequencies of ids 1 … h among lines that are not missing
    p_tail: float
    k: int
    s: float
    q: float

    def draw(self, generator: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """Draw the ids of `count` lines independently of each other: I64 [count]."""
        uniform = generator.random(count)
        ids = np.zeros(count, np.int64)
        present = uniform >= self.p_missing
        # A uniform number above a threshold, rescaled, is uniform again: one draw for each line is
        # enough.
        scaled = (uniform[present] - self.p_missing) / (1 - self.p_missing)
        bounds = np.cumsum(self.head)
        p_head = bounds[-1] if self.k else 1.0  # published frequencies are rounded
        drawn = 1 + np.searchsorted(bounds[:-1], scaled, side="right")
        in_tail = scaled >= p_head
        if in_tail.any():
            drawn[in_tail] = self._tail((scaled[in_tail] - p_head) / (1 - p_head))
        ids[present] = drawn
        return ids

    def _tail(self, uniform: _F64) -> npt.NDArray[np.int64]:
        """Map uniform numbers to ids of the tail by its inverse distribution function.

        The function has a pole at s = 1, which no column has.
        """
        power = 1 - self.s
        low, high = (1 + self.q) ** power, (self.k + 1 + self.q) ** power
        x = (low - uniform * (low - high)) ** (1 / power) - self.q
        # Rounding may move the ends of the interval outside it.
        ids: npt.NDArray[np.int64] = np.clip(np.floor(x), 1, self.k).astype(np.int64)
        return len(self.head) + ids


def _rows_of_ids(column: int, shape: ColumnShape, rows: int) -> npt.NDArray[np.int64] | None:
    """Return a row for each id of a small column; None: too many ids, so that they share rows.

    Ids are in the order of frequency. Rows are not, because they are not in real systems either.
    """
    ids = 1 + len(shape.head) + shape.k
    if ids > min(rows, 1 << 20):
        return None
    order: npt.NDArray[np.int64] = np.random.default_rng(column).permutation(ids)
    return order


def load_shape(path: Path = SHAPE_PATH, *, scale: float = 1.0) -> list[ColumnShape]:
    """Read the columns of a shape file.

    Args:
        path: of the file.
        scale: multiplies the cardinality and tail of columns with more than 100,000 ids.
    """
    shapes = []
    for entry in json.loads(path.read_text(encoding="utf-8")):
        factor = scale if entry["card"] > 100_000 else 1
        shapes.append(
            ColumnShape(
                name=entry["col"],
                cardinality=round(entry["card"] * factor),
                p_missing=entry["p_missing"],
                head=tuple(entry["head"]),
                p_tail=entry["p_tail"],
                k=round(entry["K"] * factor),
                s=entry["s"],
                q=entry["q"],
            )
        )
    return shapes


class CriteoShapeReader:
    """Draws batches in the shape of a Criteo log.

    The frequencies of the categorical ids come from the shape file. Everything else is invented so
    that there is something to learn: the integers are rounded log-normal numbers, and the label is
    drawn from a logistic model over the integers and a hash of each id.

    Each batch has its own generator, made from the seed and the batch's number. So the position is
    the whole state, and any batch can be drawn without the batches before it.

    Args:
        lines: samples in each batch.
        rows: most rows that a table may have; ids of columns with more ids are hashed to rows.
        scale: see `load_shape`.
        batches: batches in one pass.
        seed: of the draws; the hidden model does not depend on the seed.
    """

    dense_width = INTEGERS

    def __init__(
        self,
        *,
        lines: int = 512,
        rows: int = 1 << 18,
        scale: float = 1.0,
        batches: int = 2000,
        seed: int = 0,
        path: Path = SHAPE_PATH,
    ) -> None:
        self._shapes = load_shape(path, scale=scale)
        self._rows_of = [_rows_of_ids(c, shape, rows) for c, shape in enumerate(self._shapes)]
        self.tables = {
            shape.name: min(shape.cardinality, rows) if rows_known is None else len(rows_known)
            for shape, rows_known in zip(self._shapes, self._rows_of, strict=True)
        }
        self.total_batches: int | None = batches
        self._batches, self._lines, self._seed = batches, lines, seed
        self._batches_done = 0

    def __iter__(self) -> Iterator[Batch]:
        while self._batches_done < self._batches:
            self._batches_done += 1
            yield self.batch(self._batches_done - 1)

    def batch(self, number: int) -> Batch:
        """Return batch `number`; the same number always gives the same batch."""
        generator = np.random.default_rng([self._seed, number])
        integers = np.floor(generator.lognormal(1.0, 1.5, (self._lines, INTEGERS)))
        dense = _compressed(integers)
        logit = dense.numpy()[:, :4].sum(axis=1, dtype=np.float64) * 0.25 - 3.4
        sparse = np.empty((self._lines, CATEGORIES), np.int64)
        for column, (shape, rows) in enumerate(
            zip(self._shapes, self.tables.values(), strict=True)
        ):
            ids = shape.draw(generator, self._lines).view(np.uint64)
            rows_known = self._rows_of[column]
            sparse[:, column] = (
                hash_rows(ids, column=column, rows=rows) if rows_known is None else rows_known[ids]
            )
            hidden = mix64(ids ^ mix64(np.full(1, 1000 + column, np.uint64)))
            logit += (hidden / 2.0**64 - 0.5) * 0.8
        label = generator.random(self._lines) < 1 / (1 + np.exp(-logit))
        return Batch(dense, torch.from_numpy(sparse), torch.from_numpy(label).float())

    def state_dict(self) -> dict[str, object]:
        """Where the reader stands, between two batches."""
        return {"batches_done": self._batches_done, "seed": self._seed}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on right behind the batch that was the last one when `state` was taken."""
        batches_done, seed = state["batches_done"], state["seed"]
        if not isinstance(batches_done, int) or batches_done < 0 or not isinstance(seed, int):
            raise ValueError(f"no position of a CriteoShapeReader: {state!r:.200}")
        self._batches_done, self._seed = batches_done, seed
