"""Plans which tensors of a checkpoint go into which safetensors file, and their index.

The layout is the common one for shared models: `model-00001-of-00004.safetensors`, …, and
`model.safetensors.index.json` with a `weight_map` from each tensor's name to its file. Tensors have
the same names as in the single file that `write_one_file` writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from recpoint.catalog.restore.keyed_rows import KEYED_STATES
from recpoint.catalog.restore.order import NEWEST, Selection
from recpoint.catalog.restore.restore import (
    MemoryTarget,
    RestoreReport,
    restore,
    tied_names,
    weight_name,
)
from recpoint.catalog.restore.rows import LogicalTable, logical_tables
from recpoint.catalog.restore.state_tensors import Include, model_name, state_tensors
from recpoint.catalog.run.run import Run
from recpoint.errors import SettingsError
from recpoint.format.dtypes import Dtype, array_bytes, dtype_name, item_bytes
from recpoint.format.naming import ManifestName
from recpoint.format.records import CheckpointRef

__all__ = [
    "DEFAULT_SHARD_BYTES",
    "INDEX",
    "ORIGIN_BYTES",
    "Origin",
    "SHARD_NAME",
    "ShardFile",
    "ShardPlan",
    "ShardTensor",
    "checkpoint_in",
    "of_table",
    "plan_shards",
    "shard_metadata",
    "shard_of",
]


INDEX: Final = "model.safetensors.index.json"
SHARD_NAME: Final = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors\Z")
DEFAULT_SHARD_BYTES: Final = 1 << 30

#: The first bytes of a file that name the checkpoint that it is of.
ORIGIN_BYTES: Final = 512

#: safetensors' own readers refuse a file with a longer header.
MAX_HEADER_BYTES: Final = 100_000_000
_MOST_SHARDS: Final = 99_999  # the names of files have five digits
_ALIGNMENT_BYTES: Final = 8
_ORIGIN: Final = re.compile(
    rb'(?:.{8}\{"__metadata__":\{"format":"pt"|\{\s*"metadata":\s*\{\s*"total_size":\s*[0-9]+)'
    rb',\s*"run":\s*"([^"]*)",\s*"step":\s*"([0-9]+)",\s*"generation":\s*"([0-9]+)"'
    rb',\s*"attempt":\s*"([^"]*)",\s*"include":\s*"([^"]*)"',
    re.DOTALL,
)


class Origin(NamedTuple):
    """The checkpoint that a file or an index names as its origin."""

    name: ManifestName
    attempt: str
    include: str


class ShardTensor(NamedTuple):
    """A tensor of a file.

    `table` is the table whose values it holds, or whose row state `state`; None if it is not part
    of a table.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    table: str | None = None
    state: str | None = None

    @property
    def size_bytes(self) -> int:
        """Its bytes in the file."""
        return array_bytes(self.dtype, self.shape)

    @property
    def header_bytes(self) -> int:
        """The most bytes that it takes in the file's header."""
        return len(json.dumps(self.name)) + 128 + 24 * len(self.shape)


