"""Holds the two copies of a served model: tables, coded or not, dense layers, version."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Final

import torch
from torch import Tensor, nn

from recpoint.catalog.restore.in_place import fits, write
from recpoint.catalog.restore.keyed_rows import has_keys
from recpoint.catalog.restore.placement import TablePart, map_parts
from recpoint.catalog.restore.restore import dense_tensors, extra_states
from recpoint.catalog.restore.rows import LogicalTable, logical_tables
from recpoint.catalog.restore.state import canonical_name
from recpoint.catalog.restore.target import RowSink, TableTarget
from recpoint.catalog.run.chain import Chain
from recpoint.embeddings.tables.managed_collisions import (
    NO_ID,
    RAW_ID,
    has_raw_ids,
    mapped_tables,
)
from recpoint.errors import IncompatibleModel, NotServing, UnknownRow, UnknownTable
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Manifest
from recpoint.format.records import CheckpointRef
from recpoint.kernels import dirty_bitmap
from recpoint.serving.coded_lookups import CodedBag, CodedEmbedding, coded_lookups
from recpoint.serving.collisions import CodedRowsWithIds, ServedCollisions
from recpoint.serving.tables import CodedTable, FloatTable, ServedTable, coded_bytes

__all__ = ["ALL", "Bitmaps", "Copies", "Loading", "Version"]


_MOST_NAMES: Final = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Version:
    """A checkpoint in memory: tables and dense layers of one step.

    Use it only inside the `with` block of `Follower.reading` that gave it, and do not write to it.
    After the block, its memory is used for a later version.

    Attributes:
        checkpoint: the checkpoint.
        committed_ms: when it was committed, in milliseconds since the Unix epoch, by the agent's
            clock.
        served_ms: when it was first served, by this host's clock.
        model: the model of the follower, if it has one, in evaluation mode.
        tables: by name.
        dense: parameters and buffers except the tables, by name; on the CPU.
    """

    checkpoint: CheckpointRef
    committed_ms: int
    served_ms: int
    model: nn.Module | None
    tables: Mapping[str, ServedTable]
    dense: Mapping[str, Tensor]

    @property
    def step(self) -> int:
        """Batches trained."""
        return self.checkpoint.step

    def lookup(self, table: str, ids: Tensor) -> Tensor:
        """Return rows `ids` [...] of a table: [..., dim] of the table's dtype, in new memory.

        Raises:
            UnknownTable: there is no such table, or it is not followed; a KeyError.
            UnknownRow: an id in CPU memory is out of range; an IndexError.
            TypeError: the ids are not integers.
        """
        served = self.tables.get(table)
        if served is None:
            names = sorted(self.tables)
            more = len(names) - _MOST_NAMES
            raise UnknownTable(
                f"table {table!r}",
                found=f"no such table at step {self.step}",
                expected=f"one of {', '.join(map(repr, names[:_MOST_NAMES]))}"
                + (f" and {more} more" if more > 0 else "")
                if names
                else "a table; none is followed",
                next_step="look up one of these; if it is in the checkpoint (recpoint show URL), "
                "name it in Follower(tables=...)",
            )
        try:
            return served.lookup(ids)
        except IndexError:
            outside = ids[(ids < 0) | (ids >= served.rows)]
            if not outside.numel():
                raise
            raise UnknownRow(
                f"table {table!r}",
                found=f"row {int(outside[0])} among {ids.numel()} ids",
                expected=f"rows 0 … {served.rows - 1}, of {served.rows} at step {self.step}",
                next_step="look up rows that the table has; ids that came into use later need a "
                "larger table in training",
            ) from None

    def __call__(self, *inputs: object) -> object:
        """Return the model's output for `inputs`, without gradients."""
        if self.model is None:
            raise TypeError("the follower was made without a model")
        import torch

        with torch.no_grad():
            return self.model(*inputs)


