"""Restores into safetensors files: plans the files, writes each once, and the index last.

Plans which tensors of a checkpoint go into which safetensors file, and the index of the files. The
layout is the common one for shared models: `model-00001-of-00004.safetensors`, …, and
`model.safetensors.index.json` with a `weight_map` from each tensor's name to its file. Tensors have
the same names as in the single file that `write_one_file` writes.

Checks the place that safetensors files are restored into, and removes files from it. A file is
recognized by its header and its length. After the index exists, the files are final and none is
removed. Before that, the files of a damaged checkpoint are removed for those of another checkpoint.

Restores into safetensors files with an index, a file at a time and in any order. Every file is
written under a temporary name and appears whole; an existing file is never replaced. So a restore
that was killed continues where it stopped, two restores of the same files do no harm, and the files
of two different restores into one place cannot mix. The index appears last; without it the files do
not count. Files of a checkpoint that turns out to be damaged are removed only while there is no
index, and only after another checkpoint was found for the place; a second writer that still needs
them gets an error.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.restore.order import NEWEST, Selection
from recpoint.catalog.restore.placement import PartsTarget, TablePart
from recpoint.catalog.restore.restore import (
    MemoryTarget,
    RestoreReport,
    dense_tensors,
    restore,
    state_dict,
    tied_names,
    transient_buffers,
    weight_name,
)
from recpoint.catalog.restore.rows import LogicalTable, logical_tables
from recpoint.catalog.restore.target import StateWanted
from recpoint.catalog.run.chain import DAMAGE
from recpoint.catalog.run.run import Run
from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import Store, for_os_error, now_ms
from recpoint.catalog.store.run_url import naming_run
from recpoint.errors import (
    ObjectExists,
    ObjectNotFound,
    RecpointError,
    RestoreError,
    SettingsError,
    StoreUnavailable,
    UnsupportedVersion,
)
from recpoint.format.dtypes import Dtype, array_bytes, dtype_name, item_bytes, torch_dtype
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from recpoint.format.records import CheckpointRef

__all__ = [
    "DEFAULT_SHARD_BYTES",
    "INDEX",
    "SHARD_NAME",
    "Include",
    "ShardPlan",
    "check_place",
    "collect_tensors",
    "damaged_checkpoint",
    "finish_shards",
    "plan_shards",
    "remove_unfinished",
    "restore_shards",
    "summary",
    "take_back",
    "transient_tensors",
    "without_model",
    "write_one_file",
    "write_shard",
]


#: What files hold of a checkpoint: what `Module.load_state_dict` takes, or everything stored.
Include = Literal["model", "all"]


def state_tensors(state: Mapping[int, object], include: Include) -> dict[str, torch.Tensor]:
    """Return the tensors of the state trees by their names in a file; all are dense.

    Args:
        state: the state tree of each rank.
        include: with `model` the names are those of `Module.state_dict`. With `all` they are
            model/NAME for these, buffers/NAME for the buffers that are not persistent, and
            ranks/RANK/… for everything else.
    """
    named: dict[str, torch.Tensor] = {}
    for name, value in state_dict(state, {}).items():
        if isinstance(value, torch.Tensor | np.ndarray):  # an extra state may have any type
            collect_tensors(named, model_name(name, include), value, "/")
    if include == "all":
        collect_tensors(named, "buffers", transient_tensors(state), "/")
        collect_tensors(named, "ranks", without_model(state), "/")
    return named


def model_name(name: str, include: Include) -> str:
    """Return the name in a file of the tensor that `Module.state_dict` calls `name`."""
    return name if include == "model" else f"model/{name}"


def transient_tensors(state: Mapping[int, object]) -> dict[str, torch.Tensor]:
    """Return by name the buffers that `Module.state_dict` leaves out."""
    transient = transient_buffers(state)
    return {name: t for name, t in dense_tensors(state).items() if name in transient}


def without_model(state: Mapping[int, object]) -> dict[int, object]:
    """Return the state trees without the model."""
    return {
        rank: {key: value for key, value in tree.items() if key != "model"}
        if isinstance(tree, Mapping)
        else tree
        for rank, tree in state.items()
    }


def collect_tensors(
    tensors: dict[str, torch.Tensor], name: str, value: object, separator: str
) -> None:
    """Add each tensor of a tree to `tensors` under its path; a sparse one as indices and values."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            coalesced = value.coalesce()
            items = (("indices", coalesced.indices()), ("values", coalesced.values()))
        else:
            tensors[name] = value
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        collect_tensors(tensors, f"{name}{separator}{key}", item, separator)


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
        return _metadata(self.run, self.report.restored, self.include)

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
        _of_table(table, tied, include) for table in logical_tables(target.manifest.tables).values()
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
        _shard(f"model-{number:05}-of-{len(files):05}.safetensors", tensors)
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


