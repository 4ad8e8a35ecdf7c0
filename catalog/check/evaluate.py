"""Evaluates a checkpoint by a user's function of the restored model, and records its metrics."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, model_tensors, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import EvaluationFailed, SettingsError
from recpoint.format.naming import ManifestName, is_label
from recpoint.format.record_kinds import METRIC
from recpoint.format.records import CheckpointRef
from recpoint.format.retention_records import Metric

__all__ = ["evaluate", "load_function", "record_metrics"]


_NEXT = "correct the function; it gets a dict of tensors, as Module.load_state_dict takes it"


def load_function(name: str) -> Callable[[dict[str, Any]], object]:
    """Import the function that `module:function` names.

    Raises:
        SettingsError: there is no such function, or its module cannot be imported.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise _no_function(name, "no module and function with a `:` between them")
    try:
        evaluation = getattr(importlib.import_module(module), function)
    except Exception as error:  # importing runs the user's code
        raise _no_function(name, f"{type(error).__name__}: {error}") from error
    if not callable(evaluation):
        raise _no_function(name, f"a {type(evaluation).__name__}, which cannot be called")
    loaded: Callable[[dict[str, Any]], object] = evaluation
    return loaded


def evaluate(
    run: Run,
    name: ManifestName,
    function: Callable[[dict[str, Any]], object],
    *,
    function_name: str,
    leased: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Restore a checkpoint into memory, and call `function` with the model's state.

    Args:
        run: the run.
        name: the checkpoint; all of it has to fit in memory.
        function: gets tables, dense parameters and buffers by their names in the model, on the
            CPU; returns a number, or a dict of numbers by name.
        function_name: `module:function`; the function's name is the metric's if it returns one
            number.
        leased, on_progress: as for `restore`.

    Returns:
        The metrics by name.

    Raises:
        EvaluationFailed: the function raised, or did not return finite numbers.
        RecpointError: as for `restore`.
    """
    target = MemoryTarget()
    restore(run, target, Selection.of(name), leased=leased, on_progress=on_progress)
    try:
        returned = function(model_tensors(target))
    except Exception as error:
        # An error in the user's code says nothing about the checkpoint.
        failure = f"{type(error).__name__}: {error}"
        raise EvaluationFailed(
            function_name, found=failure[:500], expected="metrics", next_step=_NEXT
        ) from error
    named = (
        returned if isinstance(returned, Mapping) else {function_name.rpartition(":")[2]: returned}
    )
    return {_name(function_name, key): _number(function_name, key, v) for key, v in named.items()}


def record_metrics(run: Run, checkpoint: CheckpointRef, metrics: Mapping[str, float]) -> None:
    """Store metrics of a checkpoint; each replaces an earlier metric of the same name.

    Raises:
        StoreError: the store refuses, or cannot be reached.
    """
    for name, value in sorted(metrics.items()):
        record = Metric(
            run=run.id,
            checkpoint=checkpoint,
            name=name,
            value=value.hex(),
            created_ms=now_ms(),
        )
        run.records(METRIC).put(record, checkpoint.step, checkpoint.generation, name)


def _name(function_name: str, key: object) -> str:
    if not isinstance(key, str) or not is_label(key):
        raise EvaluationFailed(
            function_name,
            found=f"a metric called {key!r:.80}",
            expected="names of 1 to 64 of a-z, 0-9, _, ., -, the first a letter or digit",
            next_step=_NEXT,
        )
    return key


def _number(function_name: str, key: object, value: object) -> float:
    item = getattr(value, "item", None)  # a tensor or numpy scalar
    plain = item() if callable(item) and getattr(value, "ndim", None) == 0 else value
    if isinstance(plain, bool) or not isinstance(plain, Real) or not math.isfinite(plain):
        raise EvaluationFailed(
            function_name,
            found=f"{key} = {value!r:.80}",
            expected="a finite number",
            next_step=_NEXT,
        )
    return float(plain)


def _no_function(name: str, found: str) -> SettingsError:
    return SettingsError(
        f"evaluation function {name!r:.200}",
        found=found[:300],
        expected="MODULE:FUNCTION, as metrics:recall for `def recall(state)` in metrics.py, where "
        "Python finds it",
        next_step="recpoint validate URL --eval MODULE:FUNCTION, in the directory of that file or "
        "with PYTHONPATH naming it",
    )
