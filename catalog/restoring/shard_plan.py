"""Which tensors of a checkpoint go into which file of safetensors, and the index that says so.

The layout that programs know which share models: `model-00001-of-00004.safetensors`, …, and
`model.safetensors.index.json` with a `weight_map` from each tensor's name to its file. The names
are those of `recpoint restore --to FILE.safetensors`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from recpoint.catalog.chunks.logical_tables import LogicalTable, logical_tables
from recpoint.catalog.restoring.restore import MemoryTarget, RestoreReport, restore
from recpoint.catalog.restoring.restored_model import weight_name
from recpoint.catalog.restoring.selection import NEWEST, Selection
from recpoint.catalog.restoring.state_tensors import state_tensors
from recpoint.catalog.runs.run import Run
from recpoint.errors import SettingsError
from recpoint.format.dtypes import Dtype, array_bytes, dtype_name, item_bytes
from recpoint.format.naming import ManifestName

__all__ = [
    "DEFAULT_SHARD_BYTES",
    "INDEX",
    "ORIGIN_BYTES",
    "SHARD_NAME",
    "Origin",
    "Shard",
    "ShardPlan",
    "ShardTensor",
    "checkpoint_in",
    "plan_shards",
]

INDEX: Final = "model.safetensors.index.json"
SHARD_NAME: Final = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors\Z")
DEFAULT_SHARD_BYTES: Final = 1 << 30
#: A file says within so many bytes which checkpoint it is of.
ORIGIN_BYTES: Final = 512

_MOST_SHARDS: Final = 99_999  # what five digits count
_ALIGNMENT_BYTES: Final = 8
_ORIGIN: Final = re.compile(
    rb'(?:.{8}\{"__metadata__":\{"format":"pt"|\{\s*"metadata":\s*\{\s*"total_size":\s*[0-9]+)'
    rb',\s*"run":\s*"([^"]*)",\s*"step":\s*"([0-9]+)",\s*"generation":\s*"([0-9]+)"'
    rb',\s*"attempt":\s*"([^"]*)"',
    re.DOTALL,
)


class Origin(NamedTuple):
    """What a file or an index says of where it comes from."""

    name: ManifestName
    attempt: str


class ShardTensor(NamedTuple):
    """A tensor of a file. `table`: whose values or row state `state` it is; None: of no table."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    table: str | None = None
    state: str | None = None

    @property
    def size_bytes(self) -> int:
        """Its length in the file."""
        return array_bytes(self.dtype, self.shape)


class Shard(NamedTuple):
    """A file: its tensors in their order, wider items first, which keeps them aligned."""

    file: str
    tensors: tuple[ShardTensor, ...]

    @property
    def size_bytes(self) -> int:
        """Of all tensors; the file has its header before them."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """All bytes before the first tensor's."""
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
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """What is to be written, of which checkpoint.

    Attributes:
        run: the run's id.
        report: of the checkpoint that was chosen; what was read for it is its state alone.
        shards: the files.
    """

    run: str
    report: RestoreReport
    shards: tuple[Shard, ...]

    @property
    def name(self) -> ManifestName:
        """Of the checkpoint."""
        return ManifestName(self.report.restored.step, self.report.restored.generation)

    @property
    def size_bytes(self) -> int:
        """Of all tensors."""
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def metadata(self) -> dict[str, str]:
        """What each file says of where it comes from."""
        return {
            "run": self.run,
            "step": str(self.name.step),
            "generation": str(self.name.generation),
            "attempt": self.report.restored.attempt,
        }

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
    damaged: Mapping[ManifestName, str] | None = None,
    leased: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> ShardPlan:
    """Choose the checkpoint as `catalog.restoring.restore.restore` does, and divide it into files.

    A table and its row states are in one file, since they are read together, and so is all that is
    of no table. Several of these share a file as long as they fit into `shard_bytes`; one that is
    larger has a file of its own.

    Args:
        run: the run.
        selection, damaged, leased: as for `catalog.restoring.restore.restore`.
        shard_bytes: of a file that has more than one table.

    Raises:
        SettingsError: more files than their names can count.
        RecpointError: as for `catalog.restoring.restore.restore`; no row has been read yet.
    """
    target = MemoryTarget(())
    report = restore(run, target, selection, damaged=damaged, leased=leased)
    assert target.manifest is not None  # as of every target that was restored into
    units = [_of_table(table) for table in logical_tables(target.manifest.tables).values()]
    named = {tensor.name for unit in units for tensor in unit}
    units.append(
        [
            ShardTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape))
            for name, tensor in state_tensors(target.state).items()
            if name not in named  # a state that lists a table's values too
        ]
    )
    files: list[list[ShardTensor]] = []
    room = 0
    for unit in filter(None, units):
        size_bytes = sum(tensor.size_bytes for tensor in unit)
        if not files or size_bytes > room:
            files.append([])
            room = shard_bytes
        files[-1] += unit
        room -= size_bytes
    if len(files) > _MOST_SHARDS:
        raise SettingsError(
            "shard_bytes",
            found=f"{shard_bytes}, which makes {len(files)} files",
            expected=f"at most {_MOST_SHARDS} files",
            next_step="allow larger ones",
        )
    return ShardPlan(
        run=run.id,
        report=report,
        shards=tuple(
            Shard(
                f"model-{number:05}-of-{len(files):05}.safetensors",
                tuple(sorted(tensors, key=lambda tensor: (-item_bytes(tensor.dtype), tensor.name))),
            )
            for number, tensors in enumerate(files, 1)
        ),
    )


def checkpoint_in(start: bytes, run: str) -> Origin | None:
    """Which checkpoint of the run a file or an index is of that begins so.

    Args:
        start: its first `ORIGIN_BYTES`, or all of it.
        run: the run's id; files of other runs are of none.
    """
    match = _ORIGIN.match(start)
    if match is None or match[1] != run.encode():
        return None
    return Origin(ManifestName(int(match[2]), int(match[3])), match[4].decode(errors="replace"))


def _of_table(table: LogicalTable) -> list[ShardTensor]:
    values = ShardTensor(
        f"model/{weight_name(table.name)}", table.dtype, (table.rows, table.dim), table.name
    )
    return [values] + [
        ShardTensor(
            f"row_states/{table.name}/{state.name}",
            state.dtype,
            (table.rows, *state.shape),
            table.name,
            state.name,
        )
        for state in table.row_states
    ]
