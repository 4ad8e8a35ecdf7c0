"""No results of flow runs: whatever Prefect would store of ours is not stored.

A flow run that raises has its exception pickled, and an artifact without a key that names the file,
even with `persist_result=False`; nobody would delete either. What failed is in the state's message.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from prefect.filesystems import WritableFileSystem
from pydantic import PrivateAttr

from recpoint.flows.repeated_lines import ResultNotStored

__all__ = ["NO_RESULTS"]


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
