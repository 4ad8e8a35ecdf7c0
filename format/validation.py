"""Defines the record of a validation: what was compared, and the result (format §10)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import FailFast, Field, StringConstraints, model_validator

from recpoint.format.naming import MAX_TABLE, ValidationLevel, ValidationResult
from recpoint.format.records import CheckpointRef, Milliseconds, Part, StoredRecord

__all__ = [
    "MAX_FINDINGS",
    "MAX_TEXT",
    "PASSED_OVER",
    "TableDigests",
    "ValidationFinding",
    "ValidationRecord",
]

MAX_FINDINGS = 1_000
MAX_TEXT = 1_000

#: `what` of a finding about a damaged manifest in whose place another one is read (format §10).
PASSED_OVER = "representation"

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Text = Annotated[str, Field(max_length=MAX_TEXT)]
_Digest = Annotated[str, StringConstraints(pattern=r"\A[0-9a-f]{16}\z")]


class ValidationFinding(Part):
    """One thing that differs from what was expected; `row` is null for a whole object."""

    subject: _Text  # a key, or the name of a table
    row: Annotated[int, Field(ge=0, lt=2**48)] | None
    what: _Text  # `values`, a row state, or what kind of object
    found: _Text
    expected: _Text
    bound: _Text  # the largest difference that counts as equal; "" if none is allowed


class TableDigests(Part):
    """Digests, in hexadecimal, of all rows of a table as a restore returns them (format §3.6)."""

    table: Annotated[int, Field(ge=0, le=MAX_TABLE)]
    values: _Digest
    row_states: Annotated[tuple[_Digest, ...], Field(max_length=64, strict=False), FailFast()]


class ValidationRecord(StoredRecord):
    """One validation of one checkpoint."""

    format: Literal["recpoint/validation"] = "recpoint/validation"
    checkpoint: CheckpointRef
    level: ValidationLevel
    result: ValidationResult
    links_read: Annotated[int, Field(ge=0, le=1_000_000)]
    chunks_read: _Count
    bytes_read: _Count
    rows_compared: _Count
    worst_ppm: _Count  # largest difference of exact and decoded value, in millionths of its bound
    digests: Annotated[
        tuple[TableDigests, ...], Field(max_length=100_000, strict=False), FailFast()
    ]
    findings: Annotated[
        tuple[ValidationFinding, ...], Field(max_length=MAX_FINDINGS, strict=False), FailFast()
    ]
    more_findings: _Count
    evaluated_by: _Text  # the function whose metrics were recorded with it; "" if none
    started_ms: Milliseconds
    finished_ms: Milliseconds
    writer: Annotated[str, Field(max_length=255)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.result != "passed" and not self.findings:
            raise ValueError("a validation that did not pass must have findings")
        tables = [digests.table for digests in self.digests]
        if tables != sorted(set(tables)):
            raise ValueError("digests must ascend by table, one at most for each")
        return self
