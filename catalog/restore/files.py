"""Restores into files of safetensors: plans them, writes each once, and the index last."""

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


# Names for every tensor of the state trees, as files of named tensors need them.

#: What files have of a checkpoint: what `Module.load_state_dict` takes, or all that is stored.
Include = Literal["model", "all"]


def state_tensors(state: Mapping[int, object], include: Include) -> dict[str, torch.Tensor]:
    """The tensors of the state tree of each rank by their names in a file; dense ones.

    Args:
        state: the state tree of each rank.
        include: model: the names are those of `Module.state_dict`. all: model/NAME for these,
            buffers/NAME for the buffers that are not persistent, ranks/RANK/… for all else.
    """
    named: dict[str, torch.Tensor] = {}
    for name, value in state_dict(state, {}).items():
        if isinstance(value, torch.Tensor | np.ndarray):  # an extra state may be anything
            collect_tensors(named, model_name(name, include), value, "/")
    if include == "all":
        collect_tensors(named, "buffers", transient_tensors(state), "/")
        collect_tensors(named, "ranks", without_model(state), "/")
    return named


def model_name(name: str, include: Include) -> str:
    """The name in a file of what `Module.state_dict` calls `name`."""
    return name if include == "model" else f"model/{name}"


def transient_tensors(state: Mapping[int, object]) -> dict[str, torch.Tensor]:
    """The buffers by name that `Module.state_dict` leaves out."""
    transient = transient_buffers(state)
    return {name: t for name, t in dense_tensors(state).items() if name in transient}


def without_model(state: Mapping[int, object]) -> dict[int, object]:
    """The state trees without the model."""
    return {
        rank: {key: value for key, value in tree.items() if key != "model"}
        if isinstance(tree, Mapping)
        else tree
        for rank, tree in state.items()
    }


