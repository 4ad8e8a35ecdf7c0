"""Chooses the task runner of flows whose parts may run elsewhere, and feeds it some at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, Final

from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from recpoint.errors import SettingsError
from recpoint.installation import install_command

__all__ = ["VARIABLE", "chosen_task_runner", "each_part", "task_runner_named"]


async def each_part(submit: Callable[[int], Any], parts: Iterable[int], at_once: int) -> list[Any]:
    """Run the tasks of all parts; return their results in the order in which the tasks end.

    Args:
        submit: submits a part's task to the flow's task runner; returns its future.
        parts: the numbers of all parts.
        at_once: how many tasks run at a time, because each takes memory.

    Raises:
        BaseException: of the first part that failed; all other tasks have ended by then.
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

    # Wait for all, because no task may still be at work when the caller's lease ends.
    ended = await asyncio.gather(*(work() for _ in range(at_once)), return_exceptions=True)
    for error in ended:
        if error is not None:
            raise error
    return results


#: `threads` (default), `dask`, `dask:ADDRESS`, or `module:name` of another task runner.
VARIABLE: Final = "RECPOINT_TASK_RUNNER"


def chosen_task_runner() -> TaskRunner[Any]:
    """Return the task runner named in the environment; called when a flow's module is imported.

    Raises:
        SettingsError: the task runner is not known, or not installed.
    """
    return task_runner_named(os.environ.get(VARIABLE) or "threads")


def task_runner_named(name: str) -> TaskRunner[Any]:
    """Return the task runner of a name.

    Args:
        name: `threads`: threads of this process. `dask`: a temporary cluster on this host, for one
            flow run. `dask:ADDRESS`, such as `dask:tcp://10.0.0.7:8786`: an existing cluster; its
            workers need recpoint installed, and credentials for the store. `module:name`, such as
            `prefect_ray:RayTaskRunner`: called without arguments.

    Raises:
        SettingsError: the task runner is not known, or not installed.
    """
    kind, _, arguments = name.partition(":")
    if name == "threads":
        return ThreadPoolTaskRunner()
    if kind == "dask":
        runner_class = _found(name, "prefect_dask", "DaskTaskRunner")
        runner = runner_class(address=arguments) if arguments else runner_class()
    else:
        runner = _found(name, kind, arguments)()
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
        next_step=install_command("dask") if dask else "install it, or correct the name",
    )
