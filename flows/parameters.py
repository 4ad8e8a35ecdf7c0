"""Defines the parameter types that flows share, with the bounds that Prefect's forms check.

Result storage that stores nothing. If a flow run raises, Prefect pickles the exception to a file,
and makes an artifact without a key that names the file, even with `persist_result=False`. Nobody
would delete either of them. The state's message already says what failed.

Parameters that flows share, with their bounds. Prefect's UI makes its forms from them.
"""

from __future__ import annotations

from typing import Annotated, Final
from uuid import UUID

from prefect.filesystems import WritableFileSystem
from pydantic import Field, PrivateAttr

from recpoint.catalog.retention.grace import GRACE_FLOOR_SECONDS
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


class _NoResults(WritableFileSystem):
    """Refuses to store results, and has none."""

    _block_type_name = "recpoint: no results"
    # Prefect requires the id of a block on the server. It would look the block up only to read a
    # stored result, and there are none.
    _block_document_id: UUID | None = PrivateAttr(UUID(int=0))

    async def read_path(self, path: str) -> bytes:
        """Refuse to read: there are no results.

        Raises:
            FileNotFoundError: always.
        """
        raise FileNotFoundError(f"{path}: recpoint stores no results of flow runs")

    async def write_path(self, path: str, content: bytes) -> None:
        """Refuse to write: Prefect would tell the server where the result is.

        Raises:
            ResultNotStored: always. Prefect logs it and goes on.
        """
        raise ResultNotStored("recpoint stores no results; the state says what happened.")


#: The `result_storage` of each flow. Without it, each flow run asks the server for one twice.
NO_RESULTS: Final = _NoResults()


#: URL of a run, such as `s3://bucket/ads-ranker`. Prefect refuses a flow run without it.
RunUrl = Annotated[str, Field(min_length=1, max_length=4096, examples=["s3://bucket/ads-ranker"])]

#: A directory on the host where the flow runs.
StagingArea = Annotated[str, Field(min_length=1, max_length=4096)]

#: Grace of flows that delete, in seconds; the catalog functions have the same lower bound.
GraceSeconds = Annotated[
    float, Field(ge=GRACE_FLOOR_SECONDS, le=366 * 86400, allow_inf_nan=False, examples=[86400])
]

#: Path of a staged job's file, whose name consists of generation, step and rank.
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

#: Number of batches of training between two checkpoints.
BatchCount = Annotated[int, Field(ge=0, le=MAX_STEP)]

#: Number of manifests of a chain; a merge needs at least two.
Links = Annotated[int, Field(ge=2)]

#: Bytes that a restore reads, divided by the bytes that it needs.
RestoreRatio = Annotated[float, Field(ge=1, allow_inf_nan=False, examples=[1.5])]

#: Share of the rows of a chain that newer rows have replaced.
DeadShare = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, examples=[0.5])]

#: Directory or URL to which a restore writes.
TargetUrl = Annotated[
    str, Field(min_length=1, max_length=4096, examples=["s3://bucket/exports/ads-ranker"])
]

#: Largest size, in bytes, of a restored file that holds more than one table.
ShardBytes = Annotated[int, Field(ge=1, le=1 << 50)]

#: How many parts of a consolidation or a restore are at work at a time.
PartsAtOnce = Annotated[int, Field(ge=1, le=1000)]
