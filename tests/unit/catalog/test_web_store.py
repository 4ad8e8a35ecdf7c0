"""A store that is read over plain HTTP: what is not there, and what cannot be asked."""

from __future__ import annotations

import pytest

from recpoint.catalog.store.store import open_store
from recpoint.errors import StoreUnavailable, StoreUnsupported


def test_a_server_that_does_not_answer_is_no_missing_object() -> None:
    # Port 80 of an address of this host that nothing serves.
    store = open_store("http://127.93.17.5/run")
    with pytest.raises(StoreUnavailable, match="while looking at"):
        store.size("run.json")


def test_no_run_is_begun_on_a_web_server() -> None:
    store = open_store("https://bucket.s3.example/run")
    with pytest.raises(StoreUnsupported, match="a web server, .* AWS_ENDPOINT_URL"):
        store.probe()
