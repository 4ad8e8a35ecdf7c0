"""Builds committed checkpoints from torch tensors with real kernels, bytes and commits."""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import crc32c
import torch
from torch import Tensor

from recpoint.catalog.run.commit import commit
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import Store
from recpoint.catalog.store.local import LocalStore
from recpoint.format.chunk import ChunkMeta, Section, build_chunk, tensor_section
from recpoint.format.dtypes import dtype_name, item_bytes
from recpoint.format.first_values import FirstValueRule
from recpoint.format.history import History
from recpoint.format.job import Allocation, QuantizerName
from recpoint.format.keyed_use import KeyedUse
from recpoint.format.manifest import (
    ChunkEntry,
    Columns,
    Manifest,
    RowStateSpec,
    StateBits,
    TableSpec,
)
from recpoint.format.naming import parse_chunk_key, row_chunk_key, state_chunk_key
from recpoint.format.records import CheckpointRef
from recpoint.format.state_tree import flatten
from recpoint.kernels import quantize, row_set

__all__ = [
    "UNTRAINED",
    "Checkpoint",
    "Table",
    "build",
    "copy_run",
    "new_run",
    "publish",
    "single_rows",
    "tables",
    "upload",
]

_TIME_MS = 1_750_000_000_000

#: The history of state that is untrained, with a width that no rule chose.
UNTRAINED = History(trained_ms=0, lossy_restores=0, precision=None)


@dataclass
class Table:
    """A trainer's table: values [rows, dim], row states, and how it is to be stored."""

    name: str
    values: Tensor
    states: tuple[Tensor, ...] = ()
    bits: int | None = None  # None: exact
    quantizer: QuantizerName = "asymmetric"  # of staged jobs; what is built here is asymmetric
    state_bits: StateBits | None = None  # of staged jobs; what is built here is exact
    second_moments: tuple[int, ...] | None = None  # of staged jobs, with 8 bits
    state_names: tuple[str, ...] = field(default=())
    columns: Columns | None = None  # of a piece
    residual: bool = False  # of staged increments
    base: Tensor | None = None  # decoded rows of the full: built increments store residuals
    allocation: Allocation | None = None  # of staged jobs; None: one width
    first_values: FirstValueRule | None = None  # of staged fulls

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def dim(self) -> int:
        return self.values.shape[1]

    @property
    def spec(self) -> TableSpec:
        names = self.state_names or tuple(f"state{k}" for k in range(len(self.states)))
        dtype = dtype_name(self.values.dtype)
        assert dtype in ("F64", "F32", "F16", "BF16")
        return TableSpec(
            name=self.name,
            rows=self.rows,
            dim=self.dim,
            dtype=dtype,
            row_states=tuple(
                RowStateSpec(
                    name=name,
                    dtype=dtype_name(state.dtype),
                    shape=tuple(state.shape[1:]),
                    optimizer=0,
                )
                for name, state in zip(names, self.states, strict=True)
            ),
            columns=self.columns,
        )

    def cut(self, edges: Sequence[int], *, averaged: Sequence[int] = ()) -> list[Table]:
        """Return its pieces between the columns `edges`, copied; without edges, the table itself.

        States with one value for each column are cut too. Each piece gets a copy of the other
        states, except for states whose numbers are in `averaged`: these differ between pieces.
        """
        ends = [0, *edges, self.dim]
        if len(ends) == 2:
            return [self.clone()]
        pieces = []
        for number, (first, stop) in enumerate(zip(ends, ends[1:], strict=False)):
            states = tuple(
                state[:, first:stop].clone() if state.shape[1:] == (self.dim,) else state.clone()
                for state in self.states
            )
            for k in averaged:
                states[k].mul_(number + 1)
            columns = Columns(first=first, of=self.dim)
            values = self.values[:, first:stop].clone()
            pieces.append(replace(self, values=values, states=states, columns=columns))
        return pieces

    def clone(self) -> Table:
        return replace(
            self,
            values=self.values.clone(),
            states=tuple(state.clone() for state in self.states),
        )

    def train(self, ids: Tensor, generator: torch.Generator) -> None:
        """Change the rows `ids` and their states."""
        for tensor in (self.values, *self.states):
            shape = (ids.numel(), *tensor.shape[1:])
            tensor[ids] = torch.randn(shape, generator=generator).to(tensor.dtype)


