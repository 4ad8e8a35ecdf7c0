"""Parameters that flows share, with their bounds: the form in Prefect's UI is made from these."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from recpoint.catalog.retention.grace import GRACE_FLOOR_SECONDS
from recpoint.format.naming import MAX_GENERATION, MAX_STEP

__all__ = [
    "BatchCount",
    "DeadShare",
    "GenerationNumber",
    "GraceSeconds",
    "JobPath",
    "Links",
    "PartsAtOnce",
    "RestoreRatio",
    "RunUrl",
    "ShardBytes",
    "StagingArea",
    "StepNumber",
    "TargetUrl",
]

#: Where a run is, such as `s3://bucket/ads-ranker`. A run without it is refused when it is made.
RunUrl = Annotated[str, Field(min_length=1, max_length=4096, examples=["s3://bucket/ads-ranker"])]

#: A directory on the host that the flow runs on.
StagingArea = Annotated[str, Field(min_length=1, max_length=4096)]

#: Of what deletes: its catalog calls refuse less, too.
GraceSeconds = Annotated[
    float, Field(ge=GRACE_FLOOR_SECONDS, le=366 * 86400, allow_inf_nan=False, examples=[86400])
]

#: A staged job's file: generation, step and rank are its name.
JobPath = Annotated[
    str,
    Field(
        max_length=4096,
        pattern=r"(^|/)[0-9]{8}-[0-9]{12}-r[0-9]{5}\.json$",
        examples=[
            "/dev/shm/recpoint-1000/ads-ranker-0123456789ab/jobs/00000001-000000001200-r00000.json"
        ],
    ),
]

StepNumber = Annotated[int, Field(ge=0, le=MAX_STEP)]
GenerationNumber = Annotated[int, Field(ge=1, le=MAX_GENERATION)]

#: How much training there is between two checkpoints.
BatchCount = Annotated[int, Field(ge=0, le=MAX_STEP)]

#: Manifests of a chain; one has nothing to be merged with.
Links = Annotated[int, Field(ge=2)]

#: Bytes that a restore reads, for one that it has to.
RestoreRatio = Annotated[float, Field(ge=1, allow_inf_nan=False, examples=[1.5])]

#: Of the rows that a chain stores.
DeadShare = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, examples=[0.5])]

#: Where a restore writes: a directory, or another URL.
TargetUrl = Annotated[
    str, Field(min_length=1, max_length=4096, examples=["s3://bucket/exports/ads-ranker"])
]

#: Of a file of a restore that holds more than one table.
ShardBytes = Annotated[int, Field(ge=1, le=1 << 50)]

#: Of a consolidation or a restore, at work at a time.
PartsAtOnce = Annotated[int, Field(ge=1, le=1000)]
