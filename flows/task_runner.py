"""Which task runner flows use whose parts may run elsewhere: one setting."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, Final

from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from recpoint.errors import SettingsError

__all__ = ["VARIABLE", "chosen_task_runner", "task_runner_named"]

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
