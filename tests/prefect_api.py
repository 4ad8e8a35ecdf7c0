"""Asking a real Prefect server by HTTP alone, as often as it takes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from tests.polling import until

__all__ = ["ask"]

#: A server that starts, or is stopped for a while, is asked again that soon.
_ANSWER_SECONDS = 60.0


def ask(url: str, body: Mapping[str, object] | Sequence[object] | None = None) -> Any:
    """What the API says at `url`, None for nothing; a GET without a body, else a POST.

    A server on SQLite that is busy says 503, or nothing for a while, and Prefect's own client asks
    again: so a question must do no harm when it is asked twice.

    Raises:
        urllib.error.HTTPError: it says anything else that is no answer.
    """
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )

    def answered() -> list[Any] | None:
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
                said = answer.read()
                return [json.loads(said) if said else None]
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            error.close()
            return None
        except TimeoutError:
            return None

    (said,) = until(answered)
    return said
