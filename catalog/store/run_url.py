"""Checks run URLs and gives each its one spelling, which is safe to print."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from recpoint.errors import RecpointError, SettingsError

__all__ = ["S3_INSTEAD", "RunUrl", "name_run_in", "naming_errors", "naming_run", "parse_run_url"]


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://|:)")
_FORGOTTEN_SLASHES = re.compile(r"(?:file|s3a?|gs|abfss?|https?|memory):", re.IGNORECASE)
_AT = re.compile("@|%40")
_MAYBE_SECRET = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:(?://)?)[^/]*:")
_CREDENTIAL_FIRST = re.compile(r"[^/]*:.*(?:@|%40)")  # .* because a secret may contain slashes
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}\Z")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z")
_PATH_PART = re.compile(r"[^\x00-\x1f\x7f\\]+\Z")
_PROPOSED = re.compile(r"\b(recpoint [a-z][a-z-]*) URL\b(?!\.\.\.)")

#: The next step after a run URL that is the address of a web server.
S3_INSTEAD = "if it speaks S3: export AWS_ENDPOINT_URL=ADDRESS, and give s3://BUCKET/PREFIX"

_NEXT = "give a local path, file:///path, s3://bucket/prefix, or another fsspec URL"
_LOCAL_ANYWAY = "; a local path that looks like this begins with ./"
_RENAME = "; rename the directory, or give another"


@dataclass(frozen=True, kw_only=True)
class RunUrl:
    """The parts of a run URL.

    Attributes:
        scheme: lower case; `file` for local paths.
        bucket: the text between `//` and the next slash; empty for local paths.
        path: without slashes at its ends; absolute for local paths.
        url: the one spelling; safe to print.
    """

    scheme: str
    bucket: str
    path: str
    url: str


def parse_run_url(url: str) -> RunUrl:
    """Take a run URL apart.

    Local paths may be relative to the working directory. Links in them are kept, except in a path
    with `..`, which has a meaning only after links are followed.

    Raises:
        SettingsError: the URL is no string, is empty, has bytes that are not UTF-8, has no bucket,
            or has credentials, a query, `..` or control characters. The message never repeats a
            credential.
    """
    if not isinstance(url, str):
        raise SettingsError(
            "run URL",
            found=f"a {type(url).__name__}",
            expected="a string",
            next_step="give str(path) for a local path",
        )
    if not url.strip() or "\x00" in url:
        raise _refused(url, "an empty URL" if not url.strip() else "a NUL character")
    _require_utf8(url, url)
    match = _SCHEME.match(url)
    if match is None:
        if _FORGOTTEN_SLASHES.match(url):
            raise _refused(url, "a URL without `//`")
        if _CREDENTIAL_FIRST.match(url):
            raise _refused(url, "a credential in the URL, and no scheme", or_else=_LOCAL_ANYWAY)
        return _local(os.path.expanduser(url))
    scheme = match[1].lower()
    if "::" in url:
        raise _refused(url, "a chain of file systems, which has no durable create-only writes")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _refused(url, "a URL that does not parse") from None
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise _refused(url, "a query or fragment, where a credential could hide")
    if scheme in ("file", "local"):
        return _local_url(url, parts.netloc, unquote(parts.path))
    user, separator, _ = parts.netloc.rpartition("@")
    # abfs://container@account.dfs.core.windows.net is an address; a colon before @ is a password.
    if separator and (":" in user or not scheme.startswith(("abfs", "wasb"))):
        raise _refused(url, "a credential in the URL")
    if scheme in ("http", "https") and (":" in parts.netloc or not _HOST.match(parts.netloc)):
        raise _refused(
            url,
            "the address of a web server",
            expected="a bucket; the address of an S3 server comes from the environment",
            next_step=S3_INSTEAD,
        )
    if scheme not in ("memory", "http", "https") and not _BUCKET.match(
        parts.netloc.replace("@", "-")
    ):
        raise _refused(
            url,
            _bucket_text(parts.netloc),
            expected="a bucket's name: 2 to 255 letters, digits, dots, dashes and underscores, the "
            "first a letter or a digit",
            next_step=f"correct the bucket's name: {scheme}://BUCKET/PREFIX",
        )
    pieces = [piece for piece in parts.path.split("/") if piece]
    for piece in pieces:
        if piece in (".", "..") or not _PATH_PART.match(piece):
            raise _refused(url, f"the path segment {_AT.split(piece)[-1]!r}")
    path = "/".join(pieces)
    address = f"{parts.netloc}/{path}".rstrip("/")
    return RunUrl(scheme=scheme, bucket=parts.netloc, path=path, url=f"{scheme}://{address}")


def _bucket_text(bucket: str) -> str:
    """Describe a wrong bucket; hide text with a colon, which may be a credential without `@`."""
    if not bucket:
        return "no bucket"
    shown = ":" not in bucket and not _AT.search(bucket)
    return f"the bucket {bucket!r}" if shown else "a `:` in the bucket's name"


def _local_url(url: str, host: str, path: str) -> RunUrl:
    if host not in ("", "localhost"):
        shown = "***" if ":" in host else host.rpartition("@")[2]
        raise _refused(url, f"the host {shown!r} in a file URL")
    if not path.startswith("/") or "\x00" in path or ".." in path.split("/"):
        raise _refused(url, "a file URL whose path is not absolute, or has `..`")
    return _local(path)


def _local(path: str) -> RunUrl:
    absolute = os.path.realpath(path) if ".." in path.split("/") else os.path.abspath(path)
    if absolute.startswith("//"):  # POSIX gives it a meaning, so abspath keeps it
        absolute = absolute[1:]
    if absolute == "/":
        raise _refused(path, "the root directory")
    _require_utf8(absolute, path)
    return RunUrl(scheme="file", bucket="", path=absolute, url=absolute)


def _require_utf8(text: str, url: str) -> None:
    """Refuse a file name that Python could not decode, because records and logs are UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        path_fault = (
            "bytes that are not UTF-8 in the URL or in the directory that it is relative to"
        )
        raise _refused(url, path_fault, or_else=_RENAME) from None


