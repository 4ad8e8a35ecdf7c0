"""The last thing that the server of `tests.forked` imports: what each process would do again.

To make its first S3 client the SDK imports some 190 modules and parses megabytes of JSON, which
takes longer than all that a test has a process do. `catalog.store.store` keeps what was parsed.
"""

from __future__ import annotations

import asyncio
import gc

import s3fs  # noqa: F401  (imported by the first S3 store otherwise)

from recpoint.catalog.store import store


async def _make_a_client() -> None:
    """Without connecting it to anything."""
    async with store._session({}).create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url="http://127.0.0.1:1",
        aws_access_key_id="none",
        aws_secret_access_key="none",
    ):
        pass


asyncio.run(_make_a_client())
# A collection in a forked process writes to each page that holds an object, which copies it.
gc.collect()
gc.freeze()
gc.enable()