class ServedModel:
    """One model of a serving process; put into evaluation mode, without gradients.

    Names are the names in checkpoints (`catalog.restore.state.canonical_name`), even if the model
    was compiled.

    Args:
        model: with its own embeddings, or after `replace_lookups`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)
        self._coded = coded_lookups(model)
        self._collisions = {
            mapped.name: ServedCollisions(mapped) for mapped in mapped_tables(model)
        }
        self._weights: dict[str, Tensor] = {
            canonical_name(model, name) or "weight": module.weight
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }

    def table(self, name: str) -> FloatTable | None:
        """Return an embedding's weight as a table; None if the table is kept as codes."""
        weight = self._weights.get(name)
        return None if weight is None else FloatTable(weight.detach())

    def use(self, tables: Mapping[str, ServedTable]) -> None:
        """Direct lookups of coded embeddings to these tables."""
        for name, module in self._coded.items():
            if isinstance(module, CodedEmbedding | CodedBag):
                module.table = tables[name]

    def check_tables(self, manifest: Manifest) -> None:
        """Check that the model has the same tables as the checkpoint.

        Raises:
            IncompatibleModel: they differ, each difference named.
        """
        model_tables = {*self._weights, *self._coded}
        stored_tables = logical_tables(manifest.tables)
        faults = [
            f"table {name!r} is not in the checkpoint"
            for name in model_tables - stored_tables.keys()
        ]
        faults += [
            f"table {name!r} is not in the model" for name in stored_tables.keys() - model_tables
        ]
        for name in self._weights.keys() & stored_tables.keys():
            weight, spec = self._weights[name], stored_tables[name]
            stored = (spec.rows, spec.dim), torch_dtype(spec.dtype)
            if (tuple(weight.shape), weight.dtype) != stored:
                faults.append(f"table {name!r} is {_form(weight)} in the model and {stored} stored")
        faults += [
            f"table {name!r} has raw ids (managed collisions) in the checkpoint, and no module of "
            "the model maps them"
            for name in model_tables & stored_tables.keys()
            if has_raw_ids(stored_tables[name]) and name not in self._collisions
        ]
        faults += [
            f"table {name!r} has keys in the checkpoint (KeyedEmbedding), which nothing serves yet"
            for name, stored in sorted(stored_tables.items())
            if has_keys([state.name for state in stored.row_states])
        ]
        _refuse(manifest, faults)

    def check_state(self, manifest: Manifest, state: Mapping[int, object]) -> None:
        """Check that it has the checkpoint's dense layers, and can map raw ids as the trainer.

        Raises:
            IncompatibleModel: dense layers differ, each difference named; or raw ids of a table
                cannot be mapped.
        """
        mapped = _with_raw_ids(manifest)
        for name, table in mapped.items():
            self._collisions[name].check(manifest, table, state)
        model_tensors, stored_tensors = self._dense(mapped), dense_tensors(state)
        faults = [
            f"{name!r} is not in the checkpoint"
            for name in model_tensors.keys() - stored_tensors.keys()
        ]
        faults += [
            f"{name!r} is not in the model" for name in stored_tensors.keys() - model_tensors.keys()
        ]
        for name in model_tensors.keys() & stored_tensors.keys():
            if (model_tensors[name].shape, model_tensors[name].dtype) != (
                stored_tensors[name].shape,
                stored_tensors[name].dtype,
            ):
                faults.append(
                    f"{name!r} is {_form(model_tensors[name])} in the model and "
                    f"{_form(stored_tensors[name])} stored"
                )
            elif not fits(model_tensors[name], stored_tensors[name]):
                faults.append(
                    f"{name!r} has elements that share memory in the model (expand()), and differ "
                    "in the checkpoint"
                )
        for name in extra_states(state).keys() - self._modules().keys():
            faults.append(f"the extra state of module {name!r} is only in the checkpoint")
        _refuse(manifest, faults)

    def load_state(self, state: Mapping[int, object], raw_ids: Mapping[str, FloatTable]) -> None:
        """Replace dense layers, buffers, extra state and maps of raw ids.

        Args:
            state: the state trees, which `check_state` has checked.
            raw_ids: name of each table whose raw ids are row states -> raw id of each row.
        """
        stored = dense_tensors(state)
        for name, collisions in self._collisions.items():
            if name in raw_ids:
                collisions.fill(raw_ids[name].values.flatten())
            else:
                collisions.use_buffers()
        with torch.no_grad():
            for name, tensor in self._dense(raw_ids).items():
                if tensor.layout is torch.strided:
                    write(tensor, stored[name])
                else:
                    tensor.copy_(stored[name])
        modules = self._modules()
        for name, extra in extra_states(state).items():
            modules[name].set_extra_state(extra)

    def _modules(self) -> dict[str, nn.Module]:
        # A wrapper comes before the inner module, under the same name: the inner module is kept.
        named = self.model.named_modules()
        return {canonical_name(self.model, name): module for name, module in named}

    def _dense(self, mapped_tables: Collection[str]) -> dict[str, Tensor]:
        """Return the dense tensors, by name.

        Args:
            mapped_tables: names of tables whose raw ids are row states; the tensors of modules that
                map these are left out.
        """
        left_out = tuple(self._collisions[name].tensor_prefix for name in mapped_tables)
        tables = {id(weight) for weight in self._weights.values()}
        tensors: dict[str, Tensor] = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if id(parameter) not in tables
        }
        tensors.update(self.model.named_buffers())
        named = {canonical_name(self.model, name): tensor for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in named.items() if not name.startswith(left_out)}