def tables(*, seed: int = 0, rows: int = 40, dim: int = 3, bits: int | None = None) -> list[Table]:
    """Return two tables of different dtypes, one with row states of two shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Table(
            "items",
            torch.randn(rows, dim, generator=generator),
            (torch.rand(rows, dim, generator=generator), torch.rand(rows, generator=generator)),
            bits=bits,
        ),
        Table("users", torch.randn(rows // 2, 2, generator=generator).to(torch.float16)),
    ]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint before its commit: the manifest and the chunks that it names."""

    manifest: Manifest
    chunks: dict[str, bytes]

    @property
    def ref(self) -> CheckpointRef:
        return self.manifest.ref


def new_run(directory: Path) -> Run:
    """Make a new run in a local directory."""
    return Run.create(LocalStore(directory))


def copy_run(run: Run, directory: Path) -> Run:
    """Copy a run to another directory, which is cheaper than writing every object durably."""
    shutil.copytree(run.url, directory)
    return Run.open(LocalStore(directory))


def build(
    run: Run,
    tables: Sequence[Table],
    *,
    step: int,
    generation: int,
    parent: Manifest | None = None,
    dirty: Sequence[Tensor | None] | None = None,
    state: object = None,
    states: Sequence[object] | None = None,
    rows_per_chunk: int = 16,
    attempt: str | None = None,
    ranks: int = 1,
    tensor_elements: int = 1 << 20,
    history: History = UNTRAINED,
    owners: Sequence[Tensor | None] | None = None,
    keyed: Sequence[KeyedUse] | None = None,
) -> Checkpoint:
    """Build a full if there is no parent, else an increment with the rows `dirty` of each table.

    Args:
        run: to which the checkpoint will belong.
        tables: the trainer's tables.
        step: batches trained.
        generation: to which the checkpoint will belong.
        parent: the checkpoint before it.
        dirty: ascending ids int64 for each table; None: all rows.
        state: the state tree of every rank.
        states: instead of `state` and `ranks`, the state tree of each rank.
        rows_per_chunk: the most rows in a chunk.
        attempt: of the checkpoint; None: random.
        ranks: number of ranks that write a state.
        tensor_elements: larger state tensors are split into pieces, over several chunks.
        history: the training time and lossy restores of the state.
        owners: for each table, the rank that stores each row, int64 [rows]; None: the first rank.
        keyed: what the keys of keyed tables did; None: it is not said.
    """
    attempt = attempt or secrets.token_hex(16)
    meta = ChunkMeta(
        run=run.id, step=step, generation=generation, attempt=attempt, content="state", rank=0
    )
    stored: list[tuple[ChunkEntry, bytes]] = []
    for number, table in enumerate(tables):
        ids = dirty[number] if dirty is not None else None
        owner = owners[number] if owners is not None else None
        stored.extend(_row_chunks(meta, number, table, ids, rows_per_chunk, owner))
    states = states or [state] * ranks
    for rank, tree in enumerate(states):
        stored.extend(_state_chunks(meta, rank, tree, tensor_elements))
    manifest = Manifest(
        run=run.id,
        step=step,
        generation=generation,
        attempt=attempt,
        kind="increment" if parent else "full",
        base=(parent.base or parent.ref) if parent else None,
        parent=parent.ref if parent else None,
        chain_length=parent.chain_length + 1 if parent else 1,
        policy="consecutive",
        stands_for=None,
        ranks=len(states),
        tables=tuple(table.spec for table in tables),
        chunks=tuple(entry for entry, _ in stored),
        snapshot_ms=_TIME_MS,
        staged_ms=_TIME_MS + 1,
        committed_ms=_TIME_MS + 2,
        stall_us=100,
        dirty_rows=sum(entry.row_count or 0 for entry, _ in stored),
        full_bytes=sum(table.values.nbytes for table in tables),
        history=history,
        quantizers=(),
        quantized_by="",
        state_bits=None,
        keyed=None if keyed is None else tuple(keyed),
        writer="recpoint tests",
    )
    return Checkpoint(manifest=manifest, chunks={entry.key: data for entry, data in stored})


def upload(store: Store, checkpoint: Checkpoint) -> None:
    """Write the chunks (format §6.1, write order, rule 3)."""
    for key, data in checkpoint.chunks.items():
        store.put(key, data)


def publish(run: Run, checkpoint: Checkpoint) -> Manifest:
    """Write the chunks and commit the manifest."""
    upload(run.store, checkpoint)
    commit(run, checkpoint.manifest)
    return checkpoint.manifest


def single_rows(entry: ChunkEntry, rows: int, *, attempt: str) -> list[ChunkEntry]:
    """Return manifest entries of chunks of one row each, like `entry`; store no chunk."""
    chunk_name = parse_chunk_key(entry.key)
    assert chunk_name is not None and entry.table is not None
    attempt_name = (chunk_name.step, chunk_name.generation, attempt)
    return [
        entry.model_copy(
            update={
                "key": row_chunk_key(*attempt_name, rank=entry.rank, table=entry.table, number=row),
                "row_count": 1,
                "first_row": row,
                "last_row": row,
            }
        )
        for row in range(rows)
    ]


