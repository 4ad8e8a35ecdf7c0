"""Opens the store of a run URL; the only module that uses fsspec and its file systems."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import inspect
import os
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar

import fsspec
from fsspec.asyn import sync
from fsspec.spec import AbstractFileSystem

from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import (
    ObjectInfo,
    Store,
    check_key,
    check_prefix,
    check_range,
    for_answer,
    for_no_answer,
    for_os_error,
    missing,
    no_create_only,
    now_ms,
    probe_create_only,
    too_large,
    too_short,
)
from recpoint.catalog.store.local import LocalStore
from recpoint.catalog.store.retrying import Retries, RetryingStore
from recpoint.catalog.store.run_url import S3_INSTEAD, RunUrl, parse_run_url
from recpoint.catalog.store.s3 import (
    PerProcess,
    Request,
    S3Failure,
    S3Store,
    S3Timeouts,
    client_settings,
)
from recpoint.errors import ObjectNotFound, RecpointError, SettingsError, StoreUnsupported
from recpoint.installation import install_command

__all__ = ["ObjectInfo", "S3Timeouts", "Store", "open_store"]


_Result = TypeVar("_Result")
_CLOSING_SECONDS = 0.1


def open_store(url: str, *, timeouts: S3Timeouts | None = None) -> Store:
    """Open the store that a run URL names: a local path, `file://`, `s3://`, or another of fsspec.

    Nothing is read or written. Endpoint and credentials come from the environment
    (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, …) or from fsspec's configuration.

    Args:
        url: the run URL.
        timeouts: time-outs of an S3 store; other stores ignore them.

    Raises:
        SettingsError: the URL has no bucket, has credentials or an unknown scheme, or a package
            that the scheme needs is not installed.
    """
    parsed = parse_run_url(url)
    if parsed.scheme == "file":
        return LocalStore(parsed.path)
    # So a missing package or setting is found here, not at the first write.
    _refuse_other_settings(parsed, _file_system_class(parsed))
    if parsed.scheme not in ("s3", "s3a"):
        return _FsspecStore(parsed)
    timeouts = timeouts or S3Timeouts()
    store = S3Store(
        url=parsed.url,
        bucket=parsed.bucket,
        prefix=parsed.path + "/" if parsed.path else "",
        timeouts=timeouts,
        client=PerProcess(partial(_FsspecS3Client, parsed, timeouts)),
    )
    if timeouts.refused_seconds == 0:
        return store
    return RetryingStore(store, Retries.of_refusals(timeouts.refused_seconds))


#: The packages to install for the most common schemes.
_PACKAGES: Final = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}


def _file_system_class(parsed: RunUrl) -> Any:
    subject = f"run URL {parsed.url!r}"
    try:
        return fsspec.get_filesystem_class(parsed.scheme)
    except ImportError as error:
        package = _PACKAGES.get(parsed.scheme)
        raise SettingsError(
            subject,
            found=f"no package for {parsed.scheme}:// ({error})",
            expected=f"{package or 'the package that fsspec needs for it'}, installed",
            next_step=_package_advice(package),
        ) from error
    except ValueError as error:
        raise SettingsError(
            subject,
            found=f"the scheme {parsed.scheme!r}",
            expected="a scheme that fsspec knows: s3, gs, abfs, file, …",
            next_step="correct the run URL",
        ) from error


def _refuse_other_settings(parsed: RunUrl, file_system: Any) -> None:
    """Refuse a file system that a run URL and the environment do not suffice to open."""
    needed = [
        name
        for name, parameter in list(inspect.signature(file_system.__init__).parameters.items())[1:]
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise SettingsError(
            f"run URL {parsed.url!r}",
            found=f"the scheme {parsed.scheme!r}, which needs {', '.join(needed)} besides",
            expected="a scheme that a run URL suffices for: s3, gs, abfs, file, …",
            next_step="mount that store as a directory and give its path, or use another store",
        )


def _package_advice(package: str | None) -> str:
    if package is None:
        return "install the package named above"
    return install_command("s3") if package == "s3fs" else f"pip install {package}"


class _FsspecS3Client:
    """The client of s3fs, with its credentials, its event loop and its connections.

    Each process makes its client at its first request, so no fork or pickle carries one.
    """

    def __init__(self, parsed: RunUrl, timeouts: S3Timeouts) -> None:
        settings = client_settings(timeouts, configured=fsspec.config.conf.get("s3", {}))
        self.endpoint = str(settings.get("endpoint_url", "Amazon S3"))
        self._bucket = parsed.bucket
        self._file_system = _file_system_class(parsed)(**settings)
        # The SDK below s3fs retries, with pauses and a budget. A second layer of retries would
        # multiply the time that a dead store costs.
        self._file_system.retries = 1
        self._file_system.close_session = partial(_close, made_in=os.getpid())
        self._prepared: object = None
        self._counter = _RefusalCounter()

    @property
    def refusals(self) -> int:
        """How many answers of 429 and 503 the SDK has had."""
        return self._counter.refusals

    async def call(self, method: str, **arguments: object) -> Mapping[str, Any]:
        from botocore.handlers import add_expect_header

        try:
            if self._file_system.session is None:
                self._file_system.session = _session(self._file_system.kwargs)
            sdk = await self._file_system.set_session()
            if sdk is not self._prepared:
                # With `Expect: 100-continue` the SDK waits for a stalled server without a time-out.
                sdk.meta.events.unregister("before-call.s3", add_expect_header)
                sdk.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
                # Before the SDK repeats the request, of which the caller learns nothing.
                sdk.meta.events.register("needs-retry.s3", self._counter.count)
                self._prepared = sdk
            answer: Mapping[str, Any] = await self._file_system._call_s3(
                method, Bucket=self._bucket, **arguments
            )
        except _s3_errors() as error:
            raise _s3_failure(error) from error
        return answer

    async def read(self, body: Any) -> bytes:
        try:
            data: bytes = await body.read()
        except _s3_errors() as error:
            raise _s3_failure(error) from error
        return data

    def run(self, request: Request[_Result], *, seconds: float) -> _Result:
        try:
            result: _Result = sync(self._file_system.loop, request, timeout=seconds)
        except TimeoutError as error:  # fsspec's time-out, a subclass; the request is cancelled
            raise S3Failure(f"no answer within {seconds:.0f} s") from error
        return result


def _add_md5(params: dict[str, Any], **_: object) -> None:
    """Add the MD5 of a body to its request, beside the checksum that the SDK adds.

    Older stores demand it of a DeleteObjects, and know no other checksum.
    """
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode("ascii")


class _RefusalCounter:
    """Counts refusals that the SDK sees.

    It is an object of its own, because s3fs keeps the SDK's client, and so all that the client
    calls, until the `_FsspecS3Client` is gone.
    """

    def __init__(self) -> None:
        self.refusals = 0

    def count(self, response: Any = None, **_: object) -> None:
        if response is not None and response[0].status_code in (429, 503):
            self.refusals += 1


def _close(loop: asyncio.AbstractEventLoop, client: Any, *, made_in: int) -> None:
    """Close the connections of a client that is not used any more; replaces s3fs's function.

    The function of s3fs 2026.9 closes them on the loop of the thread that drops the client. If this
    is not the connections' own loop but, for instance, a flow's, they stay open and asyncio logs an
    error for each.

    Args:
        loop: the loop of the connections.
        client: the client's asynchronous context manager, entered.
        made_in: id of the process that made the client; a forked child leaves the connections open.
    """
    if made_in != os.getpid() or not loop.is_running():
        return
    closing = asyncio.run_coroutine_threadsafe(client.__aexit__(None, None, None), loop)
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # waiting blocks no loop here, and the process may be about to end
        with contextlib.suppress(Exception):  # the SDK may raise anything for a broken connection
            closing.result(_CLOSING_SECONDS)


def _session(settings: Mapping[str, Any]) -> Any:
    """Return a session as s3fs makes it, with its own credentials, but reads SDK files only once.

    Otherwise each session lists and parses these files again, which is most of a client's cost.
    """
    from aiobotocore.session import AioSession

    session = AioSession(**settings)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    return session


@functools.cache
def _loader(data_path: str | None) -> Any:
    """Return the loader that reads and keeps the SDK's service descriptions, but no user data."""
    from botocore.loaders import create_loader

    return create_loader(data_path)


