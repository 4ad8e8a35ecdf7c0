"""Chooses the task runner of flows whose parts may run elsewhere, and feeds it some at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, Final

from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from recpoint.errors import SettingsError

__all__ = ["VARIABLE", "chosen_task_runner", "each_part", "task_runner_named"]


# Parts of a flow's work through its task runner, some at a time.


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


# Which task runner flows use whose parts may run elsewhere: one setting.


#: `threads` (default), `dask`, `dask:ADDRESS`, or `module:name` of what makes another one.
VARIABLE: Final = "RECPOINT_TASK_RUNNER"


def chosen_task_runner() -> TaskRunner[Any]:
    """The task runner that the environment names, when a flow's module is imported.

    Raises:
        SettingsError: it is not known, or not installed.
    """
    return task_runner_named(os.environ.get(VARIABLE) or "threads")


def task_runner_named(name: str) -> TaskRunner[Any]:
    """The task runner of a name.

    Args:
        name: `threads`: of this process. `dask`: a cluster of the flow run's own on this host.
            `dask:ADDRESS`, such as `dask:tcp://10.0.0.7:8786`: a cluster that is there; its workers
            have recpoint installed, and reach the store with their own credentials. `module:name`:
            called without arguments, such as `prefect_ray:RayTaskRunner`.

    Raises:
        SettingsError: it is not known, or not installed.
    """
    kind, _, rest = name.partition(":")
    if name == "threads":
        return ThreadPoolTaskRunner()
    if kind == "dask":
        made = _found(name, "prefect_dask", "DaskTaskRunner")
        runner = made(address=rest) if rest else made()
    else:
        runner = _found(name, kind, rest)()
    if not isinstance(runner, TaskRunner):
        raise _refused(name, f"a {type(runner).__name__}")
    return runner


def _found(name: str, module: str, attribute: str) -> Any:
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise _refused(name, f"{name!r:.200}: {error}") from error


def _refused(name: str, found: str) -> SettingsError:
    dask = name.partition(":")[0] == "dask"
    return SettingsError(
        VARIABLE,
        found=found,
        expected="threads, dask, dask:ADDRESS, or module:name of a Prefect task runner",
        next_step="pip install 'recpoint[dask]'" if dask else "install it, or correct the name",
    )