def _row_chunks(
    meta: ChunkMeta,
    number: int,
    table: Table,
    dirty: Tensor | None,
    rows_per_chunk: int,
    owners: Tensor | None,
) -> Iterator[tuple[ChunkEntry, bytes]]:
    ids = torch.arange(table.rows) if dirty is None else dirty
    ranks = torch.zeros(table.rows, dtype=torch.int64) if owners is None else owners
    for rank in ranks[ids].unique().tolist():
        of_rank = ids[ranks[ids] == rank]
        about = meta.model_copy(update={"rank": rank})
        if table.bits is None:
            groups = [(of_rank, True)]
        else:
            rows = _coded(table, of_rank, increment=dirty is not None)
            refused = quantize.quantize_packed(rows, table.bits).exact
            groups = [(of_rank[~refused], False), (of_rank[refused], True)]
        pieces = [
            (piece, exact)
            for group, exact in groups
            if group.numel()
            for piece in group.split(rows_per_chunk)
        ]
        for index, (piece, exact) in enumerate(pieces):
            key = row_chunk_key(
                meta.step, meta.generation, meta.attempt, rank=rank, table=number, number=index
            )
            coded = None if exact else _coded(table, piece, increment=dirty is not None)
            yield _row_chunk(about, key, number, table, piece, coded)


def _coded(table: Table, ids: Tensor, *, increment: bool) -> Tensor:
    """Return what is quantized of rows, f32 [n, dim]: their residuals, if there is a base."""
    rows = table.values[ids].float()
    return rows - table.base[ids].float() if increment and table.base is not None else rows


def _row_chunk(
    meta: ChunkMeta, key: str, number: int, table: Table, ids: Tensor, rows: Tensor | None
) -> tuple[ChunkEntry, bytes]:
    """Return a chunk of the table's rows `ids`: exactly, or as codes of `rows`, f32 [n, dim]."""
    coded = row_set.encode(ids)
    sections = [tensor_section(f"state.{k}", s[ids]) for k, s in enumerate(table.states)]
    scheme = "asymmetric"
    if rows is None or table.bits is None:
        scheme = "exact"
        bits = 8 * item_bytes(table.spec.dtype)
        sections.append(tensor_section("values", table.values[ids]))
    else:
        bits = table.bits
        scheme = "asymmetric" if torch.equal(rows, table.values[ids].float()) else "residual"
        packed = quantize.quantize_packed(rows, bits)
        sections.append(tensor_section("codes", packed.packed))
        sections.append(tensor_section("scale", packed.scale))
        sections.append(tensor_section("offset", packed.offset))
    if coded.payload is not None:
        sections.append(Section("row_set", "U8", (len(coded.payload),), coded.payload))
    fields = {
        "rank": meta.rank,
        "content": "rows",
        "table": number,
        "row_count": ids.numel(),
        "bits": bits,
        "scheme": scheme,
    }
    about = {"dim": table.dim, "row_set": {"coding": coded.coding, "first": coded.first}}
    meta = ChunkMeta.model_validate(meta.model_dump() | fields | about)
    ends = {"first_row": int(ids[0]), "last_row": int(ids[-1])}
    return _entry(key, build_chunk(meta, sections), fields | ends)


def _state_chunks(
    meta: ChunkMeta, rank: int, state: object, tensor_elements: int
) -> Iterator[tuple[ChunkEntry, bytes]]:
    tree, tensors = flatten(state)
    chunks = [[Section("tree", "U8", (len(tree),), tree)]]
    for index, tensor in enumerate(tensors):
        if tensor.numel() <= tensor_elements:
            chunks[0].append(tensor_section(f"tensor.{index}", tensor))
            continue
        flat = tensor.detach().reshape(-1)
        for piece in range(math.ceil(flat.numel() / tensor_elements)):
            part = flat[piece * tensor_elements : (piece + 1) * tensor_elements]
            chunks.append([tensor_section(f"tensor.{index}.{piece}", part)])
    about = meta.model_copy(update={"rank": rank})
    for number, sections in enumerate(chunks):
        key = state_chunk_key(meta.step, meta.generation, meta.attempt, rank=rank, number=number)
        yield _entry(key, build_chunk(about, sections), {"content": "state", "rank": rank})


def _entry(key: str, data: bytes, fields: dict[str, object]) -> tuple[ChunkEntry, bytes]:
    stored = {"key": key, "bytes": len(data), "crc32c": crc32c.crc32c(data)}
    return ChunkEntry.model_validate(stored | fields), data