def _refused(
    url: str,
    found: str,
    *,
    expected: str = "the place of the run's objects; credentials come from the environment",
    next_step: str = _NEXT,
    or_else: str = "",
) -> SettingsError:
    # Only the scheme and the text after the last @ are shown, up to a ? or #. The @ is looked for
    # first, because a secret may contain a ? or #.
    *hidden, shown = _AT.split(url)
    shown = re.split(r"[?#]", shown, maxsplit=1)[0]
    if hidden:
        scheme = _SCHEME.match(url)
        shown = f"{scheme[1] + '://' if scheme else ''}***@{shown}"
    elif secret := _MAYBE_SECRET.match(url):
        # The @ is missing, and a secret may contain slashes, so its end is unknown: all is hidden.
        shown = f"{secret[1]}***"
    return SettingsError(
        f"run URL {shown[:200]!r}",
        found=found,
        expected=expected,
        next_step=next_step + or_else,
    )


def naming_run(text: str, url: object) -> str:
    """Put the run's URL into the commands that `text` proposes, so that they can be copied.

    The code that raises such an error knows only the key of an object. A URL that is refused is
    not put in, because it may hold a credential.
    """
    try:
        run_url = parse_run_url(url).url if isinstance(url, str) else "URL"
    except SettingsError:
        return text
    return _PROPOSED.sub(lambda match: f"{match[1]} {shlex.quote(run_url)}", text)


@contextmanager
def naming_errors(url: object) -> Iterator[None]:
    """Put the run's URL into the commands that errors raised inside propose."""
    try:
        yield
    except RecpointError as error:
        name_run_in(error, url)
        raise


def name_run_in(error: BaseException, url: object) -> None:
    """Put the run's URL into the commands that an error of recpoint proposes."""
    if isinstance(error, RecpointError):
        error.found = naming_run(error.found, url)
        error.next_step = naming_run(error.next_step, url)