def _with_raw_ids(manifest: Manifest) -> dict[str, LogicalTable]:
    tables = logical_tables(manifest.tables)
    return {name: table for name, table in tables.items() if has_raw_ids(table)}


def _new_raw_ids(manifest: Manifest) -> dict[str, FloatTable]:
    return {
        name: FloatTable(torch.full((table.rows, 1), NO_ID, dtype=torch.int64, device="cpu"))
        for name, table in _with_raw_ids(manifest).items()
    }


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _refuse(manifest: Manifest, differences: list[str]) -> None:
    if differences:
        raise IncompatibleModel(
            f"checkpoint of {manifest.ref}",
            found="; ".join(sorted(differences)),
            expected="the tables and dense layers of the model that is served",
            next_step="build the served model as the trainer builds it",
        )


#: A value of `ModelCopy.behind`: every row of every table.
ALL: Final = None

#: Dirty bitmaps by the table's name and the first column of its piece. If a table was sharded by
#: columns, an increment may hold a row of one piece and not of another.
Bitmaps = dict[tuple[str, int], Tensor]


class ModelCopy:
    """Tables and dense layers of one version, and the rows that may differ in the other copy.

    Args:
        model: its weights are the tables; None: tables have memory of their own.

    Attributes:
        tables: the tables, by name.
        raw_ids: of each table that has raw ids as a row state: the raw id of each row, int64
            [rows, 1]; only with a model.
        version: the version that is whole in this copy; None: nothing is, or half of a version.
        readers: number of requests that are looking at this copy.
        behind: rows in which this copy may differ from the other copy; ALL: any row.
    """

    def __init__(self, model: ServedModel | None) -> None:
        self.model = model
        self.tables: dict[str, ServedTable] = {}
        self.raw_ids: dict[str, FloatTable] = {}
        self.dense: dict[str, Tensor] = {}
        self.version: Version | None = None
        self.readers = 0
        self.behind: Bitmaps | None = ALL

    def catch_up(self, newer: ModelCopy) -> None:
        """Take over the rows in which this copy differs from the other, which is whole."""
        for name, table in newer.tables.items():
            served = self.tables.get(name)
            if served is None or served.form != table.form:
                self.tables[name] = self._like(name, table)
                self._copy_rows(self.tables[name], table, None)
            else:
                self._catch_up_rows(name, served, table)
        for name, raw_ids in newer.raw_ids.items():
            held_ids = self.raw_ids.get(name)
            if held_ids is None or held_ids.form != raw_ids.form:
                self.raw_ids[name] = FloatTable(raw_ids.values.clone())
            else:
                self._catch_up_rows(name, held_ids, raw_ids)
        for gone in self.tables.keys() - newer.tables.keys():
            del self.tables[gone]
        for gone in self.raw_ids.keys() - newer.raw_ids.keys():
            del self.raw_ids[gone]
        self.behind = {}

    def _catch_up_rows(self, name: str, rows: ServedTable, newer: ServedTable) -> None:
        """Copy the rows of a table in which this copy may be behind."""
        if self.behind is ALL:
            self._copy_rows(rows, newer, None)
            return
        changed = [bits for (table, _), bits in self.behind.items() if table == name]
        if changed:
            ids = dirty_bitmap.collect(reduce(torch.bitwise_or, changed), rows=newer.rows)
            self._copy_rows(rows, newer, ids)

    @staticmethod
    def _copy_rows(rows: ServedTable, newer: ServedTable, ids: Tensor | None) -> None:
        if isinstance(rows, FloatTable) and isinstance(newer, FloatTable):
            rows.copy_rows(newer, ids)
        elif isinstance(rows, CodedTable) and isinstance(newer, CodedTable):
            rows.copy_rows(newer, ids)

    def _like(self, name: str, table: ServedTable) -> ServedTable:
        weight = None if self.model is None else self.model.table(name)
        if weight is not None:
            return weight
        if isinstance(table, CodedTable):
            return table.empty_like()
        return FloatTable(torch.empty_like(table.values))


