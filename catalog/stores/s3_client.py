"""What `s3_store` needs of an S3 SDK; `store` makes a client that keeps it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

__all__ = ["Request", "S3Client", "S3Failure"]

_Result = TypeVar("_Result")

#: Something that makes requests when it is called on the client's event loop.
Request: TypeAlias = Callable[[], Coroutine[Any, Any, _Result]]


class S3Failure(Exception):
    """What a client raises. `status` is the HTTP status, 0 when there was no whole answer."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class S3Client(Protocol):
    """What is needed of an SDK. Its methods raise S3Failure."""

    endpoint: str

    async def call(self, method: str, **arguments: object) -> Mapping[str, Any]:
        """Send one request about the bucket; retried while it may help."""

    async def read(self, body: Any) -> bytes:
        """All bytes of a body that `call` returned."""

    def run(
        self, request: Callable[[], Coroutine[Any, Any, _Result]], *, seconds: float
    ) -> _Result:
        """Run `request`, from any thread, for at most about `seconds`."""
