"""Parts of a flow's work through its task runner, some at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["each_part"]


async def each_part(submit: Callable[[int], Any], parts: Iterable[int], at_once: int) -> list[Any]:
    """What every part's task returns, in the order in which they end.

    Args:
        submit: a part's task to the flow's task runner; returns its future.
        parts: all of them.
        at_once: so many are in flight, since each takes memory.

    Raises:
        BaseException: of the first part that failed; nothing is at work any more.
    """
    waiting = list(parts)[::-1]
    results: list[Any] = []

    async def work() -> None:
        while waiting:
            # Prefect's types do not know that the result of a submitted async task is its value.
            future: Any = submit(waiting.pop())
            try:
                results.append(await asyncio.to_thread(future.result))
            except BaseException:
                waiting.clear()
                raise

    # All of them are waited for: nothing may be at work any more when a lease ends.
    ended = await asyncio.gather(*(work() for _ in range(at_once)), return_exceptions=True)
    for error in ended:
        if error is not None:
            raise error
    return results
