"""Defines the record of rejected checkpoints, which is for people (format §4, §7)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import FailFast, Field

from recpoint.format.naming import MAX_RANK
from recpoint.format.records import CheckpointRef, Milliseconds, Part, StoredRecord

__all__ = ["MAX_REJECTIONS", "MAX_REJECTIONS_BYTES", "Rejection", "Rejections"]

#: How many rejections of a rank are kept: the newest.
MAX_REJECTIONS = 20

#: Bound of a record: 20 errors of at most 1,024 characters of 6 bytes, and their other fields.
MAX_REJECTIONS_BYTES = 256 << 10


class Rejection(Part):
    """A checkpoint, or a rank's part of a checkpoint, that an agent will never store."""

    checkpoint: CheckpointRef
    error_type: Annotated[str, Field(max_length=80)]
    error: Annotated[str, Field(max_length=1024)]
    rejected_ms: Milliseconds


class Rejections(StoredRecord):
    """The newest rejections of a rank, newest first; `count` includes older ones."""

    format: Literal["recpoint/rejections"] = "recpoint/rejections"
    rank: Annotated[int, Field(ge=0, le=MAX_RANK)]
    count: Annotated[int, Field(ge=1, le=10**9)]
    newest: Annotated[
        tuple[Rejection, ...],
        Field(min_length=1, max_length=MAX_REJECTIONS, strict=False),
        FailFast(),
    ]
    host: Annotated[str, Field(max_length=255)]
    pid: Annotated[int, Field(ge=0, lt=2**32)]