def _metadata(run: str, restored: CheckpointRef, include: Include) -> dict[str, str]:
    return {
        "run": run,
        "step": str(restored.step),
        "generation": str(restored.generation),
        "attempt": restored.attempt,
        "include": include,
    }


def _shard(file: str, tensors: Iterable[ShardTensor]) -> ShardFile:
    """Return a file of these tensors, sorted into its order."""
    ordered = sorted(tensors, key=lambda tensor: (-item_bytes(tensor.dtype), tensor.name))
    return ShardFile(file, tuple(ordered))


def _of_table(table: LogicalTable, tied: Mapping[str, str], include: Include) -> list[ShardTensor]:
    first = weight_name(table.name)
    names = [first, *(name for name, whose in tied.items() if whose == first)]
    values = [
        ShardTensor(model_name(name, include), table.dtype, (table.rows, table.dim), table.name)
        for name in names
    ]
    if include == "model":
        return values
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


# Twice the time that a task of the flow may spend on one file.
_UNFINISHED_SECONDS: Final = 24 * 3600

_MOST_NAMES: Final = 3


def check_place(target: Store, plan: ShardPlan) -> bool:
    """Tell whether all files of the plan and its index exist already.

    Raises:
        SettingsError: the place has other files or another index.
    """
    missing = {shard.file: shard for shard in plan.shards}
    for info in target.list("model"):
        if info.key == INDEX:  # a listing has it after all shards
            return _is_there(target, plan, INDEX, plan.index, len(plan.index)) and not missing
        if SHARD_NAME.match(info.key):
            shard = missing.pop(info.key, None)
            if shard is None:
                raise _taken(target, plan, info.key)
            shard_is_there(target, plan, shard)
    return False


def finish_shards(target: Store, plan: ShardPlan) -> None:
    """Write the index after all files are there.

    Raises:
        RestoreError: a file is gone, because another writer found damage and removed it.
        SettingsError: the place has another file or another index.
    """
    _require_all(target, plan)
    try:
        target.create(INDEX, plan.index)
    except ObjectExists:
        _is_there(target, plan, INDEX, plan.index, len(plan.index))
    # A second check, because a writer that did not yet see the index may have begun to remove files
    # after the first check.
    _require_all(target, plan)


def remove_unfinished(target: Store, plan: ShardPlan) -> None:
    """Remove unfinished files of the plan whose writers were killed more than a day ago.

    Another writer may still need younger ones.
    """
    before_ms = now_ms() - _UNFINISHED_SECONDS * 1000
    for info in list(target.list_unfinished()):
        of_plan = any(shard.file in info.key for shard in plan.shards) and "/" not in info.key
        if of_plan and info.modified_ms < before_ms:
            target.delete_unfinished(info.key)


def refuse_beside_index(
    target: Store, plan: ShardPlan, error: RecpointError, *, run_url: str
) -> None:
    """Refuse to replace the files of a damaged checkpoint if their index exists.

    Args:
        target: the place.
        plan: the files of the damaged checkpoint.
        error: the damage.
        run_url: URL of the run.

    Raises:
        RestoreError: there is an index; the error says which files are there.
    """
    if not _has_index(target):
        return
    missing = _missing(target, plan)
    count = len(plan.shards)
    without = f" without {_names(missing)}," if missing else ""
    raise RestoreError(
        f"restore into {target.url}",
        found=f"{INDEX} and {count - len(missing)} of the {count} files of {plan.name},{without} "
        f"and damage in that checkpoint: {type(error).__name__}, {error.subject}, {error.found}",
        expected="a good checkpoint to write the missing files from; no file was removed",
        next_step=naming_run("recpoint check URL --level full", run_url)
        + "; keep what is there, which may be the last copy, and restore into another place",
    )