def collect_tensors(
    into: dict[str, torch.Tensor], name: str, value: object, separator: str
) -> None:
    """Put every dense tensor of a tree into `into`, under its path."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            coalesced = value.coalesce()
            items = (("indices", coalesced.indices()), ("values", coalesced.values()))
        else:
            into[name] = value
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        collect_tensors(into, f"{name}{separator}{key}", item, separator)


# Which tensors of a checkpoint go into which file of safetensors, and the index that says so.
#
# The layout that programs know which share models: `model-00001-of-00004.safetensors`, …, and
# `model.safetensors.index.json` with a `weight_map` from each tensor's name to its file. The names
# are those of one file with everything, which `write_one_file` writes.


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
    rb',\s*"attempt":\s*"([^"]*)",\s*"include":\s*"([^"]*)"',
    re.DOTALL,
)


class Origin(NamedTuple):
    """What a file or an index says of where it comes from."""

    name: ManifestName
    attempt: str
    include: str


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
        include: what of the checkpoint.
        report: of the checkpoint that was chosen; what was read for it is its state alone.
        shards: the files.
    """

    run: str
    include: Include
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

    A table and its row states are in one file, since they are read together, and so is all that is
    of no table. Several of these share a file as long as they fit into `shard_bytes`; one that is
    larger has a file of its own.

    Args:
        run: the run.
        selection, damaged, leased: as for `catalog.restore.restore.restore`.
        include: see `state_tensors`; of tables model: their values, all: their row states too.
        shard_bytes: of a file that has more than one table.

    Raises:
        SettingsError: more files than their names can count.
        RecpointError: as for `catalog.restore.restore.restore`; no row has been read yet.
    """
    target = MemoryTarget(())
    report = restore(run, target, selection, damaged=damaged, leased=leased)
    assert target.manifest is not None  # as of every target that was restored into
    tied = tied_names(target.state)
    units = [
        _of_table(table, tied, include) for table in logical_tables(target.manifest.tables).values()
    ]
    named = {tensor.name for unit in units for tensor in unit}
    units.append(
        [
            ShardTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape))
            for name, tensor in state_tensors(target.state, include).items()
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
        include=include,
        report=report,
        shards=tuple(
            _shard(f"model-{number:05}-of-{len(files):05}.safetensors", tensors)
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


def _shard(file: str, tensors: Iterable[ShardTensor]) -> Shard:
    """A file of these tensors in the order that it has them in."""
    ordered = sorted(tensors, key=lambda tensor: (-item_bytes(tensor.dtype), tensor.name))
    return Shard(file, tuple(ordered))


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


# The place that files of safetensors are restored into: what is there, and what may be removed.
#
# What is there is told by its header and its length. Files count from the moment that the index is
# there: nothing is removed then. Until then those of a checkpoint that turned out to be damaged
# make room for another one's.


# Twice as long as a task of the flow may be at a file.
_UNFINISHED_SECONDS: Final = 24 * 3600

_MOST_NAMES: Final = 3


def check_place(into: Store, plan: ShardPlan) -> bool:
    """Whether all of the plan is there already.

    Raises:
        SettingsError: something else is.
    """
    missing = {shard.file: shard for shard in plan.shards}
    for info in into.list("model"):
        if info.key == INDEX:  # behind all shards in a listing
            return _is_there(into, plan, INDEX, plan.index, len(plan.index)) and not missing
        if SHARD_NAME.match(info.key):
            shard = missing.pop(info.key, None)
            if shard is None:
                raise _taken(into, plan, info.key)
            shard_is_there(into, plan, shard)
    return False


def finish_shards(into: Store, plan: ShardPlan) -> None:
    """Write the index, once all files are there.

    Raises:
        RestoreError: a file is gone: another writer has found damage, and taken it back.
        SettingsError: another file or another index is there.
    """
    _require_all(into, plan)
    try:
        into.create(INDEX, plan.index)
    except ObjectExists:
        _is_there(into, plan, INDEX, plan.index, len(plan.index))
    # Again: who took back before it could see the index may have begun after the first look.
    _require_all(into, plan)


def remove_unfinished(into: Store, plan: ShardPlan) -> None:
    """Remove what writers of the plan's files left that were killed more than a day ago.

    What is younger may be another writer's, which still needs it.
    """
    before_ms = now_ms() - _UNFINISHED_SECONDS * 1000
    for info in list(into.list_unfinished()):
        of_plan = any(shard.file in info.key for shard in plan.shards) and "/" not in info.key
        if of_plan and info.modified_ms < before_ms:
            into.delete_unfinished(info.key)


def refuse_beside_index(
    into: Store, plan: ShardPlan, error: RecpointError, *, run_url: str
) -> None:
    """Of a checkpoint that turned out to be damaged: no other one takes its place then.

    Args:
        into: the place.
        plan: the files of the damaged checkpoint.
        error: what is damaged.
        run_url: of the run.

    Raises:
        RestoreError: there is an index; it says which files are there.
    """
    if not _has_index(into):
        return
    missing = _missing(into, plan)
    count = len(plan.shards)
    without = f" without {_names(missing)}," if missing else ""
    raise RestoreError(
        f"restore into {into.url}",
        found=f"{INDEX} and {count - len(missing)} of the {count} files of {plan.name},{without} "
        f"and damage where they come from: {type(error).__name__}, {error.subject}, {error.found}",
        expected="a good checkpoint to make what is missing from; what is there was left alone",
        next_step=naming_run("recpoint check URL --level full", run_url)
        + "; keep what is there, which may be the last copy, and restore into another place",
    )


def take_back(into: Store, plan: ShardPlan) -> None:
    """Remove the files of a damaged checkpoint, once another one is there to take their place.

    Raises:
        RestoreError: there is an index: another writer has finished meanwhile.
        SettingsError: another file is in the place of one.
    """
    for shard in plan.shards:
        if not shard_is_there(into, plan, shard):
            continue
        if _has_index(into):
            raise RestoreError(
                f"restore into {into.url}",
                found=f"{INDEX}, which another writer made while {plan.name} was found damaged",
                expected="no index where files are to make room for another checkpoint; "
                f"{shard.file} was left where it is",
                next_step="run the same restore again: it makes what is missing, if anything is",
            )
        into.delete(shard.file)


def _require_all(into: Store, plan: ShardPlan) -> None:
    missing = _missing(into, plan)
    if missing:
        raise RestoreError(
            f"restore into {into.url}",
            found=f"no {_names(missing)} any more",
            expected=f"all {len(plan.shards)} files of {plan.name} until the index is there; "
            "another restore into the same place removes them where it finds the checkpoint "
            "damaged",
            next_step="run the same restore again, and no other beside it",
        )


def _missing(into: Store, plan: ShardPlan) -> list[str]:
    """Names of the files that are not there."""
    return [shard.file for shard in plan.shards if not shard_is_there(into, plan, shard)]


def _names(files: Sequence[str]) -> str:
    rest = len(files) - _MOST_NAMES
    return ", ".join(files[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _has_index(into: Store) -> bool:
    try:
        into.size(INDEX)
    except ObjectNotFound:
        return False
    return True


def shard_is_there(into: Store, plan: ShardPlan, shard: Shard) -> bool:
    """Whether the file is: by its header, which says of what it is, and its length."""
    header = shard.header(plan.metadata)
    return _is_there(into, plan, shard.file, header, len(header) + shard.size_bytes)


def _is_there(into: Store, plan: ShardPlan, key: str, start: bytes, size_bytes: int) -> bool:
    """Whether an object is that begins so and is so long.

    Raises:
        SettingsError: another one is.
    """
    try:
        if into.size(key) == size_bytes and into.get_range(key, start=0, end=len(start)) == start:
            return True
    except ObjectNotFound:
        return False
    raise _taken(into, plan, key)


def _taken(into: Store, plan: ShardPlan, key: str) -> SettingsError:
    """Of what is in the way. A trainer may have committed a newer checkpoint since a restore was
    killed, so what that one restored is said, and how to go on with it."""
    found, go_on = "of another checkpoint or of other files", ""
    begun = _origin_of(into, plan, key)
    if begun is not None and begun.name != plan.name:
        step, generation = begun.name
        found = f"of another checkpoint, {begun.name}"
        go_on = (
            f"go on with that one: --step {step} --generation {generation} "
            f"(step={step}, generation={generation} in Python and of the flow); or "
        )
    elif begun is not None and begun.attempt == plan.report.restored.attempt:
        if begun.include != plan.include:
            found = f"of this checkpoint, restored with include={begun.include}"
            go_on = (
                f"give the same as before: --include {begun.include} "
                f'(include="{begun.include}" in Python and of the flow); or '
            )
        elif _has_header(into, plan, key):
            found = "of this very restore, in another length: it was changed since"
            go_on = f"remove {key}, which is made again; or "
        else:
            found = "of this checkpoint, in files of another size"
            go_on = (
                "give the same shard_bytes as before (in Python and of the flow; the command line "
                f"has {DEFAULT_SHARD_BYTES}); or "
            )
    return SettingsError(
        f"restore into {into.url}",
        found=f"{key}, {found}",
        expected=f"no {INDEX}, and no shards but those of this very restore, of {plan.name}",
        next_step=f"{go_on}choose another place, or remove what is there",
    )


def _origin_of(into: Store, plan: ShardPlan, key: str) -> Origin | None:
    """Which checkpoint of the plan's run a file has; None: of none, or it does not say."""
    return checkpoint_in(_start_of(into, key, ORIGIN_BYTES), plan.run)


