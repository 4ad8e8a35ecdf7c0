"""Defines the parameters that flows share, with their bounds, for Prefect's forms."""

from __future__ import annotations

from typing import Annotated, Final
from uuid import UUID

from prefect.filesystems import WritableFileSystem
from pydantic import Field, PrivateAttr

from recpoint.catalog.retention.prune import GRACE_FLOOR_SECONDS
from recpoint.flows.repeated_lines import ResultNotStored
from recpoint.format.naming import MAX_GENERATION, MAX_STEP

__all__ = [
    "BatchCount",
    "DeadShare",
    "GenerationNumber",
    "GraceSeconds",
    "JobPath",
    "Links",
    "NO_RESULTS",
    "PartsAtOnce",
    "RestoreRatio",
    "RunUrl",
    "ShardBytes",
    "StagingArea",
    "StepNumber",
    "TargetUrl",
]


# No results of flow runs: whatever Prefect would store of ours is not stored.
#
# A flow run that raises has its exception pickled, and an artifact without a key that names the
# file, even with `persist_result=False`; nobody would delete either. What failed is in the state's
# message.


class _NoResults(WritableFileSystem):
    """A place that takes nothing and has nothing."""

    _block_type_name = "recpoint: no results"
    # A flow takes only blocks that a server has. It would be asked for this one by whoever reads a
    # result that was stored, and none is.
    _block_document_id: UUID | None = PrivateAttr(UUID(int=0))

    async def read_path(self, path: str) -> bytes:
        """Refuse.

        Raises:
            FileNotFoundError: always.
        """
        raise FileNotFoundError(f"{path}: recpoint stores no results of flow runs")

    async def write_path(self, path: str, content: bytes) -> None:
        """Refuse: what is written counts as stored, and the server would be told where.

        Raises:
            ResultNotStored: always. Prefect logs it and goes on.
        """
        raise ResultNotStored("recpoint stores none, the state says what happened.")


#: The `result_storage` of each flow. Without one each run asks the server twice where it would be.
NO_RESULTS: Final = _NoResults()


# Parameters that flows share, with their bounds: the form in Prefect's UI is made from these.


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