class ShardFile(NamedTuple):
    """A file: its tensors in order, the widest items first, which keeps all of them aligned."""

    file: str
    tensors: tuple[ShardTensor, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, without the header before them."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """Return all bytes before the first tensor.

        Raises:
            SettingsError: safetensors would not read a file with so long a header.
        """
        fields: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
        end = 0
        for tensor in self.tensors:
            begin, end = end, end + tensor.size_bytes
            fields[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": [begin, end],
            }
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT_BYTES)
        if len(text) > MAX_HEADER_BYTES:
            raise SettingsError(
                self.file,
                found=f"{len(self.tensors)} tensors, whose header takes {len(text)} bytes",
                expected=f"a header of at most {MAX_HEADER_BYTES} bytes, which safetensors reads",
                next_step="recpoint restore URL --to model.pt",
            )
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The files to write, and the checkpoint that they are restored from.

    Attributes:
        run: the run's id.
        include: what the files hold of the checkpoint.
        report: report of the restore that chose the checkpoint, which read only its state.
        shards: the files.
    """

    run: str
    include: Include
    report: RestoreReport
    shards: tuple[ShardFile, ...]

    @property
    def name(self) -> ManifestName:
        """Name of the checkpoint."""
        return ManifestName(self.report.restored.step, self.report.restored.generation)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def metadata(self) -> dict[str, str]:
        """The origin of the files, as each file states it."""
        return shard_metadata(self.run, self.report.restored, self.include)

    @property
    def index(self) -> bytes:
        """The content of the index."""
        weight_map = {tensor.name: shard.file for shard in self.shards for tensor in shard.tensors}
        document = {
            "metadata": {"total_size": self.size_bytes, **self.metadata},
            "weight_map": dict(sorted(weight_map.items())),
        }
        return json.dumps(document, indent=2).encode() + b"\n"


def plan_shards(
    run: Run,
    selection: Selection = NEWEST,
    *,
    include: Include = "model",
    damaged: Mapping[ManifestName, str] | None = None,
    leased: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> ShardPlan:
    """Choose the checkpoint as `catalog.restore.restore.restore` does, and divide it into files.

    A table and its row states are in one file, because they are read together. All tensors without
    a table are in one file, too. Several such units share a file as long as they fit into
    `shard_bytes` and a header that safetensors reads; a larger unit has a file of its own.

    Args:
        run: the run.
        selection, damaged, leased: as for `catalog.restore.restore.restore`.
        include: see `state_tensors`; for tables, `model` takes the values only, `all` the row
            states too.
        shard_bytes: most bytes of a file that holds more than one unit.

    Raises:
        SettingsError: there would be more files than their names can count, or the header of one
            would be too long for safetensors.
        RecpointError: as for `catalog.restore.restore.restore`; no row has been read yet.
    """
    target = MemoryTarget(())
    report = restore(run, target, selection, damaged=damaged, leased=leased)
    assert target.manifest is not None  # the restore has set it
    tied = tied_names(target.state)
    units = [
        of_table(table, tied, include) for table in logical_tables(target.manifest.tables).values()
    ]
    named = {tensor.name for unit in units for tensor in unit}
    units.append(
        [
            ShardTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape))
            for name, tensor in state_tensors(target.state, include).items()
            if name not in named  # the state may list a table's values too
        ]
    )
    files: list[list[ShardTensor]] = []
    room_bytes = header_room_bytes = 0
    for unit in filter(None, units):
        size_bytes = sum(tensor.size_bytes for tensor in unit)
        header_bytes = sum(tensor.header_bytes for tensor in unit)
        if not files or size_bytes > room_bytes or header_bytes > header_room_bytes:
            files.append([])
            room_bytes, header_room_bytes = shard_bytes, MAX_HEADER_BYTES - ORIGIN_BYTES
        files[-1] += unit
        room_bytes -= size_bytes
        header_room_bytes -= header_bytes
    if len(files) > _MOST_SHARDS:
        raise SettingsError(
            "shard_bytes",
            found=f"{shard_bytes}, which makes {len(files)} files",
            expected=f"at most {_MOST_SHARDS} files",
            next_step="set a larger shard_bytes",
        )
    shards = tuple(
        shard_of(f"model-{number:05}-of-{len(files):05}.safetensors", tensors)
        for number, tensors in enumerate(files, 1)
    )
    plan = ShardPlan(run=run.id, include=include, report=report, shards=shards)
    for shard in shards:
        if sum(tensor.header_bytes for tensor in shard.tensors) > MAX_HEADER_BYTES - ORIGIN_BYTES:
            shard.header(plan.metadata)  # refused before any file is written
    return plan


def checkpoint_in(start: bytes, run: str) -> Origin | None:
    """Return the origin that the first bytes of a file or an index name; None if they name none.

    Args:
        start: the first `ORIGIN_BYTES` of the file, or all of it.
        run: the run's id; an origin in another run counts as none.
    """
    match = _ORIGIN.match(start)
    if match is None or match[1] != run.encode():
        return None
    attempt, include = (part.decode(errors="replace") for part in match.group(4, 5))
    return Origin(ManifestName(int(match[2]), int(match[3])), attempt, include)


def shard_metadata(run: str, restored: CheckpointRef, include: Include) -> dict[str, str]:
    """Return the metadata of a file: the run, the checkpoint and what the file includes."""
    return {
        "run": run,
        "step": str(restored.step),
        "generation": str(restored.generation),
        "attempt": restored.attempt,
        "include": include,
    }


def shard_of(file: str, tensors: Iterable[ShardTensor]) -> ShardFile:
    """Return a file of these tensors, sorted into its order."""
    ordered = sorted(tensors, key=lambda tensor: (-item_bytes(tensor.dtype), tensor.name))
    return ShardFile(file, tuple(ordered))


def of_table(table: LogicalTable, tied: Mapping[str, str], include: Include) -> list[ShardTensor]:
    """Return the tensors of a table in a file: values under each tied name, then row states.

    With `model` the only row states are those that say which key has a row.
    """
    first = weight_name(table.name)
    names = [first, *(name for name, whose in tied.items() if whose == first)]
    values = [
        ShardTensor(model_name(name, include), table.dtype, (table.rows, table.dim), table.name)
        for name in names
    ]
    if include == "model":
        # Without their keys, the rows of a keyed table are nobody's.
        return values + [
            ShardTensor(
                f"{table.name}.{state.name}",
                state.dtype,
                (table.rows, *state.shape),
                table.name,
                state.name,
            )
            for state in table.row_states
            if state.name in KEYED_STATES
        ]
    return values + [
        ShardTensor(
            f"row_states/{table.name}/{state.name}",
            state.dtype,
            (table.rows, *state.shape),
            table.name,
            state.name,
        )
        for state in table.row_states
    ]
