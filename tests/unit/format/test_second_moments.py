"""Which row states a job has coded, and what a manifest says of it (format §3.5, §7)."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from recpoint.format.job import StagedTable
from recpoint.format.manifest import RowStateSpec, StateBits, TableSpec, least_bits


def staged(**fields: Any) -> StagedTable:
    shapes: list[tuple[Any, tuple[int, ...]]] = [
        ("F32", (8,)), ("F32", (8,)), ("F32", ()), ("F32", (1,)), ("F64", (8,)),
    ]  # fmt: skip
    states = tuple(
        RowStateSpec(name=f"s{k}", dtype=dtype, shape=shape, optimizer=0)
        for k, (dtype, shape) in enumerate(shapes)
    )
    table: dict[str, Any] = {
        "spec": TableSpec(name="items", rows=9, dim=8, dtype="F32", row_states=states),
        "first_row": 0,
        "shard_rows": 9,
        "row_count": 9,
        "all_rows": True,
        "bits": 32,
        "quantizer": "auto",
        "state_bits": 8,
        "method": None,
        "codes": False,
    }
    return StagedTable(**table | fields)


@pytest.mark.parametrize(
    ("state_bits", "second_moments", "dtypes", "least"),
    [
        (None, (1,), ("F32", "F32", "F32", "F32", "F64"), None),
        (16, (1,), ("BF16", "BF16", "F32", "F32", "F64"), 16),
        (8, None, ("BF16", "BF16", "F32", "F32", "F64"), 16),
        (8, (1, 2, 3, 4), ("BF16", "U8", "F32", "F32", "F64"), 8),
    ],
)
def test_dtypes_of_stored_states(
    state_bits: Any, second_moments: Any, dtypes: tuple[str, ...], least: int | None
) -> None:
    table = staged(state_bits=state_bits, second_moments=second_moments)
    assert (table.state_dtypes, table.least_state_bits) == (dtypes, least)
    assert StagedTable.model_validate_json(table.model_dump_json()) == table
    none_staged = {"row_count": 0, "all_rows": False, "shard_rows": 0}
    assert table.model_copy(update=none_staged).least_state_bits is None


def test_a_table_without_second_moments_has_no_such_field() -> None:
    assert "second_moments" not in staged().model_dump()
    assert staged(second_moments=(0, 2)).model_dump()["second_moments"] == (0, 2)


@pytest.mark.parametrize("indices", [(), (5,), (1, 0), (1, 1), (-1,), ("1",), (True,)])
def test_indices_that_no_table_has(indices: tuple[Any, ...]) -> None:
    with pytest.raises(ValidationError, match="second"):
        staged(second_moments=indices)


def test_the_least_bits_of_several() -> None:
    several: list[list[StateBits | None]] = [[], [None], [16, None], [16, 8]]
    assert [least_bits(bits) for bits in several] == [None, None, 16, 8]
