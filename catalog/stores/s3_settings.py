"""Settings of the S3 client: time-outs, and where endpoint, region and credentials come from."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from recpoint.errors import SettingsError

__all__ = ["S3Timeouts", "client_settings"]

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class S3Timeouts:
    """How long a call to an S3 store may take.

    A request that gets no answer, or one that a later try may better, is sent up to `attempts`
    times, with pauses that grow from 1 to 8 s and are shortened by chance. Whatever happens, a
    call ends after `call_seconds`, plus the time its bytes take at `slowest_mib_per_second`. A
    listing makes one such call for every thousand objects.

    An answer of 403 or 409 ends a call at once, unless `refused_seconds` is more than 0: for so
    long a `RetryingStore` makes the call again, whatever it is but `put`. Somebody who waits at a
    terminal with a wrong key wants to hear of it; a trainer that starts must not end for one such
    answer of a server that has just restarted.

    Raises:
        SettingsError: one of them is not a positive, finite number; `refused_seconds` may be 0.
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
                    next_step=f"leave it out, or set it to something like {field.default}",
                )

    def limit_seconds(self, size_bytes: int) -> float:
        """The longest a call may take that moves `size_bytes`."""
        return self.call_seconds + size_bytes / (self.slowest_mib_per_second * _MIB)


def client_settings(
    timeouts: S3Timeouts,
    *,
    configured: Mapping[str, object],
    environment: Mapping[str, str] = os.environ,
) -> dict[str, object]:
    """Keyword arguments of `s3fs.S3FileSystem`.

    Credentials are left to the SDK (environment, shared files, instance roles) unless the fsspec
    configuration has some; nothing here ends in a URL, a log or a pickle.

    Args:
        timeouts: what the client may take.
        configured: the `s3` section of fsspec's configuration; wins over what is chosen here.
        environment: environment variables.

    Raises:
        SettingsError: an endpoint that is no address, or that carries a credential.
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
        # Servers that are not Amazon's know buckets by path, and take any region's signature.
        config["s3"] = {"addressing_style": "path"}
        client["region_name"] = (
            environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
        )
    chosen: dict[str, object] = {
        **configured,
        "client_kwargs": {**client, **_section(configured, "client_kwargs")},
        "config_kwargs": {**config, **_section(configured, "config_kwargs")},
        # A cached listing or instance would answer for another writer's, or another user's, state.
        "use_listings_cache": False,
        "skip_instance_cache": True,
    }
    if endpoint:
        chosen["endpoint_url"] = endpoint
    return chosen


def _check_endpoint(endpoint: str) -> None:
    """Refuse what the SDK would fail on without saying why, and what messages must not repeat."""
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
        else "something that does not parse as an address"
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