class Loading:
    """Reads a chain into a copy; a `RestoreTarget`.

    Args:
        copy: the copy to read into. If the chain does not start with a full, it has caught up.
        chain: the chain to read.
        wanted_tables: names of tables; None: all.
        coded: if most rows of a table are quantized, keep them as they are stored.

    Attributes:
        changed: the rows that increments brought.
    """

    def __init__(
        self, copy: ModelCopy, chain: Chain, wanted_tables: Collection[str] | None, *, coded: bool
    ) -> None:
        self._copy = copy
        self._chain = chain
        self._wanted_tables = wanted_tables
        self._coded = coded
        self._from_full = chain.manifests[0].parent is None
        self.changed: Bitmaps = {}

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | RowSink | None]:
        """See `RestoreTarget.begin`."""
        self.changed.clear()
        tables = logical_tables(manifest.tables)
        for name in sorted(set(self._wanted_tables or ()) - tables.keys()):
            raise IncompatibleModel(
                f"table {name!r}",
                found=f"no such table in {manifest.ref}",
                expected=f"one of {', '.join(sorted(tables))[:500]}",
                next_step="name tables of the checkpoint",
            )
        model = self._copy.model
        if model is not None:
            model.check_tables(manifest)
        if self._from_full:
            for name in self._copy.tables.keys() - tables.keys():
                del self._copy.tables[name]
            self._copy.raw_ids = {} if model is None else _new_raw_ids(manifest)
        chosen = [
            t for n, t in tables.items() if self._wanted_tables is None or n in self._wanted_tables
        ]
        coded: dict[int, RowSink] = {}
        parts: list[TablePart] = []
        for table in chosen:
            served = self._served(table)
            if isinstance(served, CodedTable):
                changed = self.changed[table.name, 0] = dirty_bitmap.new(table.rows)
                sink: RowSink = served.into(table, changed)
                if table.name in self._copy.raw_ids:
                    raw_ids = self._copy.raw_ids[table.name].values.flatten()
                    sink = CodedRowsWithIds(served, table, raw_ids)
                coded[table.pieces[0].index] = sink
            else:
                parts += self._parts(table, served.values)
        targets = map_parts(manifest, parts)
        return [coded.get(index, target) for index, target in enumerate(targets)]

    def check_state(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `StateCheckingTarget.check_state`."""
        if self._copy.model is not None:
            self._copy.model.check_state(manifest, state)

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `RestoreTarget.finish`."""
        for table in self._copy.tables.values():
            table.finish()
        self._copy.dense = dense_tensors(state)
        if self._copy.model is not None:
            self._copy.model.use(self._copy.tables)
            self._copy.model.load_state(state, self._copy.raw_ids)

    def _parts(self, table: LogicalTable, values: Tensor) -> Iterator[TablePart]:
        for piece in table.pieces:
            first, stop = piece.columns.start, piece.columns.stop
            changed = self.changed[table.name, first] = dirty_bitmap.new(table.rows)
            row_states = {}
            if table.name in self._copy.raw_ids:
                row_states[RAW_ID] = self._copy.raw_ids[table.name].values.flatten()
            yield TablePart(
                table=table.name,
                values=values[:, first:stop],
                row_states=row_states,
                first_column=first,
                changed=changed,
            )

    def _served(self, table: LogicalTable) -> ServedTable:
        served = self._copy.tables.get(table.name)
        if self._from_full or served is None:
            served = self._copy.tables[table.name] = self._table(table, served)
        return served

    def _table(self, table: LogicalTable, current: ServedTable | None) -> ServedTable:
        weight = None if self._copy.model is None else self._copy.model.table(table.name)
        if weight is not None:
            return weight
        # Each piece of a row has its own scale, so only tables stored whole are kept as codes.
        bits = self._bits(table.pieces[0].index) if self._coded and len(table.pieces) == 1 else 0
        if bits:
            fits = isinstance(current, CodedTable) and current.fits(table) and current.bits == bits
            return current if fits and current is not None else CodedTable(table, bits)
        fits = isinstance(current, FloatTable) and current.fits(table)
        return current if fits and current is not None else FloatTable.empty(table)

    def _bits(self, table: int) -> int:
        """Return the width of codes that keeps a table in the least memory, wider rows beside it.

        0 unless most rows are quantized, of those that are not computed from a rule.
        """
        rows_of_bits: Counter[int] = Counter()
        rows = 0
        for link in self._chain.manifests:
            for entry in link.chunks:
                if entry.table == table and entry.scheme != "first":
                    rows += entry.row_count or 0
                    if entry.scheme == "asymmetric" and entry.bits:
                        rows_of_bits[entry.bits] += entry.row_count or 0
        if 2 * rows_of_bits.total() <= rows:
            return 0
        dim = self._chain.manifests[-1].tables[table].dim
        return min(rows_of_bits, key=lambda bits: (coded_bytes(rows_of_bits, dim, bits), bits))


class Copies:
    """Counts the readers of each copy, and switches requests from one copy to the other.

    Args:
        model: becomes one copy; None: there is no model, only tables.
        url: of the run, for errors.
    """

    def __init__(self, model: nn.Module | None, url: str) -> None:
        self._url = url
        self._copies = [ModelCopy(None if model is None else ServedModel(model))]
        self._active = 0
        self.changed = threading.Condition()

    @property
    def version(self) -> Version | None:
        """The version that requests are given."""
        return self._copies[self._active].version

    @property
    def active(self) -> ModelCopy:
        """The copy that requests read."""
        return self._copies[self._active]

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(
            table.nbytes
            for copy in self._copies
            for table in (*copy.tables.values(), *copy.raw_ids.values())
        )

    @contextmanager
    def reading(self, missing: Callable[[], str | None]) -> Iterator[Version]:
        """The version in service, which stays unchanged until the block ends.

        Args:
            missing: says why there is no version yet, if the reason is known.
        """
        with self.changed:
            copy = self._copies[self._active]
            version = copy.version
            if version is None:
                reason = missing()
                raise NotServing(
                    self._url,
                    found="no version in memory yet" + (f" ({reason})" if reason else ""),
                    expected="a checkpoint that was read",
                    next_step="do what that says, or wait with Follower.wait()"
                    if reason
                    else "wait with Follower.wait(); Follower.status says what is missing",
                )
            copy.readers += 1
        try:
            yield version
        finally:
            with self.changed:
                copy.readers -= 1
                self.changed.notify_all()

    def standby(self, *, wait_seconds: float) -> ModelCopy:
        """Return the copy that no request reads any more.

        Raises:
            NotServing: requests are still looking at this copy.
        """
        if self.version is None:
            return self.active
        if len(self._copies) == 1:
            model = self.active.model
            # This is safe because requests only read the model.
            second_model = None if model is None else ServedModel(copy.deepcopy(model.model))
            self._copies.append(ModelCopy(second_model))
        standby = self._copies[1 - self._active]
        with self.changed:
            if not self.changed.wait_for(lambda: standby.readers == 0, timeout=wait_seconds):
                raise NotServing(
                    self._url,
                    found=f"{standby.readers} request(s) that look at an older version still",
                    expected=f"none after {wait_seconds:g} s",
                    next_step="end the blocks of Follower.reading(); until then nothing is updated",
                )
            standby.version = None
        return standby

    def switch(self, standby: ModelCopy, version: Version) -> ModelCopy:
        """Give `standby` to requests that begin from now on; return the copy read so far."""
        with self.changed:
            previous = self.active
            standby.version = version
            self._active = self._copies.index(standby)
            self.changed.notify_all()
        return previous
