"""Stores a run in S3 or in a server with the same API: client, settings, requests.

The store: the requests it makes and the meaning of their answers. The requests go through a client
that `catalog.store.store` makes; no SDK is imported here. They do not use the file operations of
fsspec, which read without checking lengths, leave uploads behind, and retry on top of the client's
own retries. The client repeats a request after no answer or a failure that may pass. Only a body
that breaks off is requested again here.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit

from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import (
    ObjectInfo,
    Store,
    check_key,
    check_prefix,
    check_range,
    for_answer,
    for_no_answer,
    probe_create_only,
    too_large,
    too_short,
)
from recpoint.catalog.store.s3_deletes import ManyRefused, delete_in_requests, is_refusal
from recpoint.catalog.store.scheduler import requests_at_once
from recpoint.errors import ObjectNotFound, SettingsError, StoreError, StoreUnavailable

__all__ = ["PerProcess", "Request", "S3Failure", "S3Store", "S3Timeouts", "client_settings"]


_LOG = logging.getLogger("recpoint")

_Made = TypeVar("_Made")

# A fork may happen while another thread holds the lock, so a child gets a new lock.
_making = threading.Lock()
# Objects inherited by a fork. They are kept for ever, because collecting one would close sockets
# that the parent still uses.
_inherited: list[object] = []


def _after_fork() -> None:
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class PerProcess(Generic[_Made]):
    """Calls `make` at the first use in each process. A pickle holds `make`, never its result.

    Args:
        make: makes the object; can be pickled, and must not hold secrets.
    """

    def __init__(self, make: Callable[[], _Made]) -> None:
        self._make = make
        self._made_in: tuple[int, _Made] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"_make": self._make, "_made_in": None}

    def get(self) -> _Made:
        """Return this process's object."""
        cached = self._made_in
        if cached is None or cached[0] != os.getpid():
            with _making:
                cached = self._made_in
                if cached is None or cached[0] != os.getpid():
                    if cached is not None:
                        _inherited.append(cached[1])
                    cached = self._made_in = (os.getpid(), self._make())
        return cached[1]


_Result = TypeVar("_Result")

#: Something that makes requests when it is called on the client's event loop.
Request: TypeAlias = Callable[[], Coroutine[Any, Any, _Result]]