def _s3_errors() -> tuple[type[Exception], ...]:
    """Return the errors of s3fs: OSError made from answers, and SDK errors without an answer."""
    from aiohttp import ClientError
    from botocore.exceptions import BotoCoreError

    return (OSError, BotoCoreError, ClientError)


def _s3_failure(error: Exception) -> S3Failure:
    from botocore.exceptions import (
        BotoCoreError,
        ChecksumError,
        HTTPClientError,
        IncompleteReadError,
    )
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.parsers import ResponseParserError

    name, words = type(error).__name__, " ".join(str(error).split())
    answer = getattr(error.__cause__, "response", None)
    if isinstance(answer, dict):
        described = answer.get("Error", {})
        return S3Failure(
            str(described.get("Message", words)),
            status=int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)),
            code=str(described.get("Code", "")),
        )
    if "Credential" in name or "Token" in name or name == "ProfileNotFound":
        return S3Failure(words, status=401, code=name)
    healing = (
        ChecksumError,
        NoConnection,
        HTTPClientError,
        IncompleteReadError,
        ResponseParserError,
    )
    if isinstance(error, BotoCoreError) and not isinstance(error, healing):
        return S3Failure(words, status=400, code=name)  # the SDK refused to send the request
    return S3Failure(f"{name}: {words}" if words else name)