def _has_header(into: Store, plan: ShardPlan, key: str) -> bool:
    """Whether a file begins as the plan's of this name does."""
    headers = (shard.header(plan.metadata) for shard in plan.shards if shard.file == key)
    return any(_start_of(into, key, len(header)) == header for header in headers)


def _start_of(into: Store, key: str, size_bytes: int) -> bytes:
    """Its first bytes, or all of it; none where it is gone."""
    try:
        return into.get_range(key, start=0, end=min(into.size(key), size_bytes))
    except ObjectNotFound:
        return b""


# Restoring into files of safetensors with an index, a file at a time and in any order.
#
# Every file is made beside its place and appears whole, once: what is there is never replaced. So a
# restore that was killed goes on where it was, two that write the same do no harm, and two that
# write different things into one place cannot mix. The index appears last; without it nothing
# counts. Files of a checkpoint that turns out to be damaged are removed only while there is no
# index, and once another checkpoint was found for their place; a second writer that still needs
# them is told so.


def restore_shards(
    run: Run,
    into: Store,
    selection: Selection = NEWEST,
    *,
    include: Include = "model",
    leased: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> RestoreReport:
    """Restore a checkpoint into files, one after another.

    Memory: as `catalog.restore.restore.restore` says, and the state of all ranks. Tables go
    through mapped files, which the system writes back and takes from memory as it needs to. A store
    that is no local directory needs room for the largest file in the directory for temporary files.

    Args:
        run: the run.
        into: where the files go; others there are left alone.
        selection, leased: as for `catalog.restore.restore.restore`.
        include, shard_bytes: as for `plan_shards`.
        on_progress: called with bytes written so far and bytes to write.

    Raises:
        SettingsError: another checkpoint, or part of one, is there already.
        RestoreError: the index is there, and a file is missing that damage keeps from being made
            again; or another writer has removed files meanwhile. What is there was left alone.
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
            take_back(into, instead_of)
        reports: list[RestoreReport] = []
        there = check_place(into, plan)
        remove_unfinished(into, plan)
        if not there:
            done_bytes = 0
            try:
                for shard in plan.shards:
                    report = write_shard(run, into, plan, shard)
                    reports += [report] if report else []
                    done_bytes += shard.size_bytes
                    on_progress(done_bytes, plan.size_bytes)
            except DAMAGE as error:
                damaged |= damaged_checkpoint(
                    into, plan, error, run_url=run.url, named=selection.named
                )
                instead_of = plan  # its files are progress until there is another one
                continue
            finish_shards(into, plan)
        return summary(plan, reports)


def damaged_checkpoint(
    into: Store, plan: ShardPlan, error: RecpointError, *, run_url: str, named: bool
) -> dict[ManifestName, str]:
    """For `plan_shards`, which is to choose another one.

    Raises:
        RestoreError: the index is there. What is there counts, and no other checkpoint takes its
            place.
        RecpointError: the error itself, where there is no choice: as for `restore`.
    """
    refuse_beside_index(into, plan, error, run_url=run_url)
    if named or isinstance(error, UnsupportedVersion):
        raise error
    return {plan.name: naming_run(f"{type(error).__name__}: {error}", run_url)}


def summary(plan: ShardPlan, reports: Sequence[RestoreReport]) -> RestoreReport:
    """What the whole restore did, from what it took to write each file."""
    every = (plan.report, *reports)
    return replace(
        plan.report,
        passed_over=tuple(dict.fromkeys(one for report in every for one in report.passed_over)),
        chain_length=max(report.chain_length for report in every),
        chunks_read=sum(report.chunks_read for report in every),
        bytes_read=sum(report.bytes_read for report in every),
        seconds=sum(report.seconds for report in every),
    )


# --- one file ------------------------------------------------------------------------------------


def write_shard(
    run: Run,
    into: Store,
    plan: ShardPlan,
    shard: Shard,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> RestoreReport | None:
    """Restore one file of a plan; None: it was there.

    Raises:
        SettingsError: another file is in its place.
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
            shard_is_there(into, plan, shard)  # another writer's, or ours after a lost answer
    return report


class _ShardTarget(PartsTarget):
    """Restores the tensors of one file into the bytes that follow its header."""

    def __init__(self, shard: Shard, body: Tensor, include: Include) -> None:
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
                    values=into,
                    row_states=row_states.get(table, {}) if into is each[0] else {},
                )
                for table, each in values.items()
                for into in each
            ]
        )

    def state_wanted(self, manifest: Manifest, known: Mapping[int, object]) -> StateWanted:
        """See `StateChoosingTarget.state_wanted`: all of it, or nothing."""
        return StateWanted(whole=range(manifest.ranks) if self._of_no_table else ())

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `RestoreTarget.finish`."""
        found = state_tensors(state, self._include) if self._of_no_table else {}
        for name, into in self._of_no_table.items():
            into.copy_(found[name])
        super().finish(manifest, state)


def write_one_file(path: Path, target: MemoryTarget, include: Include) -> None:
    """Write what was restored into memory into one new file of safetensors.

    Raises:
        ValueError: nothing was restored.
    """
    if target.manifest is None:
        raise ValueError("nothing was restored")
    named = state_tensors(target.state, include)
    tied = tied_names(target.state)
    for name, table in target.tables.items():
        states = zip(target.specs[name].row_states, table.row_states, strict=True)
        of_state = {state.name: into for state, into in states}
        for tensor in _of_table(target.specs[name], tied, include):
            found = table.values if tensor.state is None else of_state[tensor.state]
            assert found is not None  # as of every target whose row states are to be written
            named[tensor.name] = found
    shard = _shard(
        path.name,
        [ShardTensor(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in named.items()],
    )
    with open(path, "xb") as file:
        file.write(shard.header(_metadata(target.manifest.run, target.manifest.ref, include)))
        for tensor in shard.tensors:
            # One by one: none has to be in memory twice that is contiguous.
            flat = named[tensor.name].detach().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)


@contextmanager
def _mapped(into: Store, file: str, size_bytes: int) -> Iterator[tuple[Path, Any]]:
    """A temporary file of so many bytes, and these, u8; removed at the end."""
    directory = into.scratch_directory()
    path = directory / f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(16)}-{file}"
    try:
        with _translated(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(path, flags, into.scratch_mode), "wb") as made:
                # All of it now: a disk that is full is an error here, and the end of the process
                # where mapped bytes are written.
                os.posix_fallocate(made.fileno(), 0, size_bytes)
            mapped = np.memmap(path, np.uint8, mode="r+")
        yield path, mapped
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Raises what the system says of a file that is being written as errors of a store."""
    try:
        yield
    except FileNotFoundError as error:
        raise StoreUnavailable(
            str(path),
            found="no such file any more (while writing)",
            expected="the file that is being written, until it is in its place",
            next_step="run the same restore again, which writes what is missing",
        ) from error
    except OSError as error:
        raise for_os_error(error, str(path), doing="writing", writing=True) from error