def take_back(target: Store, plan: ShardPlan) -> None:
    """Remove the files of a damaged checkpoint, after another checkpoint was found for the place.

    Raises:
        RestoreError: there is an index, because another writer has finished meanwhile.
        SettingsError: a file of the plan's names is not the plan's.
    """
    for shard in plan.shards:
        if not shard_is_there(target, plan, shard):
            continue
        if _has_index(target):
            raise RestoreError(
                f"restore into {target.url}",
                found=f"{INDEX}, which another writer made while {plan.name} was found damaged",
                expected="no index while files are removed for another checkpoint; "
                f"{shard.file} was not removed",
                next_step="run the same restore again: it writes any file that is missing",
            )
        target.delete(shard.file)


def _require_all(target: Store, plan: ShardPlan) -> None:
    missing = _missing(target, plan)
    if missing:
        raise RestoreError(
            f"restore into {target.url}",
            found=f"no {_names(missing)} any more",
            expected=f"all {len(plan.shards)} files of {plan.name} until the index is there; "
            "another restore into the same place removes them if it finds the checkpoint damaged",
            next_step="run the same restore again, and no other one into this place meanwhile",
        )


def _missing(target: Store, plan: ShardPlan) -> list[str]:
    """Return the names of the plan's files that are not there."""
    return [shard.file for shard in plan.shards if not shard_is_there(target, plan, shard)]


def _names(files: Sequence[str]) -> str:
    hidden_files = len(files) - _MOST_NAMES
    return ", ".join(files[:_MOST_NAMES]) + (
        f" and {hidden_files} more" if hidden_files > 0 else ""
    )


def _has_index(target: Store) -> bool:
    try:
        target.size(INDEX)
    except ObjectNotFound:
        return False
    return True


def shard_is_there(target: Store, plan: ShardPlan, shard: ShardFile) -> bool:
    """Tell whether a file of the plan exists, by its header, which names its origin, and length."""
    header = shard.header(plan.metadata)
    return _is_there(target, plan, shard.file, header, len(header) + shard.size_bytes)


def _is_there(target: Store, plan: ShardPlan, key: str, start: bytes, size_bytes: int) -> bool:
    """Tell whether the object `key` exists, begins with `start` and has `size_bytes` bytes.

    Raises:
        SettingsError: the object exists, but is another one.
    """
    try:
        if (
            target.size(key) == size_bytes
            and target.get_range(key, start=0, end=len(start)) == start
        ):
            return True
    except ObjectNotFound:
        return False
    raise _taken(target, plan, key)


def _taken(target: Store, plan: ShardPlan, key: str) -> SettingsError:
    """Return the error for a file that is in the way.

    It says which checkpoint the file is of and how to continue with that: a trainer may have
    committed a newer checkpoint after an earlier restore was killed.
    """
    origin_text, go_on = "of another checkpoint or of other files", ""
    origin = _origin_of(target, plan, key)
    if origin is not None and origin.name != plan.name:
        step, generation = origin.name
        origin_text = f"of another checkpoint, {origin.name}"
        go_on = (
            f"go on with that one: --step {step} --generation {generation} "
            f"(step={step}, generation={generation} in Python and of the flow); or "
        )
    elif origin is not None and origin.attempt == plan.report.restored.attempt:
        if origin.include != plan.include:
            origin_text = f"of this checkpoint, restored with include={origin.include}"
            go_on = (
                f"give the same as before: --include {origin.include} "
                f'(include="{origin.include}" in Python and of the flow); or '
            )
        elif _has_header(target, plan, key):
            origin_text = "of this very restore, in another length: it was changed since"
            go_on = f"remove {key}, which is made again; or "
        else:
            origin_text = "of this checkpoint, in files of another size"
            go_on = (
                "give the same shard_bytes as before (in Python and of the flow; the command line "
                f"has {DEFAULT_SHARD_BYTES}); or "
            )
    return SettingsError(
        f"restore into {target.url}",
        found=f"{key}, {origin_text}",
        expected=f"no {INDEX}, and no shards except those of this very restore, of {plan.name}",
        next_step=f"{go_on}choose another place, or remove what is there",
    )


def _origin_of(target: Store, plan: ShardPlan, key: str) -> Origin | None:
    """Return the checkpoint of the plan's run that a file is of; None if it names none."""
    return checkpoint_in(_start_of(target, key, ORIGIN_BYTES), plan.run)


