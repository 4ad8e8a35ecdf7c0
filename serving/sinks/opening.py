"""Opens a sink by its URL."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from recpoint.errors import SettingsError
from recpoint.serving.sinks.contract import Sink
from recpoint.serving.sinks.sqlite import SqliteSink

__all__ = ["open_sink", "shown_url"]

_LOCAL_SCHEMES: Final = ("sqlite", "parquet")
_REDIS_SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys")
#: With these options of redis-py, rows and records would come as text.
_TEXT_OPTIONS: Final = frozenset({"decode_responses", "encoding"})
_GRACE_SECONDS: Final = 2.0
_MOST_GRACE_SECONDS: Final = 600.0
_PAUSE: Final = 2.0
_MOST_PAUSE: Final = 20.0


def open_sink(url: str) -> Sink:
    """Return the sink that a URL names; nothing is read or written yet.

        sqlite:ads.db, sqlite:/var/lib/ads.db, parquet:/var/lib/ads
        redis://[user:password@]host[:port][/database][?prefix=recpoint][&grace=2][&pause=2]

    `valkey://` is the same as `redis://`; with `rediss://` and `valkeys://` the connection is
    encrypted. `prefix` begins all keys. `grace` is how many seconds a version stays readable after
    the next one was committed. `pause` is how many seconds a publisher leaves to readers for each
    second that the server takes longer than at its best.

    Raises:
        SettingsError: no sink has such a URL, or the library that it needs is not installed.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # a ValueError if it is none
    except ValueError:
        expected = (
            "sqlite:PATH, parquet:PATH, or redis://HOST[:PORT]; %40 for @ in a password, and so on"
        )
        raise _refused(url, "a host or a port that cannot be read", expected) from None
    if parts.scheme in _LOCAL_SCHEMES:
        path = unquote(parts.path)
        if parts.netloc or not path.strip("/"):
            example = f"{parts.scheme}:/var/lib/ads"
            raise _refused(url, "a host, or no path", f"{parts.scheme}:PATH, such as {example}")
        return SqliteSink(Path(path)) if parts.scheme == "sqlite" else _parquet(Path(path))
    if parts.scheme in _REDIS_SCHEMES and parts.hostname:
        return _redis(url)
    raise _refused(
        url, f"the scheme {parts.scheme!r:.40}", "sqlite:PATH, parquet:PATH, or redis://HOST"
    )


def _parquet(path: Path) -> Sink:
    try:
        from recpoint.serving.sinks.parquet_directory import ParquetDirectory
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise _no_package("a sink of Parquet files", "pyarrow", extra="pandas") from None
    return ParquetDirectory(path)


def _no_package(sink: str, package: str, *, extra: str) -> SettingsError:
    return SettingsError(
        sink,
        found=f"no package {package}",
        expected=f"{package}, which the extra {extra!r} brings",
        next_step=f"pip install 'recpoint[{extra}]'",
    )


def _redis(url: str) -> Sink:
    try:
        from recpoint.serving.sinks.redis_keys import RedisKeys, UnknownOption
        from recpoint.serving.sinks.redis_sink import RedisSink
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise _no_package("a sink in Redis", "redis", extra="redis") from None
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    prefix = options.pop("prefix", "recpoint")
    if not prefix or set(prefix) & set("{}:\n"):
        raise _refused(url, f"the prefix {prefix!r:.80}", "a prefix without braces and colons")
    text_options = sorted(_TEXT_OPTIONS & set(options))
    if text_options:
        raise _refused(url, f"the option {text_options[0]}", "no option that makes rows text")
    scheme = parts.scheme.replace("valkeys", "rediss").replace("valkey", "redis")
    grace_seconds = _number(url, options, "grace", _GRACE_SECONDS, _MOST_GRACE_SECONDS)
    pause = _number(url, options, "pause", _PAUSE, _MOST_PAUSE)
    server = urlunsplit((scheme, parts.netloc, parts.path, urlencode(options), ""))
    try:
        keys = RedisKeys(server, shown_url(url), prefix)
    except UnknownOption as error:
        raise _refused(url, f"an option: {error}", "options of redis-py") from None
    return RedisSink(keys, grace_seconds, pause)


def _number(url: str, options: dict[str, str], name: str, default: float, most: float) -> float:
    """Take a number out of the options of a URL."""
    text = options.pop(name, None)
    try:
        number = default if text is None else float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= most:
        raise _refused(url, f"{name}={text!r:.40}", f"{name}: 0 to {most:g}")
    return number


def shown_url(url: str) -> str:
    """Return a URL without passwords, for errors and logs; one without any stays as it is."""
    scheme = url.partition(":")[0]
    hidden = f"{scheme}:***" if scheme in (*_LOCAL_SCHEMES, *_REDIS_SCHEMES) else "***"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return hidden
    is_path = parts.scheme in _LOCAL_SCHEMES and not parts.netloc
    if "@" in parts.path + parts.query + parts.fragment and not is_path:
        return hidden  # a bare slash, question mark or hash in a password, or no // before it
    options = parse_qsl(parts.query)
    has_secret = any("password" in name.lower() for name, _ in options)
    if not has_secret and parts.password is None:
        return url
    if has_secret:
        shown = [(name, "***" if "password" in name.lower() else value) for name, value in options]
        parts = parts._replace(query=urlencode(shown, safe="*"))
    if parts.password is not None:
        host = parts.netloc.rpartition("@")[2]
        parts = parts._replace(netloc=f"{parts.username or ''}:***@{host}")
    return urlunsplit(parts)


def _refused(url: str, found: str, expected: str) -> SettingsError:
    return SettingsError(
        f"sink {shown_url(url)!r:.300}",
        found=found,
        expected=expected,
        next_step="see docs/how-to/publish-to-a-store.md",
    )
