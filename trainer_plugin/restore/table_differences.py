"""Says how the tables of a model and of a checkpoint differ, and what to change."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from recpoint.catalog.restore.rows import LogicalTable
from recpoint.embeddings.tables.tables import Table
from recpoint.trainer_plugin import mismatches
from recpoint.trainer_plugin.mismatches import Mismatch, renamed_table

__all__ = ["renamed", "row_count_difference", "shape_differences", "table_differences"]


def table_differences(
    tables: Sequence[Table],
    stored_tables: Mapping[str, LogicalTable],
    *,
    elsewhere: Collection[str] = (),
    resized: Collection[str] = (),
) -> list[Mismatch]:
    """Return how the tables of a model and of a checkpoint differ.

    Args:
        tables: tables of the model on this rank.
        stored_tables: tables of the checkpoint, by name.
        elsewhere: names of tables that other ranks hold.
        resized: names of tables that may have another number of rows than the checkpoint.
    """
    only_here = {table.name: table for table in tables if table.name not in stored_tables}
    names = {table.name for table in tables} | set(elsewhere)
    only_there = {name: stored for name, stored in stored_tables.items() if name not in names}
    new_names = _new_names(only_here, only_there)
    differences = [
        Mismatch(
            f"table {name!r} is not in the checkpoint",
            renamed_table(name, new_names[name])
            if name in new_names
            else mismatches.TABLE_ONLY_HERE,
        )
        for name in only_here
    ]
    old_names = {old: new for new, old in new_names.items()}
    differences += [
        Mismatch(
            f"table {name!r} is not in the model",
            renamed_table(old_names[name], name)
            if name in old_names
            else mismatches.TABLE_ONLY_THERE,
        )
        for name in only_there
    ]
    for table in tables:
        if table.name in stored_tables:
            stored = stored_tables[table.name]
            if table.name not in resized:
                differences += row_count_difference(table, stored)
            differences += shape_differences(table, stored)
    return sorted(dict.fromkeys(differences))


def _new_names(
    only_here: Mapping[str, Table], only_there: Mapping[str, LogicalTable]
) -> dict[str, str]:
    """Return tables that were probably renamed: name here -> name in the checkpoint.

    Each of the two is the only table of its shape and dtype that the other side lacks.
    """
    model_names: dict[object, list[str]] = {}
    stored_names: dict[object, list[str]] = {}
    for name, table in only_here.items():
        model_names.setdefault((table.table_rows, _dim(table), table.dtype), []).append(name)
    for name, stored in only_there.items():
        stored_names.setdefault((stored.rows, stored.dim, stored.dtype), []).append(name)
    return {
        names[0]: stored_names[form][0]
        for form, names in model_names.items()
        if len(names) == 1 and len(stored_names.get(form, ())) == 1
    }


def row_count_difference(
    table: Table, stored: LogicalTable, *, may_grow: bool = True
) -> list[Mismatch]:
    """Return the difference in rows.

    Args:
        table: the table of the model.
        stored: the table of the checkpoint.
        may_grow: whether a restore of this kind takes tables that `Options.grow` names.
    """
    next_step = mismatches.fewer_rows(table.name, stored.rows)
    if table.table_rows > stored.rows:
        next_step = mismatches.more_rows(table.name) if may_grow else mismatches.MORE_ROWS_OF_PARTS
    return _difference_in(table, stored, "rows", table.table_rows, stored.rows, next_step)


def shape_differences(table: Table, stored: LogicalTable) -> list[Mismatch]:
    """Return the differences in values a row and in dtype."""
    return [
        difference
        for label, model_value, stored_value, next_step in (
            ("values a row", _dim(table), stored.dim, mismatches.TABLE_VALUES),
            ("dtype", table.dtype, stored.dtype, mismatches.TABLE_DTYPE),
        )
        for difference in _difference_in(table, stored, label, model_value, stored_value, next_step)
    ]


def _difference_in(
    table: Table,
    stored: LogicalTable,
    label: str,
    model_value: object,
    stored_value: object,
    next_step: str,
) -> list[Mismatch]:
    if model_value == stored_value:
        return []
    name = renamed(table.name, stored.name)
    values = f"{label} {model_value} in the model, {stored_value} in the checkpoint"
    return [Mismatch(f"table {name}: {values}", next_step)]


def _dim(table: Table) -> int:
    """Return the values a row of the whole table."""
    return table.dim if table.columns is None else table.columns.of


def renamed(new: str, old: str) -> str:
    """Return the name of a table or tensor here, and its name in the checkpoint if it differs."""
    return f"{new!r}" if new == old else f"{new!r} (from {old!r})"