def _has_header(target: Store, plan: ShardPlan, key: str) -> bool:
    """Tell whether a file begins with the header of the plan's file of this name."""
    headers = (shard.header(plan.metadata) for shard in plan.shards if shard.file == key)
    return any(_start_of(target, key, len(header)) == header for header in headers)


def _start_of(target: Store, key: str, size_bytes: int) -> bytes:
    """Return the first `size_bytes` of an object, or all of it; b"" if it is gone."""
    try:
        return target.get_range(key, start=0, end=min(target.size(key), size_bytes))
    except ObjectNotFound:
        return b""


def restore_shards(
    run: Run,
    target: Store,
    selection: Selection = NEWEST,
    *,
    include: Include = "model",
    leased: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: Callable[[int, int], None] = lambda done_bytes, total: None,
) -> RestoreReport:
    """Restore a checkpoint into files, one after another.

    Memory: as `catalog.restore.restore.restore` says, and the state of all ranks. Tables go
    through mapped files, which the system writes back and evicts from memory as needed. If the
    store is not a local directory, the directory for temporary files needs room for the largest
    file.

    Args:
        run: the run.
        target: where the files go; other files there are left alone.
        selection, leased: as for `catalog.restore.restore.restore`.
        include, shard_bytes: as for `plan_shards`.
        on_progress: called with bytes written so far and bytes to write.

    Raises:
        SettingsError: another checkpoint, or part of one, is there already.
        RestoreError: the index is there, but a file is missing that cannot be written again
            because the checkpoint is damaged; or another writer has removed files meanwhile. No
            file was removed.
        RecpointError: as for `catalog.restore.restore.restore`; no index has been written. Files
            that were finished stay for the next try.
    """
    damaged: dict[ManifestName, str] = {}
    instead_of: ShardPlan | None = None
    while True:
        plan = plan_shards(
            run,
            selection,
            include=include,
            damaged=damaged,
            leased=leased,
            shard_bytes=shard_bytes,
        )
        if instead_of is not None:
            take_back(target, instead_of)
        reports: list[RestoreReport] = []
        complete = check_place(target, plan)
        remove_unfinished(target, plan)
        if not complete:
            done_bytes = 0
            try:
                for shard in plan.shards:
                    report = write_shard(run, target, plan, shard)
                    reports += [report] if report else []
                    done_bytes += shard.size_bytes
                    on_progress(done_bytes, plan.size_bytes)
            except DAMAGE as error:
                damaged |= damaged_checkpoint(
                    target, plan, error, run_url=run.url, named=selection.named
                )
                instead_of = plan  # its files stay until another checkpoint is found
                continue
            finish_shards(target, plan)
        return summary(plan, reports)


def damaged_checkpoint(
    target: Store, plan: ShardPlan, error: RecpointError, *, run_url: str, named: bool
) -> dict[ManifestName, str]:
    """Return the damaged checkpoint and its error, for `plan_shards` to choose another one.

    Raises:
        RestoreError: the index is there, so that no other checkpoint may replace its files.
        RecpointError: `error` itself, if no other checkpoint may be chosen, as for `restore`.
    """
    refuse_beside_index(target, plan, error, run_url=run_url)
    if named or isinstance(error, UnsupportedVersion):
        raise error
    return {plan.name: naming_run(f"{type(error).__name__}: {error}", run_url)}


def summary(plan: ShardPlan, reports: Sequence[RestoreReport]) -> RestoreReport:
    """Return the report of the whole restore from the reports of its files."""
    all_reports = (plan.report, *reports)
    return replace(
        plan.report,
        passed_over=tuple(
            dict.fromkeys(name for report in all_reports for name in report.passed_over)
        ),
        chain_length=max(report.chain_length for report in all_reports),
        chunks_read=sum(report.chunks_read for report in all_reports),
        bytes_read=sum(report.bytes_read for report in all_reports),
        seconds=sum(report.seconds for report in all_reports),
    )


