"""Finds in a batch the ids that it looks up in each table, and counts the batch's bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import is_dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from recpoint.embeddings.tables.tables import plain_tables
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.integrations import find_sources

__all__ = ["bytes_of", "check_names", "ids_of", "tables_of"]

Ids = Callable[[Any], Mapping[str, Tensor]]
#: Feature of jagged batches -> names of the tables that are looked up by its values.
Features = Mapping[str, Collection[str]]

_DTYPES: Final = (torch.int32, torch.int64)
_MOST_VALUES: Final = 1000


def tables_of(model: nn.Module) -> dict[str, int]:
    """Return the tables of a model: name -> rows of the whole table.

    Raises:
        SettingsError: `model` is no module, or a table has two names.
    """
    if not isinstance(model, nn.Module):
        raise SettingsError(
            "Lookahead(model)",
            found=f"{model!r:.200}",
            expected="a torch.nn.Module, or None",
            next_step="pass the model itself, or leave it out",
        )
    sources = tuple(find_sources(model))
    source_tables = [table for source in sources for table in source.tables]
    return {
        table.name: table.table_rows
        for table in (*plain_tables(model, sources).tables, *source_tables)
    }


def ids_of(
    batch: object, ids: Ids | None, tables: Collection[str] | None, features: Features
) -> dict[str, Tensor]:
    """Return the ids that a batch looks up.

    Args:
        batch: the batch.
        ids: as `Lookahead` takes it; None: keys of the batch that name tables, and features of its
            KeyedJaggedTensors, have the ids.
        tables: names of all tables; None: not known yet, so names are not checked.
        features: the tables of each feature.

    Returns:
        Table name -> ids: int32 or int64 [number of ids], contiguous, on the CPU. Ids may be views
        of the batch's tensors. They are not compared with the number of rows.

    Raises:
        SettingsError: `ids` returned no mapping; the batch has no key that names a table, and no
            feature of one; a table does not exist; or ids are no tensor, are not int32 or int64, or
            are not on the CPU.
    """
    if ids is None:
        by_feature = _named_by_features(batch, features)
        if isinstance(batch, Mapping) or not by_feature:
            by_feature = _named_by_keys(batch, tables or (), by_feature)
        ids_by_name = by_feature
    else:
        returned = ids(batch)
        if not isinstance(returned, Mapping):
            raise SettingsError(
                "Lookahead(ids=...)",
                found=f"a function that returned a {type(returned).__name__}",
                expected="a mapping from table names to tensors of ids",
                next_step='return {"table": tensor} for each batch',
            )
        ids_by_name = dict(returned)
        check_names(ids_by_name, tables)
    return {name: _flat(name, value) for name, value in ids_by_name.items()}


def check_names(names: Collection[object], tables: Collection[str] | None) -> None:
    """Refuse names of tables that do not exist.

    Args:
        names: the names for which a batch has ids.
        tables: names of all tables; None: not known yet, so nothing is checked.

    Raises:
        SettingsError: a name is not among `tables`.
    """
    for name in names if tables is not None else ():
        if name not in (tables or ()):
            raise SettingsError(
                f"Lookahead(ids=...): table {name!r:.200}",
                found="no such table in the model",
                expected=f"one of {sorted(tables or ())!r:.400}",
                next_step="use the name of the embedding module, as in model.named_modules()",
            )


def _named_by_features(batch: object, features: Features) -> dict[str, Any]:
    """Return the values of features in TorchRec's KeyedJaggedTensors, by the tables of features."""
    parts: dict[str, list[Tensor]] = {}
    for value in _values_in(batch) if features else ():
        if not any(base.__name__ == "KeyedJaggedTensor" for base in type(value).__mro__):
            continue
        jagged: Any = value
        ends = jagged.offset_per_key()
        values = jagged.values()
        for number, feature in enumerate(jagged.keys()):
            for name in features.get(feature, ()):
                parts.setdefault(name, []).append(values[ends[number] : ends[number + 1]])
    return {
        name: values[0] if len(values) == 1 else torch.cat(values) for name, values in parts.items()
    }


def _named_by_keys(
    batch: object, tables: Collection[str], by_feature: Mapping[str, Any]
) -> dict[str, Any]:
    next_step = "pass Lookahead(ids=...), a function that returns the ids of a batch by table name"
    if not isinstance(batch, Mapping):
        raise SettingsError(
            "Lookahead() without ids",
            found=f"a batch that is a {type(batch).__name__}",
            expected="a mapping whose keys are names of tables, or a batch with a "
            "KeyedJaggedTensor of features of TorchRec's tables",
            next_step=next_step,
        )
    ids_by_name = {**by_feature, **{name: batch[name] for name in tables if name in batch}}
    if not ids_by_name:
        raise SettingsError(
            "Lookahead() without ids",
            found=f"a batch with the keys {list(batch)!r:.400}",
            expected=f"a key that names a table: one of {sorted(tables)!r:.400}",
            next_step=next_step,
        )
    return ids_by_name


def _flat(name: str, value: object) -> Tensor:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        if value.dtype in _DTYPES and value.device.type == "cpu":
            return value.detach().reshape(-1).contiguous()
        fault = f"ids of dtype {value.dtype} on {value.device}"
    elif isinstance(value, Tensor):
        fault = f"a tensor of layout {value.layout}"
    else:
        fault = f"a {type(value).__name__}"
    raise SettingsError(
        f"the ids of table {name!r}",
        found=fault,
        expected="a dense tensor of torch.int32 or torch.int64 on the CPU",
        next_step="read batches on the CPU, and move them to the GPU in the training loop; give "
        "ids= a function that returns tensors of ids",
    )


def bytes_of(batch: object, ids: Mapping[str, Tensor]) -> int:
    """Return the bytes of a batch's tensors and arrays, and of its ids.

    Tensors are counted in mappings, sequences, and attributes of other objects, up to 1,000 values.
    Memory that several tensors share is counted once.
    """
    largest: dict[int, int] = {}  # address of the memory -> bytes of the largest tensor in it
    total = 0
    for value in _values_in([batch, ids]):
        if isinstance(value, Tensor) and value.layout is torch.strided:
            address = value.untyped_storage().data_ptr()
            largest[address] = max(largest.get(address, 0), value.nbytes)
        elif isinstance(value, np.ndarray):
            total += value.nbytes
    return total + sum(largest.values())


def _values_in(batch: object) -> Iterator[object]:
    """Yield a value and those in it: in mappings, sequences and attributes; 1,000 at most."""
    pending: list[Any] = [batch]
    for _ in range(_MOST_VALUES):
        if not pending:
            return
        value = pending.pop()
        yield value
        if isinstance(value, Tensor | np.ndarray):
            continue
        if isinstance(value, Mapping):
            pending += islice(value.values(), _MOST_VALUES)
        elif isinstance(value, list | tuple):
            pending += value[:_MOST_VALUES]
        elif is_dataclass(value) and not isinstance(value, type):
            pending += [getattr(value, name, None) for name in value.__dataclass_fields__]
        elif value is not None and not isinstance(value, int | float | str | bytes):
            pending += islice(getattr(value, "__dict__", {}).values(), _MOST_VALUES)
