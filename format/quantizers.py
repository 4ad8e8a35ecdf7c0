"""Describes how a rank quantized the rows of a table (format §4, `quantizers`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from recpoint.format import naming
from recpoint.format.records import Part

__all__ = ["ChosenMethod", "Quantizer", "Word", "check_quantizers"]

#: A word for people and for tuning; readers accept words that they do not know.
Word = Annotated[str, Field(pattern=r"\A[a-z][a-z0-9_]{0,31}\z")]

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Parameter = Annotated[int, Field(ge=0, lt=2**31)]


class ChosenMethod(Part):
    """How scales and offsets of quantized rows are found; no reader needs it.

    A parameter that the method does not have is 0. The method was chosen on `sample_rows` of the
    table's staged rows, drawn with `seed`; 0 if the setting left nothing to choose.
    """

    method: Word
    bins: _Parameter
    ratio_permille: _Parameter
    refits: _Parameter
    sample_rows: _Parameter
    seed: _Count

    @model_validator(mode="after")
    def _sample(self) -> Self:
        if self.sample_rows == 0 and self.seed != 0:
            raise ValueError("seed must be 0 if sample_rows is 0")
        return self


class Quantizer(ChosenMethod):
    """How one rank found the scales and offsets for one table of a checkpoint."""

    table: Annotated[int, Field(ge=0, le=naming.MAX_TABLE)]
    rank: Annotated[int, Field(ge=0, le=naming.MAX_RANK)]

    @property
    def chosen(self) -> ChosenMethod:
        """The method without its table and rank."""
        return ChosenMethod(**self.model_dump(exclude={"table", "rank"}))


def check_quantizers(quantizers: Sequence[Quantizer], tables: int, parts: int) -> None:
    """Check that quantizers ascend by table, then rank, with at most one for each pair.

    Raises:
        ValueError: they do not, or name a table or a part that does not exist.
    """
    quantized = [(quantizer.table, quantizer.rank) for quantizer in quantizers]
    if quantized != sorted(set(quantized)) or any(
        table_and_part[0] >= tables or table_and_part[1] >= parts for table_and_part in quantized
    ):
        raise ValueError("quantizers must ascend by table, then rank, one at most for each pair")
