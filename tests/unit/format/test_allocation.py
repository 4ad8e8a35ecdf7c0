"""What the allocation of a staged table may say (format §7)."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from recpoint.format.job import Allocation, StagedTable
from recpoint.format.manifest import RowStateSpec, TableSpec

PRICE, SCALE = (1e-6).hex(), (0.5).hex()


def staged(
    *, price: str = PRICE, state: int = 1, scale: str = SCALE, dtype: Any = "F32", **fields: Any
) -> StagedTable:
    """A table with two row states, the first of integers, allocated by the second."""
    row_states = (
        RowStateSpec(name="step", dtype="I64", shape=(), optimizer=0),
        RowStateSpec(name="sum", dtype="F32", shape=(8,), optimizer=0),
    )
    table: dict[str, Any] = {
        "spec": TableSpec(name="items", rows=9, dim=8, dtype=dtype, row_states=row_states),
        "first_row": 0,
        "shard_rows": 9,
        "row_count": 9,
        "all_rows": True,
        "bits": 8,
        "quantizer": "auto",
        "state_bits": None,
        "method": None,
        "codes": False,
        "allocation": Allocation(price=price, state=state, scale=scale),
    }
    return StagedTable(**table | fields)


def test_an_allocation_may_go_by_counts_in_a_byte() -> None:
    lookups = RowStateSpec(name="recpoint.lookups", dtype="U8", shape=(), optimizer=0)
    spec = TableSpec(name="items", rows=9, dim=8, dtype="F32", row_states=(lookups,))
    assert staged(spec=spec, state=0).allocation is not None


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_an_allocation_is_part_of_its_table(dtype: str) -> None:
    table = staged(dtype=dtype)
    assert table.is_quantized
    assert StagedTable.model_validate_json(table.model_dump_json()) == table
    assert table.model_dump()["allocation"] == {"price": PRICE, "state": 1, "scale": SCALE}


def test_a_table_of_one_width_has_no_such_field() -> None:
    assert "allocation" not in staged(allocation=None).model_dump()
    with pytest.raises(ValidationError):
        StagedTable.model_validate(staged(allocation=None).model_dump() | {"allocation": {}})


def test_the_first_value_of_a_state_is_told_where_there_is_one() -> None:
    allocation = Allocation(price=PRICE, state=0, scale=SCALE, initial=(0.1).hex())
    assert Allocation.model_validate_json(allocation.model_dump_json()) == allocation
    assert allocation.model_dump()["initial"] == (0.1).hex()


@pytest.mark.parametrize("name", ["price", "scale", "initial"])
@pytest.mark.parametrize("text", ["0x0.0p+0", "-0x1.0p-3", "inf", "nan", "1e-6", "0x1p-3", ""])
def test_numbers_that_no_allocation_has(name: str, text: str) -> None:
    with pytest.raises(ValidationError):
        Allocation.model_validate({"price": PRICE, "state": 0, "scale": SCALE, name: text})


METHOD = {"method": "asymmetric", "bins": 0, "ratio_permille": 0, "refits": 0}
METHOD |= {"sample_rows": 0, "seed": 0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state": 0}, "'step' of I64"),
        ({"state": 2}, "row state 2 of 2 row states"),
        ({"bits": 4}, "needs 8 bits, not 4"),
        ({"bits": 32}, "needs 8 bits, not 32"),
        ({"codes": True, "method": METHOD}, "values, not codes"),
    ],
    ids=str,
)
def test_tables_that_cannot_be_allocated(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        staged(**fields)


def test_a_method_may_come_with_an_allocation() -> None:
    assert staged(method=METHOD).method is not None
