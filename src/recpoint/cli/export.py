"""Writing a restored checkpoint to files that other programs read."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from recpoint.catalog.restore.files import collect_tensors, without_model
from recpoint.catalog.restore.restore import MemoryTarget, model_tensors
from recpoint.catalog.store import durable
from recpoint.errors import SettingsError

__all__ = ["check_target", "is_for_shards", "replacing", "writer"]


Write = Callable[[Path, MemoryTarget], None]


def is_for_shards(path: Path, *, table: str | None, force: bool) -> bool:
    """Whether it is a directory that takes files of safetensors with an index.

    Raises:
        SettingsError: it is, and `force` was given.
    """
    if table is not None or not path.is_dir() or path.suffix in _WHOLE:
        return False
    if force:
        raise SettingsError(
            "--force",
            found=f"the directory {path}",
            expected="a file, or a directory .dcp; of others no file is ever replaced",
            next_step="choose another directory, or remove what is there",
        )
    return True


def writer(path: Path, *, table: str | None) -> Write:
    """What writes files named like `path`.

    Raises:
        SettingsError: the ending says nothing, or not what `table` says, or pandas is missing.
    """
    known = _OF_TABLE if table is not None else _WHOLE
    if path.suffix not in known:
        raise SettingsError(
            "--to",
            found=str(path),
            expected=f"a name that ends in {', '.join(known)}"
            + (
                " for one table"
                if table is not None
                else ", or a directory that is there; with --table also .parquet or .csv"
            ),
            next_step="give the file another ending",
        )
    if table is not None:
        _require_pandas()
    return known[path.suffix]


def check_target(path: Path, *, force: bool) -> None:
    """Refuse before a restore takes minutes what `replacing` would refuse after it."""
    if not force and os.path.lexists(path):
        raise _exists(path)
    if not path.parent.is_dir():
        raise SettingsError(
            "--to",
            found=f"no directory {path.parent}",
            expected="a directory that is there",
            next_step=f"mkdir -p {path.parent}",
        )


@contextmanager
def replacing(path: Path, *, force: bool) -> Iterator[Path]:
    """A temporary file or directory beside `path`; takes its place, durably, if all goes well.

    Raises:
        SettingsError: `path` is there, and `force` was not given.
    """
    temporary = path.with_name(f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(16)}{path.suffix}")
    try:
        yield temporary
        if temporary.is_dir():
            _put_directory(temporary, path, force=force)
        else:
            durable.fsync_file(temporary)
            _put_file(temporary, path, force=force)
        durable.fsync_directory(path.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)


def _put_file(temporary: Path, path: Path, *, force: bool) -> None:
    if force:
        os.replace(temporary, path)
        return
    # Not a rename: that would replace a file that was made since it was looked for.
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise _exists(path) from None


def _put_directory(temporary: Path, path: Path, *, force: bool) -> None:
    for file in temporary.iterdir():
        durable.fsync_file(file)
    durable.fsync_directory(temporary)
    old = path.with_name(f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(16)}")
    if force and os.path.lexists(path):
        os.rename(path, old)  # a directory is not replaced by a rename
    try:
        os.rename(temporary, path)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise _exists(path) from None
        raise
    finally:
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        old.unlink(missing_ok=True)


def _exists(path: Path) -> SettingsError:
    return SettingsError(
        "--to",
        found=f"{path}, which exists",
        expected="a new file",
        next_step="choose another name, or replace it with --force",
    )


def _require_pandas() -> None:
    try:
        import pandas  # noqa: F401  (only whether it is there)
    except ImportError:
        raise SettingsError(
            "--table",
            found="no pandas",
            expected="pandas and pyarrow",
            next_step="pip install 'recpoint[pandas]'",
        ) from None


# --- whole checkpoints -------------------------------------------------------------------------


def _write_torch(path: Path, target: MemoryTarget) -> None:
    """A dictionary that `torch.load(path, weights_only=True)` reads.

    `model` fits `Module.load_state_dict`; `row_states` and `ranks` are everything else.
    """
    if target.manifest is None:
        raise ValueError("nothing was restored")
    checkpoint = {
        "checkpoint": target.manifest.ref.model_dump(),
        "run": target.manifest.run,
        "model": model_tensors(target),
        "row_states": row_states(target),
        "ranks": {rank: _without_arrays(state) for rank, state in target.state.items()},
    }
    torch.save(checkpoint, path)


def _write_safetensors(path: Path, target: MemoryTarget) -> None:
    """Every tensor under a path-like name: model/…, row_states/TABLE/STATE, ranks/RANK/…"""
    from safetensors.torch import save_file

    if target.manifest is None:
        raise ValueError("nothing was restored")
    named: dict[str, torch.Tensor] = {}
    collect_tensors(named, "model", model_tensors(target), "/")
    collect_tensors(named, "row_states", row_states(target), "/")
    collect_tensors(named, "ranks", without_model(target.state), "/")
    # Independent copies: safetensors refuses tensors that share memory, as views in a state do.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in named.items()}
    save_file(
        tensors,
        path,
        metadata={
            "run": target.manifest.run,
            "step": str(target.manifest.step),
            "generation": str(target.manifest.generation),
            "attempt": target.manifest.attempt,
        },
    )


def _write_dcp(path: Path, target: MemoryTarget) -> None:
    """A directory that `torch.distributed.checkpoint.load` reads, in any number of processes.

    Keys: `model.NAME`, as in the model's state_dict; `row_states.TABLE.STATE`; `ranks.RANK.…`, the
    tensors of each rank's other state. Tensors only: nothing in it has to be unpickled but torch's
    own metadata. What was restored is in memory once; tensors are written from there one by one.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    parts: dict[str, dict[str, torch.Tensor]] = {"row_states": {}, "ranks": {}}
    for name, states in row_states(target).items():
        parts["row_states"].update((f"{name}.{state}", tensor) for state, tensor in states.items())
    for rank, tree in without_model(target.state).items():
        collect_tensors(parts["ranks"], str(rank), tree, ".")
    state = {"model": model_tensors(target), **parts}
    with warnings.catch_warnings():
        # That there is one process, which is what is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save({part: tensors for part, tensors in state.items() if tensors}, checkpoint_id=path)


