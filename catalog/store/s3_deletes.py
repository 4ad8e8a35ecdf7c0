"""Removes many objects of an S3 bucket with requests about up to 1,000 of them (DeleteObjects).

The answer to such a request is a success even if some objects could not be removed. It says so for
each of them, in codes without an HTTP status, and the client below repeats none of that. So the
requests are made here, a request at a time, and repeated for the objects that may still go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from recpoint.catalog.store.contract import for_answer, for_no_answer
from recpoint.errors import ObjectNotFound, StoreError

__all__ = ["KEYS_OF_A_REQUEST", "ManyRefused", "delete_in_requests", "is_refusal"]

#: The most keys that S3 takes in one request.
KEYS_OF_A_REQUEST: Final = 1_000

_FIRST_PAUSE_SECONDS: Final = 0.2

#: The HTTP status that S3 gives these codes when they answer a request about one object.
_STATUS: Final = {
    "AccessDenied": 403,
    "InternalError": 500,
    "MethodNotAllowed": 405,
    "NoSuchKey": 404,
    "NoSuchVersion": 404,
    "NotImplemented": 501,
    "OperationAborted": 409,
    "ServiceUnavailable": 503,
    "SlowDown": 503,
}
_NOT_KNOWN: Final = 400

#: HTTP status of stores that know no requests about many objects, or want them in another form.
_REFUSALS: Final = frozenset({400, 404, 405, 411, 501})


class ManyRefused(Exception):
    """The store takes no request about many objects; the request has removed nothing."""


def is_refusal(status: int, error: StoreError) -> bool:
    """Tell whether an error may mean that a store takes no requests about many objects.

    Args:
        status: the HTTP status of the answer.
        error: what a request about one object would mean by this answer.
    """
    return status in _REFUSALS and not error.retryable


def delete_in_requests(
    keys: Sequence[str],
    *,
    send: Callable[[Sequence[str]], Mapping[str, Any]],
    attempts: int,
    url: str,
    bucket: str,
) -> Iterator[tuple[str, ...]]:
    """Remove the objects; yield after each request the keys that it removed, maybe none.

    A request is made only when its turn is asked for; what was not asked for stays.

    Args:
        keys: of the objects, without the prefix of the run.
        send: makes one request about so many keys, and returns the answer with the same keys.
        attempts: how often a request names an object whose removal may still succeed.
        url: the run URL, for errors.
        bucket: the bucket's name.

    Raises:
        StoreError: objects could not be removed; the error says how many, and names some.
        ManyRefused: as `send` raises it.
    """
    for first in range(0, len(keys), KEYS_OF_A_REQUEST):
        remaining = keys[first : first + KEYS_OF_A_REQUEST]
        for attempt in range(1, attempts + 1):
            errors = _errors(remaining, send(remaining), url, bucket)
            removed = tuple(key for key in remaining if key not in errors)
            again = attempt < attempts and all(error.retryable for error in errors.values())
            if errors and again:
                # Before the yield, because a caller may look at a clock before it asks for more.
                time.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
            yield removed
            remaining = list(errors)
            if not errors:
                break
            if not again:
                raise _joined(errors)


def _errors(
    keys: Sequence[str], answer: Mapping[str, Any], url: str, bucket: str
) -> dict[str, StoreError]:
    """Return the error of each object that the answer does not say is gone."""
    removed = {entry.get("Key") for entry in answer.get("Deleted", ())}
    failures = {entry.get("Key"): entry for entry in answer.get("Errors", ())}
    errors: dict[str, StoreError] = {}
    for key in keys:
        if (failure := failures.get(key)) is not None:
            code = str(failure.get("Code", ""))
            error = for_answer(
                f"{url}/{key}",
                status=_STATUS.get(code, _NOT_KNOWN),
                code=code,
                message=str(failure.get("Message", "")),
                doing="deleting, with others",
                bucket=bucket,
            )
            if not isinstance(error, ObjectNotFound):  # gone, as asked
                errors[key] = error
        elif key not in removed:
            errors[key] = for_no_answer(
                f"{url}/{key}",
                words="an answer that does not name this object",
                doing="deleting, with others",
                endpoint=url,
            )
    return errors


_NAMED: Final = 3


def _joined(errors: Mapping[str, StoreError]) -> StoreError:
    """Return one error for all; a final one, if there is one, because no later try heals it."""
    first = min(errors.values(), key=lambda error: error.retryable)
    if len(errors) == 1:
        return first
    keys = ", ".join(list(errors)[:_NAMED])
    more = f" and {len(errors) - _NAMED} more" if len(errors) > _NAMED else ""
    joined = type(first)(
        first.subject,
        found=f"{first.found}; {len(errors)} objects stay: {keys}{more}",
        expected=first.expected,
        next_step=first.next_step,
    )
    joined.refused = first.refused
    return joined
