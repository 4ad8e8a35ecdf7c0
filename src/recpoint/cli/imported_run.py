"""Writes a run whose only checkpoint holds the tables and dense tensors of another tool's one.

    1  planned_run   decides what is a table, what is dense, and what is left out; reads no tensor
    2  write_run     builds a model of these names in files, loads it as a trainer that begins with
                     a seed does, cuts a checkpoint, and commits it as an agent does

The model's tensors are mapped from files in a scratch folder, so the kernel may write them out and
memory need not hold them. Nothing of the run counts before its manifest, which is written last.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from recpoint.catalog.foreign.contents import ForeignCheckpoint, ForeignEntry
from recpoint.catalog.foreign.names import is_optimizer_state, renamed
from recpoint.catalog.retention.finish_staged import finish_staged
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.contract import Store
from recpoint.catalog.store.store import open_store
from recpoint.embeddings.tables.tables import TABLE_DTYPES
from recpoint.errors import NothingToRestore, SettingsError, StagingError
from recpoint.trainer_plugin.checkpointer import Checkpointer
from recpoint.trainer_plugin.restore.parts import Seed
from recpoint.trainer_plugin.settings import Options, Staging
from recpoint.trainer_plugin.state.import_note import IMPORT_NOTE, ImportNote

__all__ = ["PlannedRun", "planned_run", "write_run"]

_WEIGHT: Final = ".weight"


class PlannedRun(NamedTuple):
    """What a run will hold.

    Attributes:
        tables: name of the table -> its entry.
        dense: name of the tensor -> its entry.
        left_out: names of entries that it will not hold.
    """

    tables: Mapping[str, ForeignEntry]
    dense: Mapping[str, ForeignEntry]
    left_out: Sequence[str]


def planned_run(
    checkpoint: ForeignCheckpoint, renames: Mapping[str, str], table_patterns: Collection[str]
) -> PlannedRun:
    """Decide what a run will hold; see `recpoint import`.

    Args:
        checkpoint: the checkpoint.
        renames: name or pattern there -> name in the run; entries that none matches are left out.
            Empty: all entries keep their names.
        table_patterns: names or patterns of tables in the run.

    Raises:
        SettingsError: the names or patterns cannot be meant; the message names all of them.
    """
    tables: dict[str, ForeignEntry] = {}
    dense: dict[str, ForeignEntry] = {}
    left_out: list[str] = []
    faults: list[str] = []
    for entry in checkpoint.entries.values():
        new = renamed(entry.name, renames) if renames else entry.name
        if new is None:
            left_out.append(entry.name)
            continue
        if is_optimizer_state(entry.name):
            faults.append(f"{entry.name!r} is state of an optimizer")
        table = new.removesuffix(_WEIGHT)
        is_table = new.endswith(_WEIGHT) and any(
            fnmatchcase(table, pattern) for pattern in table_patterns
        )
        if is_table and (len(entry.shape) != 2 or entry.dtype not in TABLE_DTYPES):
            faults.append(f"{entry.name!r} cannot be a table: it is {entry}")
        if table in tables or new in dense:
            faults.append(f"two entries become {new!r}")
        if is_table:
            tables[table] = entry
        else:
            dense[new] = entry
    faults += [
        f"no table matches {pattern!r}"
        for pattern in table_patterns
        if not any(fnmatchcase(table, pattern) for table in tables)
    ]
    if faults:
        raise SettingsError(
            "--table and --map",
            found="; ".join(faults[:20]) + ("; and more" if len(faults) > 20 else ""),
            expected="names that choose and rename the model's tensors",
            next_step="--map 'model.*=*' takes what is under model, and --table 'NAME' says which "
            "of these (without .weight) are tables",
        )
    left_out += [f"{name} ({what})" for name, what in checkpoint.left_out.items()]
    return PlannedRun(tables, dense, left_out)


def write_run(source: str, run_url: str, planned: PlannedRun, scratch: Path) -> str:
    """Write the run, and return the name of its checkpoint.

    Args:
        source: path of the checkpoint.
        run_url: URL of the run, which has no checkpoint yet.
        planned: what the run will hold.
        scratch: an existing directory, on a disk with room for the tensors twice.

    Raises:
        SettingsError: the run has a checkpoint, or a name cannot be that of a tensor of a model.
        StagingError: the checkpoint cannot be committed; it says why.
        RecpointError: source, store or scratch directory cannot be used.
    """
    store = open_store(run_url)
    _refuse_existing(store)
    with tempfile.TemporaryDirectory(prefix="recpoint-import-", dir=scratch) as folder:
        model = _Files(Path(folder)).model(planned)
        staging = Path(folder) / "staging"
        seed = Seed(
            source,
            tables={name: entry.name for name, entry in planned.tables.items()},
            dense={name: entry.name for name, entry in planned.dense.items()},
        )
        checkpoints = Checkpointer(
            model,
            [],
            run=store.url,
            staging=Staging(directory=staging),
            interval_batches=1,
            extras={IMPORT_NOTE: ImportNote(source)},
            options=Options(on_error="raise", handle_sigterm=False, announce=False),
        )
        with checkpoints:
            checkpoints.restore(seed=seed)
            checkpoints.checkpoint()
            checkpoints.close(final=False)
        work = finish_staged(StagedRun.of(staging, store.url))
        unfinished = [job for job in work.jobs if job.fate != "committed"]
        if unfinished or not work.jobs:
            raise StagingError(
                f"the checkpoint of {run_url}",
                found="; ".join(f"{job.fate}: {job.why}" for job in unfinished) or "none staged",
                expected="a committed checkpoint",
                next_step="correct that, and run this command again",
            )
        return work.jobs[0].job


def _refuse_existing(store: Store) -> None:
    try:
        run = Run.open(store)
    except NothingToRestore:
        return
    if run.representations():
        raise SettingsError(
            "RUN",
            found=f"checkpoints in {store.url}",
            expected="a run without checkpoints",
            next_step="name another run",
        )


class _Files:
    """Makes a model whose tensors are mapped from files.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def model(self, planned: PlannedRun) -> nn.Module:
        """Return a model with these tables and dense tensors; their values mean nothing yet.

        Raises:
            SettingsError: a name cannot be that of a tensor of a model.
        """
        model = nn.Module()
        for name, entry in planned.tables.items():
            rows, dim = entry.shape
            embedding = nn.Embedding(rows, dim, _weight=self._tensor(entry), _freeze=True)
            self._put(model, name, embedding)
        for name, entry in planned.dense.items():
            self._put(model, name, self._tensor(entry))
        return model

    def _tensor(self, entry: ForeignEntry) -> Tensor:
        if not entry.size_bytes:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self._count += 1
        path = self._folder / f"{self._count}.bin"
        size = entry.size_bytes // entry.dtype.itemsize
        flat = torch.from_file(str(path), shared=True, size=size, dtype=entry.dtype)
        return flat.view(entry.shape)

    def _put(self, model: nn.Module, name: str, value: Tensor | nn.Module) -> None:
        *folders, last = name.split(".")
        module = model
        try:
            for folder in folders:
                if folder not in module._modules:
                    module.add_module(folder, nn.Module())
                module = module.get_submodule(folder)
            if isinstance(value, nn.Module):
                module.add_module(last, value)
            else:
                module.register_buffer(last, value)
        except (KeyError, AttributeError) as error:
            raise SettingsError(
                f"tensor {name!r:.200}",
                found=f"a name that no tensor of a model can have: {error}",
                expected="names of modules and tensors, joined by dots",
                next_step="rename it with --map OLD=NEW",
            ) from error