def row_states(target: MemoryTarget) -> dict[str, dict[str, torch.Tensor]]:
    """Table name to state name to tensor [rows, …]."""
    return {
        name: {
            state.name: tensor
            for state, tensor in zip(target.specs[name].row_states, table.row_states, strict=True)
            if tensor is not None
        }
        for name, table in target.tables.items()
    }


def _without_arrays(value: Any) -> Any:
    """Arrays as tensors: the restricted loader of torch reads no numpy."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, Mapping):
        return {key: _without_arrays(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_arrays(item) for item in value)
    return value


# --- one table ---------------------------------------------------------------------------------


def _frame(target: MemoryTarget) -> Any:
    """A DataFrame: `row`, then one column a value, then one a value of each row state.

    Columns of a state `s` are `s` when it has one value a row, else `s.0`, `s.1`, …
    """
    import pandas

    ((name, table),) = target.tables.items()
    parts: list[tuple[str, torch.Tensor]] = [("value", table.values)]
    parts += row_states(target)[name].items()
    columns: dict[str, Any] = {"row": np.arange(len(table.values))}
    for part, tensor in parts:
        flat = tensor.reshape(len(tensor), -1)
        if flat.dtype == torch.bfloat16:
            flat = flat.float()  # numpy has no bfloat16; every one is a float32
        single = part != "value" and tensor.dim() == 1
        for index in range(flat.shape[1]):
            columns[part if single else f"{part}.{index}"] = flat[:, index].numpy()
    return pandas.DataFrame(columns)


def _write_parquet(path: Path, target: MemoryTarget) -> None:
    _frame(target).to_parquet(path, index=False)


def _write_csv(path: Path, target: MemoryTarget) -> None:
    """Numbers with as many digits as it takes to get the same bits back."""
    _frame(target).to_csv(path, index=False)


_WHOLE: Final = {".pt": _write_torch, ".safetensors": _write_safetensors, ".dcp": _write_dcp}
_OF_TABLE: Final[dict[str, Write]] = {".parquet": _write_parquet, ".csv": _write_csv}
