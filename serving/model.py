"""Holds the two copies of a served model: tables, coded or not, dense layers, version."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Final

import torch
from torch import Tensor, nn

from recpoint.catalog.restore.in_place import fits, write
from recpoint.catalog.restore.keyed_rows import has_keys
from recpoint.catalog.restore.restore import dense_tensors, extra_states
from recpoint.catalog.restore.rows import LogicalTable, logical_tables
from recpoint.catalog.restore.state import canonical_name
from recpoint.embeddings.tables.managed_collisions import has_raw_ids, mapped_tables
from recpoint.errors import IncompatibleModel, NotServing
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Manifest
from recpoint.kernels import dirty_bitmap
from recpoint.serving.collisions import ServedCollisions
from recpoint.serving.keyed_table import RowsByKey, ServedTable
from recpoint.serving.lookups import ByKey, TableLookup, table_lookups
from recpoint.serving.tables import CodedTable, FloatTable
from recpoint.serving.version import Version

__all__ = ["ALL", "Bitmaps", "Copies", "ModelCopy", "changed_ids", "tables_with_raw_ids"]


class ServedModel:
    """One model of a serving process; put into evaluation mode, without gradients.

    Names are the names in checkpoints (`catalog.restore.state.canonical_name`), even if the model
    was compiled.

    Args:
        model: with its own embeddings, or after `replace_lookups`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)
        self._lookups = table_lookups(model)
        self._collisions = {
            mapped.name: ServedCollisions(mapped) for mapped in mapped_tables(model)
        }
        self._weights: dict[str, Tensor] = {
            canonical_name(model, name) or "weight": module.weight
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }

    def table(self, name: str) -> FloatTable | None:
        """Return an embedding's weight as a table; None: its lookups were replaced."""
        weight = self._weights.get(name)
        return None if weight is None else FloatTable(weight.detach())

    def device_of(self, name: str) -> torch.device:
        """Return where decoded rows of a table are looked up."""
        module = self._lookups.get(name)
        return module.device if isinstance(module, ByKey) else torch.device("cpu")

    def use(self, tables: Mapping[str, ServedTable]) -> None:
        """Direct lookups that were replaced to these tables."""
        for name, module in self._lookups.items():
            module.table = tables[name]

    def check_tables(self, manifest: Manifest) -> None:
        """Check that the model has the same tables as the checkpoint.

        Raises:
            IncompatibleModel: they differ, each difference named.
        """
        model_tables = {*self._weights, *self._lookups}
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
        for name in model_tables & stored_tables.keys():
            faults += self._key_faults(stored_tables[name], self._lookups.get(name))
        _refuse(manifest, faults)

    @staticmethod
    def _key_faults(stored: LogicalTable, lookup: TableLookup | None) -> Iterator[str]:
        """Yield what differs if the table or the model goes by keys."""
        is_keyed = has_keys([state.name for state in stored.row_states])
        if is_keyed != isinstance(lookup, ByKey):
            kinds = ("rows by number", "keys (KeyedEmbedding)")
            yield (
                f"table {stored.name!r} has {kinds[not is_keyed]} in the model and "
                f"{kinds[is_keyed]} in the checkpoint"
            )
        elif isinstance(lookup, ByKey) and (lookup.dim, lookup.dtype) != (
            stored.dim,
            torch_dtype(stored.dtype),
        ):
            yield (
                f"table {stored.name!r} has {lookup.dim} values of {lookup.dtype} a row in the "
                f"model and {stored.dim} of {stored.dtype} in the checkpoint"
            )

    def check_state(self, manifest: Manifest, state: Mapping[int, object]) -> None:
        """Check that it has the checkpoint's dense layers, and can map raw ids as the trainer.

        Raises:
            IncompatibleModel: dense layers differ, each difference named; or raw ids of a table
                cannot be mapped.
        """
        mapped = tables_with_raw_ids(manifest)
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


def tables_with_raw_ids(manifest: Manifest) -> dict[str, LogicalTable]:
    """Return the tables whose raw ids are row states, by name."""
    tables = logical_tables(manifest.tables)
    return {name: table for name, table in tables.items() if has_raw_ids(table)}


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


def changed_ids(changed: Bitmaps, name: str, table: ServedTable) -> Tensor:
    """Return the rows of a table that are marked in any of its pieces: int64 [n], ascending."""
    bitmaps = [bits for (marked, _), bits in changed.items() if marked == name]
    if not bitmaps:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return dirty_bitmap.collect(reduce(torch.bitwise_or, bitmaps), rows=table.rows)


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
        for old_name in self.tables.keys() - newer.tables.keys():
            del self.tables[old_name]
        for old_name in self.raw_ids.keys() - newer.raw_ids.keys():
            del self.raw_ids[old_name]
        self.behind = {}

    def _catch_up_rows(self, name: str, rows: ServedTable, newer: ServedTable) -> None:
        """Copy the rows of a table in which this copy may be behind."""
        if self.behind is ALL:
            self._copy_rows(rows, newer, None)
            return
        ids = changed_ids(self.behind, name, newer)
        if ids.numel():
            self._copy_rows(rows, newer, ids)

    @staticmethod
    def _copy_rows(rows: ServedTable, newer: ServedTable, ids: Tensor | None) -> None:
        if isinstance(rows, FloatTable) and isinstance(newer, FloatTable):
            rows.copy_rows(newer, ids)
        elif isinstance(rows, CodedTable) and isinstance(newer, CodedTable):
            rows.copy_rows(newer, ids)
        elif isinstance(rows, RowsByKey) and isinstance(newer, RowsByKey):
            rows.copy_rows(newer, ids)

    def device_of(self, name: str) -> torch.device:
        """Return where decoded rows of a table are looked up."""
        return torch.device("cpu") if self.model is None else self.model.device_of(name)

    def _like(self, name: str, table: ServedTable) -> ServedTable:
        weight = None if self.model is None else self.model.table(name)
        if weight is not None:
            return weight
        return table.empty_like()


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
