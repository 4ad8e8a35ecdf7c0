"""Says which rows of a sink stand at which older version, as the sink itself records it.

A version under a budget leaves some of its changed rows for later versions: they are deferred. Each
keeps the value that it had at the version of the sink before its first deferral. The ids of these
rows lie beside the dense layers of the version, so they come and go with it, in tensors named

    recpoint.deferred/NUMBER/STEP/GENERATION/ATTEMPT/COUNT/CODING/FIRST/TABLE

one for each table and each version that rows stand at: the number of that version in the sink, its
checkpoint, the number of rows, and how the tensor codes their ids. Ids of rows are a row set
(format §3.1): its coding, first id and payload, u8. Keys are int64 themselves (`keys`, 0).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from recpoint.errors import IncompatibleModel, MalformedObject
from recpoint.format.naming import MAX_GENERATION, MAX_STEP
from recpoint.format.records import CheckpointRef
from recpoint.kernels import row_set
from recpoint.serving.sinks.records import EMPTY_FIRST, DeferredRows, SinkTable, SinkVersion

__all__ = ["Backlog", "StandingRows", "without_backlog"]

_PREFIX: Final = "recpoint.deferred/"
_KEYS: Final = "keys"


class StandingRows(NamedTuple):
    """Deferred rows of one table.

    Attributes:
        ids: int64 [n], ascending.
        numbers: int64 [n]: number of the sink's version that each of them stands at.
    """

    ids: Tensor
    numbers: Tensor

    def numbers_of(self, ids: Tensor) -> Tensor:
        """Return the number of the version that each of the rows `ids` [n] stands at; 0: none."""
        if not len(self.ids):
            return torch.zeros_like(ids)
        places = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        return torch.where(self.ids[places] == ids, self.numbers[places], 0)


_NO_IDS: Final = torch.empty(0, dtype=torch.int64, device="cpu")
_NO_ROWS: Final = StandingRows(_NO_IDS, _NO_IDS)


class Backlog:
    """The deferred rows of one version of a sink. Takes 16 bytes of memory a row.

    Attributes:
        checkpoints: number of a version of the sink -> its checkpoint, for each version that rows
            may stand at.
    """

    def __init__(self) -> None:
        self.checkpoints: dict[int, CheckpointRef] = {}
        self._parts: dict[str, list[StandingRows]] = {}
        self._sorted: dict[str, StandingRows] = {}  # tables to which nothing was added since

    @classmethod
    def of_dense(cls, dense: Mapping[str, Tensor], version: SinkVersion, *, url: str) -> Self:
        """Return what a sink records beside its dense layers.

        Args:
            dense: all tensors that lie there.
            version: the version that the sink holds.
            url: of the sink, for errors.

        Raises:
            MalformedObject: a record is damaged.
        """
        backlog = cls()
        for name, coded in dense.items():
            if name.startswith(_PREFIX):
                try:
                    backlog._read(name, coded, version)
                except ValueError as error:
                    raise MalformedObject(
                        f"{url}, {name:.300}",
                        found=str(error),
                        expected="ids of rows that stand at an older version",
                        next_step=EMPTY_FIRST,
                    ) from error
        return backlog

    def _read(self, name: str, coded: Tensor, version: SinkVersion) -> None:
        fields = name.removeprefix(_PREFIX).split("/", 7)
        if len(fields) != 8:
            raise ValueError(f"a name of {len(fields)} parts")
        number, step, generation, count, first = (int(fields[place]) for place in (0, 1, 2, 4, 6))
        attempt, coding, table_name = fields[3], fields[5], fields[7]
        table = version.table(table_name)
        if table is None or not (0 < number < 1 << 48 and step <= MAX_STEP):
            raise ValueError(f"table {table_name!r:.80} at version {number}")
        if not 0 < generation <= MAX_GENERATION:
            raise ValueError(f"generation {generation}")
        self.checkpoints[number] = CheckpointRef(step=step, generation=generation, attempt=attempt)
        self.add(table_name, _decoded(coded, coding, first, count, table), number)

    def add(self, table: str, ids: Tensor, numbers: int | Tensor) -> None:
        """Take note of rows; each row once.

        Args:
            table: name of the table.
            ids: int64 [n].
            numbers: of the version that all rows stand at, or int64 [n].
        """
        if len(ids):
            self._sorted.pop(table, None)
            each = numbers if isinstance(numbers, Tensor) else torch.full_like(ids, numbers)
            self._parts.setdefault(table, []).append(StandingRows(ids, each))

    def rows_of(self, table: str) -> StandingRows:
        """Return the deferred rows of a table; sorted once, however often it is called."""
        parts = self._parts.get(table)
        if not parts:
            return _NO_ROWS
        if table in self._sorted:
            return self._sorted[table]
        ids = torch.cat([part.ids for part in parts])
        order = ids.argsort()
        rows = StandingRows(ids[order], torch.cat([part.numbers for part in parts])[order])
        self._parts[table], self._sorted[table] = [rows], rows
        return rows

    @property
    def numbers(self) -> list[int]:
        """Numbers of the versions that rows stand at, the oldest first."""
        parts = [part.numbers for parts in self._parts.values() for part in parts]
        return torch.cat(parts).unique().tolist() if parts else []

    def summary(self, table: SinkTable) -> DeferredRows | None:
        """Return how many rows of a table are deferred; None: none."""
        rows = self.rows_of(table.name)
        if not len(rows.ids):
            return None
        number = int(rows.numbers.min())
        return DeferredRows(
            rows=len(rows.ids),
            size_bytes=len(rows.ids) * table.row_bytes,
            oldest=self.checkpoints[number],
            oldest_number=number,
        )

    def beside(self, dense: Mapping[str, Tensor], version: SinkVersion) -> dict[str, Tensor]:
        """Return dense layers and, beside them, the record of these rows.

        Raises:
            IncompatibleModel: a dense layer has a name as records have.
        """
        for name in dense:
            if name.startswith(_PREFIX):
                raise IncompatibleModel(
                    f"dense tensor {name!r:.200}",
                    found=f"a name that begins with {_PREFIX!r}",
                    expected="another name: these tensors say which rows of a sink are deferred",
                    next_step="rename the module, or publish without a budget",
                )
        return {**dense, **dict(self._records(version))}

    def _records(self, version: SinkVersion) -> Iterator[tuple[str, Tensor]]:
        for table in version.tables:
            rows = self.rows_of(table.name)
            for number in rows.numbers.unique().tolist():
                ids = rows.ids[rows.numbers == number]
                coding, first, coded = _coded(ids, table)
                checkpoint = self.checkpoints[number]
                name = "/".join(
                    (
                        *(str(number), str(checkpoint.step), str(checkpoint.generation)),
                        *(checkpoint.attempt, str(len(ids)), coding, str(first), table.name),
                    )
                )
                yield _PREFIX + name, coded


def without_backlog(dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the dense layers among the tensors that lie beside the rows of a version."""
    return {name: tensor for name, tensor in dense.items() if not name.startswith(_PREFIX)}


def _coded(ids: Tensor, table: SinkTable) -> tuple[str, int, Tensor]:
    if table.ids != "rows":
        return _KEYS, 0, ids
    coded = row_set.encode(ids)
    payload = bytearray(coded.payload or b"")
    if not payload:
        return coded.coding, coded.first, torch.empty(0, dtype=torch.uint8, device="cpu")
    return coded.coding, coded.first, torch.frombuffer(payload, dtype=torch.uint8)


def _decoded(coded: Tensor, coding: str, first: int, count: int, table: SinkTable) -> Tensor:
    """Return ids, int64 [count].

    Raises:
        ValueError: a defect; says which.
    """
    if table.ids == "rows":
        if coded.dtype != torch.uint8:
            raise ValueError(f"{coded.dtype} in place of bytes")
        payload = None if coding == "range" else coded.numpy().tobytes()
        return row_set.decode(coding, first, payload, count=count, rows=table.rows)
    is_ascending = coded.dtype == torch.int64 and bool((coded[1:] > coded[:-1]).all())
    if coding != _KEYS or not is_ascending or coded.numel() != count:
        raise ValueError(f"{coded.numel()} keys, coded as {coding!r:.40}, where {count} are stated")
    return coded
