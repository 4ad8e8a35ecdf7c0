"""Opens a sink by its URL."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from recpoint.errors import SettingsError
from recpoint.serving.sinks.contract import Sink
from recpoint.serving.sinks.sqlite import SqliteSink

__all__ = ["open_sink"]

_REDIS_SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys")
_GRACE_SECONDS: Final = 2.0
_MOST_GRACE_SECONDS: Final = 600.0


def open_sink(url: str) -> Sink:
    """Return the sink that a URL names; nothing is read or written yet.

        sqlite:ads.db, sqlite:/var/lib/ads.db
        redis://[user:password@]host[:port][/database][?prefix=recpoint][&grace=2]

    `valkey://` is the same as `redis://`; with `rediss://` and `valkeys://` the connection is
    encrypted. `prefix` begins all keys. `grace` is how many seconds a version stays readable after
    the next one was committed.

    Raises:
        SettingsError: no sink has such a URL, or the library that it needs is not installed.
    """
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        path = unquote(parts.path)
        if parts.netloc or not path.strip("/"):
            raise _refused(url, "a host, or no path", "sqlite:PATH, such as sqlite:/var/lib/ads.db")
        return SqliteSink(Path(path))
    if parts.scheme in _REDIS_SCHEMES and parts.hostname:
        return _redis(url)
    raise _refused(url, f"the scheme {parts.scheme!r:.40}", "sqlite:PATH, or redis://HOST")


def _redis(url: str) -> Sink:
    try:
        from recpoint.serving.sinks.redis_sink import RedisSink
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise SettingsError(
            "a sink in Redis",
            found="no package redis",
            expected="redis-py",
            next_step="pip install 'recpoint[redis]'",
        ) from None
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    prefix = options.pop("prefix", "recpoint")
    if not prefix or set(prefix) & set("{}:\n"):
        raise _refused(url, f"the prefix {prefix!r:.80}", "a prefix without braces and colons")
    scheme = parts.scheme.replace("valkeys", "rediss").replace("valkey", "redis")
    grace_seconds = _grace_seconds(url, options.pop("grace", None))
    server = urlunsplit((scheme, parts.netloc, parts.path, urlencode(options), ""))
    return RedisSink(server, shown_url(url), prefix, grace_seconds)


def _grace_seconds(url: str, text: str | None) -> float:
    try:
        seconds = _GRACE_SECONDS if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MOST_GRACE_SECONDS:
        raise _refused(url, f"grace={text!r:.40}", f"0 to {_MOST_GRACE_SECONDS:g} seconds")
    return seconds


def shown_url(url: str) -> str:
    """Return a URL without the password, for errors and logs."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


def _refused(url: str, found: str, expected: str) -> SettingsError:
    return SettingsError(
        f"sink {shown_url(url)!r:.300}",
        found=found,
        expected=expected,
        next_step="see docs/how-to/publish-to-a-store.md",
    )
