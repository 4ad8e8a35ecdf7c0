"""Names the keys of a sink in Redis, and reaches the server that has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from recpoint.errors import SinkError

__all__ = ["RedisKeys", "UnknownOption"]

_RETRIES: Final = 6
_KEYS_A_SCAN: Final = 1000


class UnknownOption(Exception):
    """Says that redis-py cannot be used with an option of a URL."""


class RedisKeys:
    """The keys of one prefix on a server; nothing is connected yet.

    Args:
        server_url: of the server, as redis-py reads it, with a password if there is one.
        shown_url: the URL of the sink, without the password; errors name it.
        prefix: first part of all keys.

    Attributes:
        url: `shown_url`.
        prefix: in braces, so that a cluster keeps all keys on one node.
        client: of redis-py; tries again when a connection breaks.

    Raises:
        UnknownOption: redis-py has no such option, or it has another type.
    """

    def __init__(self, server_url: str, shown_url: str, prefix: str) -> None:
        self.url = shown_url
        self.prefix = f"{{{prefix}}}"
        retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=2.0), _RETRIES)
        # redis-py takes any option, and fails in its own ways when a connection reads it.
        try:
            self.client: Any = redis.Redis.from_url(
                server_url,
                socket_timeout=30.0,
                socket_connect_timeout=10.0,
                retry=retry,
                retry_on_error=[redis.exceptions.ConnectionError, redis.exceptions.TimeoutError],
            )
            pool = self.client.connection_pool
            pool.connection_class(**pool.connection_kwargs)
        except (
            TypeError,
            ValueError,
            AttributeError,
            redis.exceptions.RedisError,
        ) as error:
            raise UnknownOption(str(error)) from error

    def key(self, name: str) -> str:
        """Return a key."""
        return f"{self.prefix}:{name}"

    def stored(self, pattern: str) -> Iterator[list[bytes]]:
        """Yield the keys of this prefix, some at a time; some may come twice.

        Args:
            pattern: what follows the prefix, as `SCAN` reads it.
        """
        with self.errors():
            keys: list[bytes] = []
            match = _literal(self.key("")) + pattern
            for key in self.client.scan_iter(match=match, count=_KEYS_A_SCAN):
                keys.append(key)
                if len(keys) >= _KEYS_A_SCAN:
                    yield keys
                    keys = []
            if keys:
                yield keys

    def position(self) -> dict[bytes, bytes]:
        """Return the fields of the position; none: the sink is empty."""
        with self.errors():
            fields: dict[bytes, bytes] = self.client.hgetall(self.key("position"))
        return fields

    def now_ms(self) -> int:
        """Return the server's time, in milliseconds since the epoch."""
        with self.errors():
            seconds, microseconds = self.client.time()
        return int(seconds) * 1000 + int(microseconds) // 1000

    def refuse_eviction(self) -> None:
        """Refuse a server that may throw rows away when memory is short.

        Raises:
            SinkError: it may.
        """
        with self.errors():
            policy = self.client.info("memory").get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise SinkError(
                self.url,
                found=f"maxmemory-policy {policy}",
                expected="noeviction: a server that removes keys serves versions with holes",
                next_step="redis-cli CONFIG SET maxmemory-policy noeviction",
            )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise errors of redis-py as errors of the sink, in a `with` block.

        Raises:
            SinkError: the server cannot be used.
        """
        try:
            yield
        except redis.exceptions.OutOfMemoryError as error:
            raise self._failed(error, "room for two slots of each row that changes") from error
        except (redis.exceptions.RedisError, OSError) as error:
            raise self._failed(error, "a Redis server that answers") from error

    def _failed(self, error: Exception, expected: str) -> SinkError:
        return SinkError(
            self.url,
            found=f"{type(error).__name__}: {error}",
            expected=expected,
            next_step="see the message; readers see the version that was committed last",
        )


def _literal(text: str) -> str:
    """Return a pattern of Redis that matches a text alone."""
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in text)