def write_shard(
    run: Run,
    into: Store,
    plan: ShardPlan,
    shard: ShardFile,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> RestoreReport | None:
    """Restore one file of a plan; return None if the file was already there.

    Raises:
        SettingsError: another file has its name.
        FormatError, ChainError, ObjectNotFound: the checkpoint is damaged.
        StoreError: one of the two stores cannot be used, or there is no room.
    """
    if shard_is_there(into, plan, shard):
        return None
    header = shard.header(plan.metadata)
    with _mapped(into, shard.file, len(header) + shard.size_bytes) as (path, mapped):
        mapped[: len(header)] = np.frombuffer(header, np.uint8)
        target = _ShardTarget(shard, torch.from_numpy(mapped[len(header) :]), plan.include)
        report = restore(run, target, Selection.of(plan.name), on_progress=on_progress)
        with _translated(path):
            mapped.flush()
            durable.fsync_file(path)
        try:
            into.create_from_file(shard.file, path)
        except ObjectExists:
            # Another writer's file, or ours if the store's answer was lost; an error if neither.
            shard_is_there(into, plan, shard)
    return report


class _ShardTarget(PartsTarget):
    """Restores the tensors of one file into the bytes that follow its header."""

    def __init__(self, shard: ShardFile, body: Tensor, include: Include) -> None:
        self._include: Include = include
        self._of_no_table: dict[str, Tensor] = {}
        values: dict[str, list[Tensor]] = {}  # one for each name of a table
        row_states: dict[str, dict[str, Tensor]] = {}
        for tensor, part in zip(
            shard.tensors, body.split([tensor.size_bytes for tensor in shard.tensors]), strict=True
        ):
            view = part.view(torch_dtype(tensor.dtype)).view(tensor.shape)
            if tensor.table is None:
                self._of_no_table[tensor.name] = view
            elif tensor.state is None:
                values.setdefault(tensor.table, []).append(view)
            else:
                row_states.setdefault(tensor.table, {})[tensor.state] = view
        super().__init__(
            [
                TablePart(
                    table=table,
                    values=target,
                    row_states=row_states.get(table, {}) if target is targets[0] else {},
                )
                for table, targets in values.items()
                for target in targets
            ]
        )

    def state_wanted(self, manifest: Manifest, known_trees: Mapping[int, object]) -> StateWanted:
        """Ask for the state of all ranks, or of none."""
        return StateWanted(whole=range(manifest.ranks) if self._of_no_table else ())

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """Copy the tensors that are of no table from the state."""
        tensors = state_tensors(state, self._include) if self._of_no_table else {}
        for name, target in self._of_no_table.items():
            target.copy_(tensors[name])
        super().finish(manifest, state)


def write_one_file(path: Path, target: MemoryTarget, include: Include) -> None:
    """Write a checkpoint that was restored into memory to one new safetensors file.

    Raises:
        ValueError: nothing was restored.
        SettingsError: the header would be too long for safetensors; nothing is written.
    """
    if target.manifest is None:
        raise ValueError("nothing was restored")
    named = state_tensors(target.state, include)
    tied = tied_names(target.state)
    for name, table in target.tables.items():
        states = zip(target.specs[name].row_states, table.row_states, strict=True)
        of_state = {state.name: state_target for state, state_target in states}
        for tensor in _of_table(target.specs[name], tied, include):
            values = table.values if tensor.state is None else of_state[tensor.state]
            assert values is not None  # the target has row states if `include` is "all"
            named[tensor.name] = values
    shard = _shard(
        path.name,
        [ShardTensor(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in named.items()],
    )
    header = shard.header(_metadata(target.manifest.run, target.manifest.ref, include))
    with open(path, "xb") as file:
        file.write(header)
        for tensor in shard.tensors:
            # One by one, so that only a tensor that is not contiguous is copied.
            flat = named[tensor.name].detach().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)


@contextmanager
def _mapped(target: Store, file: str, size_bytes: int) -> Iterator[tuple[Path, Any]]:
    """Yield a temporary file of `size_bytes` and its mapped bytes as u8; remove it at the end."""
    directory = target.scratch_directory()
    path = directory / f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(16)}-{file}"
    try:
        with _translated(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(path, flags, target.scratch_mode), "wb") as reserved:
                # Allocates the whole file now: a full disk raises an error here, but would kill the
                # process on a write to mapped bytes.
                os.posix_fallocate(reserved.fileno(), 0, size_bytes)
            mapped = np.memmap(path, np.uint8, mode="r+")
        yield path, mapped
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turn an OSError on the file that is being written into a store's error."""
    try:
        yield
    except FileNotFoundError as error:
        raise StoreUnavailable(
            str(path),
            found="no such file any more (while writing)",
            expected="the temporary file that is being written, until it has its final name",
            next_step="run the same restore again, which writes the missing files",
        ) from error
    except OSError as error:
        raise for_os_error(error, str(path), doing="writing", writing=True) from error
