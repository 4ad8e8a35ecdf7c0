"""Asks a real Prefect server by HTTP, and asks again while the server is busy."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from tests.polling import until

__all__ = ["ask"]

#: The longest pause before a server that is starting or stopped is asked again.
_ANSWER_SECONDS = 60.0


def ask(url: str, body: Mapping[str, object] | Sequence[object] | None = None) -> Any:
    """Return the API's answer at `url`, None if it is empty.

    Without a body, the request is a GET, else a POST.

    A busy server on SQLite answers 503, or not at all for a while. Then this asks again, as
    Prefect's own client does, so a request must do no harm if it is sent twice.

    Raises:
        urllib.error.HTTPError: the server answers with any other error.
    """
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )

    def answered() -> list[Any] | None:
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
                body = answer.read()
                return [json.loads(body) if body else None]
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            error.close()
            return None
        except TimeoutError:
            return None

    (document,) = until(answered)
    return document
