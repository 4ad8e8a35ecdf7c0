"""Writes a restored checkpoint to files that other programs read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from recpoint.catalog.restore.files import write_one_file
from recpoint.catalog.restore.keyed_rows import (
    KEY,
    KEYED_STATES,
    LAST_USE,
    has_keys,
    rows_by_key,
)
from recpoint.catalog.restore.restore import MemoryTarget, state_dict, weight_name
from recpoint.catalog.restore.shard_plan import INDEX, SHARD_NAME
from recpoint.catalog.restore.state_tensors import (
    Include,
    collect_tensors,
    transient_tensors,
    without_model,
)
from recpoint.cli.export_target import TABLE_ENDINGS, WHOLE_ENDINGS

__all__ = ["only_in_torch_files", "size_bytes", "write"]


def _write_torch(path: Path, target: MemoryTarget, include: Include) -> None:
    """Write a dictionary that `torch.load(path)` reads without unpickling any code.

    With `include="model"` it is what `Module.load_state_dict` takes. With `"all"` that is under
    `model`, buffers that are not persistent under `buffers`, the rest under `row_states` and
    `ranks`.
    """
    if target.manifest is None:
        raise ValueError("nothing was restored")
    model = _with_own_memory(target_state_dict(target))
    if include == "model":
        torch.save(model, path)
        return
    checkpoint = {
        "checkpoint": target.manifest.ref.model_dump(),
        "run": target.manifest.run,
        "model": model,
        "buffers": transient_tensors(target.state),
        "row_states": row_states(target),
        "ranks": {rank: _without_arrays(state) for rank, state in target.state.items()},
    }
    torch.save(checkpoint, path)


def _with_own_memory(model: Mapping[str, Any]) -> dict[str, Any]:
    """Copy views of larger memory: `torch.save` writes all of the memory behind a tensor."""
    return {
        name: value.clone()
        if isinstance(value, torch.Tensor)
        and not value.is_sparse
        and value.untyped_storage().nbytes() > value.nbytes
        else _without_arrays(value)
        for name, value in model.items()
    }


def _write_dcp(path: Path, target: MemoryTarget, include: Include) -> None:
    """Write a directory that `torch.distributed.checkpoint.load` reads in any number of processes.

    Keys are `model.NAME`, as in the model's state_dict. With `include="all"` there are also
    `buffers.NAME` (buffers that are not persistent), `row_states.TABLE.STATE`, and `ranks.RANK.…`
    (tensors of each rank's other state). Only tensors are stored; only torch's own metadata is
    pickled. Memory holds the restored tensors once; they are written from there one by one.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    model: dict[str, torch.Tensor] = {}
    for name, value in target_state_dict(target).items():
        if isinstance(value, torch.Tensor | np.ndarray):  # an extra state may be anything
            collect_tensors(model, name, value, ".")
    for name, states in keyed_states(target).items():
        collect_tensors(model, name, states, ".")
    state = {"model": model}
    if include == "all":
        state |= {"buffers": transient_tensors(target.state), "row_states": {}, "ranks": {}}
        for name, states in row_states(target).items():
            state["row_states"].update((f"{name}.{key}", tensor) for key, tensor in states.items())
        for rank, tree in without_model(target.state).items():
            collect_tensors(state["ranks"], str(rank), tree, ".")
    with warnings.catch_warnings():
        # torch warns that there is only one process; that is intended here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save({part: tensors for part, tensors in state.items() if tensors}, checkpoint_id=path)


def target_state_dict(target: MemoryTarget) -> dict[str, Any]:
    """Return what `Module.state_dict` of the trained model returned.

    The extra state of a keyed table's module is what `KeyedEmbedding.get_extra_state` returns.
    """
    tables = {weight_name(name): table.values for name, table in target.tables.items()}
    extra_states = {
        f"{name}._extra_state": {"row_states": states, **_keyed_state(target, name)}
        for name, states in keyed_states(target).items()
    }
    return {**state_dict(target.state, tables), **extra_states}


def keyed_states(target: MemoryTarget) -> dict[str, dict[str, torch.Tensor]]:
    """Return, by name of a keyed table, the row states that say which key has a row."""
    return {
        name: {key: tensor for key, tensor in states.items() if key in KEYED_STATES}
        for name, states in row_states(target).items()
        if has_keys(states)
    }


def _keyed_state(target: MemoryTarget, table: str) -> Mapping[str, Any]:
    """Return clock, counts and admission of a keyed table, as the state tree has them."""
    tree: Any = target.state[min(target.state)]
    state: Mapping[str, Any] = tree["sources"]["keyed"][table]
    return state


def only_in_torch_files(target: MemoryTarget) -> list[str]:
    """Return the names of state dict entries that are no tensors: only a .pt file holds them."""
    return sorted(
        name
        for name, value in target_state_dict(target).items()
        if not isinstance(value, torch.Tensor | np.ndarray)
    )


def row_states(target: MemoryTarget) -> dict[str, dict[str, torch.Tensor]]:
    """Return, by table name and then state name, tensors of shape [rows, …]."""
    return {
        name: {
            state.name: tensor
            for state, tensor in zip(target.specs[name].row_states, table.row_states, strict=True)
            if tensor is not None
        }
        for name, table in target.tables.items()
    }


def _without_arrays(value: Any) -> Any:
    """Replace arrays by tensors, because torch's restricted loader reads no numpy arrays."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, Mapping):
        return {key: _without_arrays(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_arrays(item) for item in value)
    return value


def _frame(target: MemoryTarget) -> Any:
    """Return a DataFrame: `row`, then a column a value, then a column a value of each row state.

    A keyed table has `key` in place of `row`, and only the rows that keys have. A row state `s` has
    the column `s` if it has one value a row, else `s.0`, `s.1`, …
    """
    import pandas

    ((name, table),) = target.tables.items()
    states = row_states(target)[name]
    parts: list[tuple[str, torch.Tensor]] = [("value", table.values), *states.items()]
    columns: dict[str, Any] = {"row": np.arange(len(table.values))}
    if has_keys(states):
        rows = rows_by_key(name, states[KEY], states[LAST_USE])
        columns = {"key": states[KEY][rows].numpy()}
        parts = [(part, tensor[rows]) for part, tensor in parts if part != KEY]
    for part, tensor in parts:
        flat = tensor.reshape(len(tensor), -1)
        if flat.dtype == torch.bfloat16:
            flat = flat.float()  # numpy has no bfloat16; float32 holds each exactly
        single = part != "value" and tensor.dim() == 1
        for index in range(flat.shape[1]):
            columns[part if single else f"{part}.{index}"] = flat[:, index].numpy()
    return pandas.DataFrame(columns)


def _write_parquet(path: Path, target: MemoryTarget, include: Include) -> None:
    _frame(target).to_parquet(path, index=False)


def _write_csv(path: Path, target: MemoryTarget, include: Include) -> None:
    """Write numbers with enough digits to read the same bits back."""
    _frame(target).to_csv(path, index=False)


_WRITERS: Final[dict[str, Callable[[Path, MemoryTarget, Include], None]]] = {
    **dict(zip(WHOLE_ENDINGS, (_write_torch, write_one_file, _write_dcp), strict=True)),
    **dict(zip(TABLE_ENDINGS, (_write_parquet, _write_csv), strict=True)),
}


def write(path: Path, target: MemoryTarget, include: Include) -> None:
    """Write `target` to a new file or directory, in the format of the ending of `path`."""
    _WRITERS[path.suffix](path, target, include)


def size_bytes(path: Path) -> int:
    """Return the bytes of a file, or of the files that a restore wrote into a directory."""
    if not path.is_dir():
        return path.stat().st_size
    whole = path.suffix in WHOLE_ENDINGS
    return sum(
        file.stat().st_size
        for file in path.iterdir()
        if whole or file.name == INDEX or SHARD_NAME.match(file.name)
    )