# fsspec's memory file system gives all threads the same file object, with one position.
_one_at_a_time = threading.RLock()


class _FsspecStore(Store):
    """Any other file system of fsspec; `probe` shows whether a run can be written to it."""

    def __init__(self, parsed: RunUrl) -> None:
        self.url = parsed.url
        self._scheme = parsed.scheme
        self._file_system: PerProcess[Any] = PerProcess(partial(_connect, parsed))

    def __repr__(self) -> str:
        return f"open_store({self.url!r})"

    def get(self, key: str, *, max_bytes: int) -> bytes:
        size_bytes = self.size(key)
        if size_bytes > max_bytes:
            raise too_large(self._where(key), found_bytes=size_bytes, max_bytes=max_bytes)
        return self.get_range(key, start=0, end=size_bytes)

    def get_range(self, key: str, *, start: int, end: int) -> bytes:
        length_bytes = check_range(start, end)
        available_bytes = self.size(key) - start
        if available_bytes < length_bytes:
            raise too_short(
                self._where(key), found_bytes=max(0, available_bytes), expected_bytes=length_bytes
            )
        if length_bytes == 0:
            return b""
        data: bytes = self._run("reading", "cat_file", key, start=start, end=end)
        if len(data) != length_bytes:
            raise too_short(self._where(key), found_bytes=len(data), expected_bytes=length_bytes)
        return data

    def put(self, key: str, data: bytes) -> None:
        durable.step(f"put {check_key(key)}")
        self._run("writing", "pipe_file", key, bytes(data))
        durable.step(f"stored {key}")

    def create(self, key: str, data: bytes | memoryview) -> None:
        durable.step(f"create {check_key(key)}")
        self._run("writing", "pipe_file", key, bytes(data), mode="create")
        durable.step(f"created {key}")

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._list(check_prefix(prefix))

    def size(self, key: str) -> int:
        entry = self._run("looking at", "info", check_key(key))
        if entry.get("type") != "file":
            raise missing(self._where(key))
        size_bytes: int | None = entry["size"]
        if size_bytes is None:
            raise no_create_only(self, "an object whose size the file system does not say")
        return size_bytes

    def delete(self, key: str) -> None:
        durable.step(f"delete {check_key(key)}")
        try:
            self._run("deleting", "rm_file", key)
        except ObjectNotFound:
            pass
        durable.step(f"deleted {key}")

    def list_unfinished(self) -> Iterator[ObjectInfo]:
        """Yield nothing, because fsspec has no call for unfinished writes."""
        return iter(())

    def delete_unfinished(self, key: str) -> None:
        raise ValueError(f"{key[:200]!r} is not an unfinished object of {self.url}")

    def probe(self) -> None:
        if self._scheme in ("http", "https"):
            raise StoreUnsupported(
                self.url,
                found="a web server, from which a run can only be read",
                expected="a store to which a run can be written",
                next_step=S3_INSTEAD,
            )
        if self._scheme in ("gs", "gcs"):
            raise no_create_only(
                self, "Google Cloud Storage, whose create-only writes no test has proven"
            )
        kind = type(self._file_system.get())
        if kind.pipe_file is AbstractFileSystem.pipe_file:
            # It checks and then writes; two creates one after the other would not show the gap.
            raise no_create_only(self, f"{kind.__name__}, which creates in two steps")
        probe_create_only(self)

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        directory = prefix.rpartition("/")[0]
        root = self._file_system.get()._strip_protocol(self.url).rstrip("/") + "/"
        try:
            entries = self._run("listing", "find", directory, detail=True)
        except ObjectNotFound:
            return
        if not isinstance(entries, Mapping):  # adlfs names an object that has the directory's name
            return
        infos = []
        for name, entry in entries.items():
            key = name.removeprefix(root)
            if name.startswith(root) and key.startswith(prefix) and entry.get("type") == "file":
                infos.append(ObjectInfo(key=key, size_bytes=entry["size"], modified_ms=_ms(entry)))
        yield from sorted(infos, key=lambda info: info.key)

    def _run(self, doing: str, method: str, key: str, *arguments: Any, **named: Any) -> Any:
        address = self._where(key)
        file_system = self._file_system.get()
        try:
            if self._scheme == "memory":
                with _one_at_a_time:
                    return getattr(file_system, method)(address, *arguments, **named)
            return getattr(file_system, method)(address, *arguments, **named)
        except OSError as error:
            behind = _behind(error)
            if behind is not None:
                raise self._for_failure(behind, address, doing) from error
            raise for_os_error(error, address, doing=doing, writing="writing" in doing) from error
        except (NotImplementedError, TypeError) as error:
            raise no_create_only(
                self, f"{type(error).__name__}: {error} (while {doing})"
            ) from error
        except Exception as error:  # the errors of different SDKs have no common base
            raise self._for_failure(error, address, doing) from error

    def _for_failure(self, error: Exception, address: str, doing: str) -> RecpointError:
        """Translate an SDK's error, by the HTTP status of the answer if one came."""
        status = next(
            (
                value
                for name in ("status_code", "status", "code")
                if isinstance(value := getattr(error, name, None), int)
            ),
            None,
        )
        if status is None:
            words = f"{type(error).__name__}: {error}"
            return for_no_answer(address, words=words, doing=doing, endpoint=self.url)
        return for_answer(
            address,
            status=status,
            code=type(error).__name__,
            message=str(error),
            doing=doing,
            bucket=self.url,
        )

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url


def _behind(error: OSError) -> Exception | None:
    """Return the failure that a file system reports as "not found", as fsspec's HTTP one does."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception):
        return None if isinstance(cause, FileNotFoundError | LookupError) else cause
    return None


def _connect(parsed: RunUrl) -> Any:
    return _file_system_class(parsed)(use_listings_cache=False, skip_instance_cache=True)


def _ms(entry: Mapping[str, Any]) -> int:
    """Return when the object was last changed, in milliseconds since the epoch."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        time = entry.get(name)
        if isinstance(time, str):
            time = datetime.fromisoformat(time)
        if isinstance(time, datetime):
            time = time.timestamp()
        if isinstance(time, int | float):
            return int(time * 1000)
    # If the file system does not say, the object counts as just written, so no grace has passed.
    return now_ms()