class S3Failure(Exception):
    """The error of a client. `status` is the HTTP status, 0 if no whole answer came."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class S3Client(Protocol):
    """The S3 client that `S3Store` needs. Its methods raise S3Failure."""

    endpoint: str

    @property
    def refusals(self) -> int:
        """How many answers were a 429 or a 503."""

    async def call(self, method: str, **arguments: object) -> Mapping[str, Any]:
        """Send one request about the bucket; the client retries it if that may help."""

    async def read(self, body: Any) -> bytes:
        """Return all bytes of a body that `call` returned."""

    def run(
        self, request: Callable[[], Coroutine[Any, Any, _Result]], *, seconds: float
    ) -> _Result:
        """Run `request`, from any thread, for at most about `seconds`."""


_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class S3Timeouts:
    """How long a call to an S3 store may take.

    A request is sent up to `attempts` times if no answer comes, or an answer after which a later
    try may succeed. The pauses grow from 1 to 8 s, and a random factor shortens them. A call always
    ends after `call_seconds`, plus the time for its bytes at `slowest_mib_per_second`. A listing
    makes one such call for every thousand objects.

    An answer of 403 or 409 ends a call at once if `refused_seconds` is 0: a person with a wrong key
    should learn of it without waiting. Otherwise a `RetryingStore` repeats every call but `put` for
    so long: a starting trainer must not end because a server that has just restarted refuses once.

    Raises:
        SettingsError: a field is not a positive, finite number; `refused_seconds` may be 0.
    """

    connect_seconds: float = 3.0
    read_seconds: float = 30.0
    attempts: int = 5
    call_seconds: float = 120.0
    slowest_mib_per_second: float = 1.0
    refused_seconds: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.default == 0
            if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
                raise SettingsError(
                    f"S3Timeouts.{field.name}",
                    found=repr(value),
                    expected="a finite number of 0 or more"
                    if may_be_zero
                    else "a positive, finite number",
                    next_step=f"leave it out, or set it to a number like {field.default}",
                )

    def limit_seconds(self, size_bytes: int) -> float:
        """Return the longest time that a call that moves `size_bytes` may take."""
        return self.call_seconds + size_bytes / (self.slowest_mib_per_second * _MIB)


def client_settings(
    timeouts: S3Timeouts,
    *,
    configured: Mapping[str, object],
    environment: Mapping[str, str] = os.environ,
) -> dict[str, object]:
    """Return the keyword arguments for `s3fs.S3FileSystem`.

    The SDK finds credentials (environment, shared files, instance roles) unless fsspec's
    configuration has some. No credential gets into a URL, a log or a pickle.

    Args:
        timeouts: the time-outs of the client.
        configured: the `s3` section of fsspec's configuration; it wins over the choices made here.
        environment: environment variables.

    Raises:
        SettingsError: the endpoint is no address, or carries a credential.
    """
    endpoint = (
        configured.get("endpoint_url")
        or environment.get("AWS_ENDPOINT_URL_S3")
        or environment.get("AWS_ENDPOINT_URL")
    )
    client: dict[str, object] = {}
    config: dict[str, object] = {
        "connect_timeout": timeouts.connect_seconds,
        "read_timeout": timeouts.read_seconds,
        "max_pool_connections": 32,
        "retries": {"mode": "standard", "total_max_attempts": timeouts.attempts},
    }
    if endpoint:
        _check_endpoint(str(endpoint))
        # Servers other than Amazon's address buckets by path and accept any region's signature.
        config["s3"] = {"addressing_style": "path"}
        client["region_name"] = (
            environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
        )
    chosen: dict[str, object] = {
        **configured,
        "client_kwargs": {**client, **_section(configured, "client_kwargs")},
        "config_kwargs": {**config, **_section(configured, "config_kwargs")},
        # A cached listing misses other writers' changes; a cached instance may be another user's.
        "use_listings_cache": False,
        "skip_instance_cache": True,
    }
    if endpoint:
        chosen["endpoint_url"] = endpoint
    return chosen


def _check_endpoint(endpoint: str) -> None:
    """Refuse an endpoint on which the SDK would fail without a reason, or that holds a secret."""
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
        port, hides = parts.port, "@" in endpoint or parts.query or parts.fragment
    except ValueError:
        good, port, hides = False, None, True
    if good and not hides and port != 0:
        return
    raise SettingsError(
        "S3 endpoint",
        found="an endpoint with a user, a query or a fragment, where a credential could hide"
        if good and hides
        else "a text that does not parse as an address"
        if hides
        else repr(endpoint[:200]),
        expected="http://host:port or https://host, without a credential",
        next_step="correct AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3 or fsspec's s3.endpoint_url",
    )


def _section(configured: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = configured.get(name, {})
    if not isinstance(section, Mapping):
        raise SettingsError(
            f"fsspec configuration, s3.{name}",
            found=type(section).__name__,
            expected="a table of settings",
            next_step="correct ~/.config/fsspec or the FSSPEC_S3 environment variables",
        )
    return section


_RANGE_BYTES = 16 * _MIB  # of one GET; a reset in mid-body costs at most this much
# Larger objects are sent in parts. That takes two more requests, and a killed writer leaves parts.
_SINGLE_PUT_BYTES = 64 * _MIB
_PART_BYTES = 32 * _MIB
_MAX_PARTS = 10_000
_IN_FLIGHT = 4  # ranges or parts of one object at once
_FIRST_PAUSE_SECONDS = 0.2

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})\Z")
_UPLOAD = "?uploadId="  # between key and upload id in the names of unfinished uploads


class S3Store(Store):
    """Objects under `prefix` of a bucket.

    Args:
        url: the run URL.
        bucket: the bucket's name.
        prefix: empty, or ending in a slash.
        timeouts: how long calls may take.
        client: makes a client for each process; can be pickled.
    """

    def __init__(
        self,
        *,
        url: str,
        bucket: str,
        prefix: str,
        timeouts: S3Timeouts,
        client: PerProcess[S3Client],
    ) -> None:
        self.url = url
        self._bucket = bucket
        self._prefix = prefix
        self._timeouts = timeouts
        self._client = client
        self._refuses_many = False

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    @property
    def refusals(self) -> int:
        return self._client.get().refusals

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._read(key, 0, None, max_bytes)

    def get_range(self, key: str, *, start: int, end: int) -> bytes:
        if check_range(start, end) == 0:
            if start > (size_bytes := self.size(key)):
                raise too_short(self._where(key), found_bytes=size_bytes, expected_bytes=start)
            return b""
        return self._read(key, start, end, None)

    def put(self, key: str, data: bytes) -> None:
        durable.step(f"put {key}")
        self._write(key, data, {})
        durable.step(f"stored {key}")

    def create(self, key: str, data: bytes | memoryview) -> None:
        durable.step(f"create {key}")
        self._write(key, data, {"IfNoneMatch": "*"})
        durable.step(f"created {key}")

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._list(check_prefix(prefix))

    def size(self, key: str) -> int:
        name = self._prefix + check_key(key)
        head = self._run("looking at", key, lambda: self._call("head_object", Key=name))
        size_bytes: int = head["ContentLength"]
        return size_bytes

    def delete(self, key: str) -> None:
        name = self._prefix + check_key(key)
        durable.step(f"delete {key}")
        try:
            self._run("deleting", key, lambda: self._call("delete_object", Key=name))
        except ObjectNotFound:
            pass  # some servers answer 404; the object is gone, as asked
        durable.step(f"deleted {key}")

    def delete_many(self, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """See `Store`; a request removes up to 1,000 objects, unless the store refuses that."""
        return self._delete_many([check_key(key) for key in keys])

    def _delete_many(self, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
        remaining = dict.fromkeys(keys)
        refusal: ManyRefused | None = None
        if len(remaining) > 1 and not self._refuses_many:
            try:
                for removed in delete_in_requests(
                    list(remaining),
                    send=self._send_deletes,
                    attempts=self._timeouts.attempts,
                    url=self.url,
                    bucket=self._bucket,
                ):
                    for key in removed:
                        del remaining[key]
                    yield removed
            except ManyRefused as error:
                refusal = error
        for removed in self._one_by_one(list(remaining)):
            if refusal is not None and not self._refuses_many:
                # Only now it is known that the store took no offence at the bucket or the key.
                self._refuses_many = True
                _LOG.info("%s: objects are deleted one by one, because of %s", self.url, refusal)
            yield removed

    def _send_deletes(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Make one request to delete these objects; return its answer, with keys as in `keys`.

        Raises:
            ManyRefused: the store does not take such requests.
        """
        names = {self._prefix + key: key for key in keys}
        objects = [{"Key": name} for name in names]
        durable.step(f"delete {len(keys)} objects from {keys[0]} on")
        try:
            answer = self._run(
                f"deleting {len(keys)} objects from this one on",
                keys[0],
                lambda: self._call("delete_objects", Delete={"Objects": objects, "Quiet": False}),
            )
        except StoreError as error:
            failure = error.__cause__
            if isinstance(failure, S3Failure) and is_refusal(failure.status, error):
                raise ManyRefused(error.found) from error
            raise
        durable.step(f"deleted {len(keys)} objects from {keys[0]} on")
        return {
            kind: [entry | {"Key": names.get(entry.get("Key"))} for entry in answer.get(kind, ())]
            for kind in ("Deleted", "Errors")
        }

    def list_unfinished(self) -> Iterator[ObjectInfo]:
        """Yield multipart uploads."""
        markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        unfinished = []
        for page in self._pages("list_multipart_uploads", markers, self._prefix):
            for upload in page.get("Uploads", ()):
                if upload["Key"].startswith(self._prefix):
                    key = upload["Key"][len(self._prefix) :] + _UPLOAD + upload["UploadId"]
                    unfinished.append(_info(key, 0, upload["Initiated"]))
        yield from sorted(unfinished, key=lambda info: info.key)

    def delete_unfinished(self, key: str) -> None:
        target, _, upload = key.partition(_UPLOAD)
        if not upload:
            raise ValueError(f"{key[:200]!r} is not a multipart upload")
        name = self._prefix + check_key(target)
        durable.step(f"delete unfinished {target}")
        try:
            self._run(
                "aborting an upload of",
                target,
                lambda: self._call("abort_multipart_upload", Key=name, UploadId=upload),
            )
        except ObjectNotFound:
            pass  # finished or aborted meanwhile
        durable.step(f"deleted unfinished {target}")

    def probe(self) -> None:
        probe_create_only(self)

    def _write(self, key: str, data: bytes | memoryview, condition: Mapping[str, str]) -> None:
        name = self._prefix + check_key(key)
        body = memoryview(data)

        async def send() -> None:
            if len(body) <= _SINGLE_PUT_BYTES:
                whole = data if isinstance(data, bytes) else bytes(data)
                await self._call("put_object", Key=name, Body=whole, **condition)
            else:
                await self._send_parts(key, body, condition)

        self._run("writing", key, send, len(body))

    async def _send_parts(self, key: str, body: memoryview, condition: Mapping[str, str]) -> None:
        name = self._prefix + key
        upload = (await self._call("create_multipart_upload", Key=name))["UploadId"]
        part_bytes = max(_PART_BYTES, -(-len(body) // _MAX_PARTS))

        async def send_part(number: int, start: int) -> dict[str, object]:
            answer = await self._call(
                "upload_part",
                Key=name,
                UploadId=upload,
                PartNumber=number,
                Body=bytes(body[start : start + part_bytes]),  # the SDK accepts only bytes
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            parts = await requests_at_once(
                (
                    partial(send_part, number, start)
                    for number, start in enumerate(range(0, len(body), part_bytes), 1)
                ),
                at_once=_IN_FLIGHT,
            )
            await self._call(
                "complete_multipart_upload",
                Key=name,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
                **condition,
            )
        except BaseException as error:
            # After a failure or a cancellation the sent parts must not stay and cost money. If the
            # abort fails too, a sweep finds the upload.
            try:
                await asyncio.shield(
                    self._call("abort_multipart_upload", Key=name, UploadId=upload)
                )
            except S3Failure:
                pass
            if isinstance(error, S3Failure) and error.code == "NoSuchUpload":
                # If the answer to a completion was lost, the repeated completion ends like this.
                raise StoreUnavailable(
                    self._where(key),
                    found="an upload that was gone before its completion was confirmed",
                    expected="the completed object",
                    next_step="read the object back, or write it again",
                ) from error
            raise

    def _read(self, key: str, start: int, end: int | None, max_bytes: int | None) -> bytes:
        """Return the bytes from `start` to `end`, or to the object's end if `end` is None.

        The first answer gives the object's length, so no more is requested or allocated. The other
        answers must come from the same version of the object.
        """
        address = self._where(check_key(key))
        first_end = start + _RANGE_BYTES if end is None else min(start + _RANGE_BYTES, end)

        async def first_range() -> tuple[bytes, int, str]:
            try:
                return await self._range(key, start, first_end, max_bytes=max_bytes)
            except S3Failure as failure:
                if failure.status != 416:
                    raise
            # The object has no byte at `start`; an empty object has not even a first byte.
            head = await self._call("head_object", Key=self._prefix + key)
            return b"", head["ContentLength"], ""

        first, total_bytes, etag = self._run("reading", key, first_range, _RANGE_BYTES)
        end = total_bytes if end is None else end
        if total_bytes < end or (len(first) == 0 and end > start):
            found_bytes = min(len(first), max(0, total_bytes - start))
            raise too_short(address, found_bytes=found_bytes, expected_bytes=end - start)

        async def other_ranges() -> builtins.list[tuple[bytes, int, str]]:
            return await requests_at_once(
                (
                    partial(
                        self._range, key, start_byte, min(start_byte + _RANGE_BYTES, end), etag=etag
                    )
                    for start_byte in range(start + len(first), end, _RANGE_BYTES)
                ),
                at_once=_IN_FLIGHT,
            )

        if len(first) == end - start:
            return first
        answers = self._run("reading", key, other_ranges, end - start)
        return b"".join([first, *(data for data, _, _ in answers)])

    async def _range(
        self, key: str, start: int, end: int, *, etag: str = "", max_bytes: int | None = None
    ) -> tuple[bytes, int, str]:
        """Return the bytes from start to end, or to the object's end; its length; its ETag.

        The client repeats requests. A body that breaks off is requested again here.
        """
        address = self._where(key)
        condition = {"IfMatch": etag} if etag else {}
        for attempt in range(1, self._timeouts.attempts + 1):
            try:
                answer = await self._call(
                    "get_object",
                    Key=self._prefix + key,
                    Range=f"bytes={start}-{end - 1}",
                    **condition,
                )
            except S3Failure as changed:
                if changed.status != 412:
                    raise
                raise StoreUnavailable(
                    address,
                    found="an object that was replaced during the read",
                    expected="the same object until the end of the read",
                    next_step="read it again",
                ) from changed
            body = answer["Body"]
            try:
                content_range = _CONTENT_RANGE.match(answer.get("ContentRange", ""))
                if not content_range or int(content_range[1]) != start:
                    raise StoreError(
                        address,
                        found=f"the range {answer.get('ContentRange')!r}",
                        expected=f"bytes from {start} on",
                        next_step="use an S3 server, or a proxy, that answers range requests",
                    )
                total_bytes = int(content_range[3])
                if max_bytes is not None and total_bytes > max_bytes:
                    raise too_large(address, found_bytes=total_bytes, max_bytes=max_bytes)
                expected_bytes = min(end, total_bytes) - start
                if answer.get("ContentLength", 0) != expected_bytes:
                    raise too_short(
                        address,
                        found_bytes=answer.get("ContentLength", 0),
                        expected_bytes=expected_bytes,
                    )
                data = await self._client.get().read(body)
                if len(data) == expected_bytes:
                    return data, total_bytes, answer.get("ETag", "")
                failure = S3Failure(f"{len(data)} of {expected_bytes} bytes")
            except S3Failure as error:
                failure = error
            finally:
                body.close()
            if attempt < self._timeouts.attempts:
                await asyncio.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        raise failure

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        infos = []
        token = {"ContinuationToken": "NextContinuationToken"}
        for page in self._pages("list_objects_v2", token, self._prefix + prefix):
            for entry in page.get("Contents", ()):
                name = entry["Key"]
                # Names that end in a slash are folders of other tools.
                if name.startswith(self._prefix + prefix) and not name.endswith("/"):
                    key = name[len(self._prefix) :]
                    infos.append(_info(key, entry["Size"], entry["LastModified"]))
        # Sorted, because not every server lists in the order of keys.
        yield from sorted(infos, key=lambda info: info.key)

    def _pages(
        self, method: str, markers: Mapping[str, str], prefix: str
    ) -> Iterator[Mapping[str, Any]]:
        """Yield all pages of a listing; `markers` maps arguments to fields of the page before."""
        position: dict[str, str] = {}
        while True:
            page = self._run("listing", "", partial(self._call, method, Prefix=prefix, **position))
            yield page
            if not page.get("IsTruncated"):
                return
            following = {name: page[field] for name, field in markers.items() if page.get(field)}
            if not following or following == position:
                raise StoreError(
                    self.url,
                    found="a listing that is truncated, without a new position to go on from",
                    expected="a next page",
                    next_step="report it to the maker of the store",
                )
            position = following

    async def _call(self, method: str, **arguments: object) -> Mapping[str, Any]:
        return await self._client.get().call(method, **arguments)

    def _run(self, doing: str, key: str, request: Request[_Result], size_bytes: int = 0) -> _Result:
        """Return the result of `request`; raise store errors.

        Args:
            doing: what is tried, for the error.
            key: the object's key, or empty.
            request: makes one or several requests.
            size_bytes: how many bytes it moves, for the time limit.
        """
        client = self._client.get()
        try:
            return client.run(request, seconds=self._timeouts.limit_seconds(size_bytes))
        except S3Failure as failure:
            raise self._error(failure, doing, self._where(key), client.endpoint) from failure

    def _error(self, failure: S3Failure, doing: str, address: str, endpoint: str) -> StoreError:
        if not failure.status:
            return for_no_answer(address, words=str(failure), doing=doing, endpoint=endpoint)
        return for_answer(
            address,
            status=failure.status,
            code=failure.code,
            message=str(failure),
            doing=doing,
            bucket=self._bucket,
        )

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url


def _info(key: str, size_bytes: int, modified: datetime) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=size_bytes, modified_ms=int(modified.timestamp() * 1000))
