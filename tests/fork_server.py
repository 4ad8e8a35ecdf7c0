"""Does once, as the last import of the server of `tests.forked`, what each process would repeat.

For its first S3 client, the SDK imports some 190 modules and parses megabytes of JSON. That takes
longer than all other work of a test's process. `catalog.store.store` keeps the parsed data.
"""

from __future__ import annotations

import asyncio
import gc

import s3fs  # noqa: F401  (otherwise the first S3 store would import it)

from recpoint.catalog.store import store


async def _make_a_client() -> None:
    """Make an S3 client, without connecting it."""
    async with store._session({}).create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url="http://127.0.0.1:1",
        aws_access_key_id="none",
        aws_secret_access_key="none",
    ):
        pass


asyncio.run(_make_a_client())
# A garbage collection in a forked process would write to each page with an object, and so copy it.
gc.collect()
gc.freeze()
gc.enable()
