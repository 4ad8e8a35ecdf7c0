"""Rewrites a state tree for tables that another kind of optimizer trains here: fused or torch's.

The sharding plan decides which kind trains a table. A torch optimizer trains TorchRec's
data-parallel tables, tables of its compute kernel `dense`, and tables of a model without TorchRec;
the table is then in the parameter groups of the ranks that hold it. FBGEMM's fused optimizers train
all other tables. Three of the fused optimizers update looked-up rows in the same way as a torch
optimizer. Therefore a tree is rewritten before it is restored, as if its tables had been held and
trained as they are here. Row states have the same names in both kinds.

    fused, under the table       "sources": {"torchrec": [{table: {"optimizer", "lr", "eps", …}}]}
    torch, under the parameter   "optimizers": [{"class", "groups": [{"params", "lr", "eps", …}],
                                                 "state": {parameter: {"keys", "values", …}}}]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.restore.restore import weight_name
from recpoint.trainer_plugin import mismatches
from recpoint.trainer_plugin.mismatches import Mismatch

__all__ = ["TableOptimizers", "adopt", "lacks", "same_rate"]


#: The source whose fused optimizers are known here.
_SOURCE: Final = "torchrec"


class _Twin(NamedTuple):
    """A torch optimizer that does the same as a fused one.

    Attributes:
        name: full name of its class.
        keys: names of its state of a parameter, in its order.
    """

    name: str
    keys: tuple[str, ...] = ("step", "sum")


#: FBGEMM's name of a fused optimizer -> its twin. Adam has none: torch's moves every row.
_TWINS = {
    "exact_sgd": _Twin("torch.optim.sgd.SGD", ()),
    "exact_adagrad": _Twin("torch.optim.adagrad.Adagrad"),
    "exact_row_wise_adagrad": _Twin("torchrec.optim.rowwise_adagrad.RowWiseAdagrad"),
}
#: Hyperparameters of torch that a fused optimizer lacks, or applies only to rows looked up.
_TORCH_ONLY = ("momentum", "weight_decay", "lr_decay", "maximize")
#: Hyperparameters of fused optimizers that torch lacks, or applies to all rows.
_FUSED_ONLY = ("weight_decay", "max_gradient", "max_norm")
#: Hyperparameters that both have, under these names.
_SHARED = ("lr", "eps")

_Tree = dict[str, Any]


class TableOptimizers(NamedTuple):
    """The optimizers that train the tables of this process.

    Attributes:
        optimizers: the torch optimizers, as `OptimizerState.capture` returns them.
        fused: name of each source of tables -> its `state_dict`.
        tables: names of all tables that this process holds.
        elsewhere: names of tables that only other ranks hold.
    """

    optimizers: Sequence[Mapping[str, Any]]
    fused: Mapping[str, Any]
    tables: Collection[str]
    elsewhere: Collection[str]


class _TrainingGroup(NamedTuple):
    """The torch optimizer that trains a parameter, and the parameter's group in it."""

    optimizer: Mapping[str, Any]
    group: Mapping[str, Any]

    def entry(self, parameter: str) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self.optimizer["state"].get(
            parameter, {"keys": [], "values": {}, "on_host": []}
        )
        return state


class _Arrival(NamedTuple):
    """A parameter that is new to a torch optimizer: its hyperparameters and its state."""

    settings: Mapping[str, Any]
    entry: Mapping[str, Any]


class _There:
    """The optimizers that trained the checkpoint's tables, on all ranks whose trees are known."""

    def __init__(self, saved: _Tree) -> None:
        self.fused: dict[str, Mapping[str, Any]] = {}
        for states in saved["sources"].get(_SOURCE, ()):
            for table, state in states.items():
                if (state["iter"] or 0) >= (self.fused.get(table, state)["iter"] or 0):
                    self.fused[table] = state
        self.own = _trained(saved["optimizers"])
        self.all: dict[str, _TrainingGroup] = {}
        for optimizers in saved["other_optimizers"]:
            # The tree of the lowest rank holds the state that all ranks share, so it has priority.
            self.all = _trained(optimizers) | self.all
        self.all |= self.own


def lacks(saved: _Tree, own_tables: TableOptimizers) -> bool:
    """Whether trees of more ranks than `saved` holds may say what trained a table."""
    saved_state = _There(saved)
    trained = _trained(own_tables.optimizers).keys() | {
        weight_name(table) for table in own_tables.fused.get(_SOURCE, ())
    }
    unknown = {weight_name(table) for table in set(own_tables.tables) - saved_state.fused.keys()}
    return bool(unknown & trained - saved_state.all.keys())


def adopt(saved: _Tree, own_tables: TableOptimizers) -> tuple[_Tree, list[Mismatch]]:
    """Rewrite a tree as if the optimizers here had trained its tables.

    Tables that the same kind of optimizer trains on both sides do not change, and neither does the
    rest of the tree.

    Args:
        saved: as `model.tree_for` returned it; not changed.
        own_tables: the optimizers that train the tables here.

    Returns:
        The tree, which shares tensors with `saved`, and a mismatch for each table whose optimizer
        here does something else. If there is a mismatch, the tree must not be restored.
    """
    saved_state = _There(saved)
    trained_here, fused_here = (
        _trained(own_tables.optimizers),
        dict(own_tables.fused.get(_SOURCE, {})),
    )
    removed_names = {
        weight_name(table) for table in {*own_tables.elsewhere, *fused_here}
    } & saved_state.own.keys()
    differences: list[Mismatch] = []

    states: dict[str, Any] = {}
    for table, state in fused_here.items():
        trained = saved_state.all.get(weight_name(table))
        if trained is not None and table not in saved_state.fused:
            differences += _differences(
                table, state, trained, fused="here", torch="in the checkpoint"
            )
            states[table] = _fused_state(state, trained, weight_name(table))

    arrivals: dict[str, _Arrival] = {}
    for table in sorted(set(own_tables.tables) - fused_here.keys()):
        parameter, fused = weight_name(table), saved_state.fused.get(table)
        trained, now = saved_state.all.get(parameter), trained_here.get(parameter)
        if now is None:
            if fused is not None:
                text = (
                    f"table {table!r} is trained by the fused {fused['optimizer']} in the "
                    "checkpoint and by no optimizer here"
                )
                differences.append(Mismatch(text, mismatches.OTHER_UPDATE))
        elif fused is not None:
            differences += _differences(table, fused, now, fused="in the checkpoint", torch="here")
            steps = int(saved["batches_done"])
            arrivals[parameter] = _Arrival(_torch_settings(fused), _torch_entry(fused, steps))
        elif trained is not None and parameter not in saved_state.own:
            if now.optimizer["class"] != trained.optimizer["class"]:
                text = (
                    f"table {table!r} is trained by {now.optimizer['class']} here and by "
                    f"{trained.optimizer['class']} in the checkpoint"
                )
                differences.append(Mismatch(text, mismatches.OPTIMIZER_CLASS))
            settings = {name: value for name, value in trained.group.items() if name != "params"}
            arrivals[parameter] = _Arrival(settings, trained.entry(parameter))

    if removed_names or arrivals:
        optimizers = list(
            _merged(saved["optimizers"], own_tables.optimizers, removed_names, arrivals)
        )
        differences += _other_settings(optimizers, arrivals)
        saved = {**saved, "optimizers": optimizers}
    return {
        **saved,
        "sources": _sources(saved["sources"], own_tables, states, arrivals),
    }, differences


def _sources(
    stored: Mapping[str, list[Any]],
    own_tables: TableOptimizers,
    states: Mapping[str, Any],
    arrivals: Mapping[str, _Arrival],
) -> dict[str, list[Any]]:
    """Return the states of all sources, adding `states` of tables that torch trained there."""
    sources = dict(stored)
    if _SOURCE in own_tables.fused:
        if states or (_SOURCE not in sources and not own_tables.fused[_SOURCE]):
            sources[_SOURCE] = [*sources.get(_SOURCE, ()), dict(states)]
    elif all(
        weight_name(table) in arrivals
        for states_of_source in sources.get(_SOURCE, ())
        for table in states_of_source
    ):
        sources.pop(_SOURCE, None)  # the model here is plain, and torch trains all its tables
    return sources


def same_rate(rate: float, other_rate: float) -> bool:
    """Whether two hyperparameters are equal in float32, the dtype in which FBGEMM keeps some."""
    rates = torch.tensor([rate, other_rate], dtype=torch.float32, device="cpu")
    return bool(rates[0] == rates[1])


def _trained(optimizers: Sequence[Mapping[str, Any]]) -> dict[str, _TrainingGroup]:
    return {
        name: _TrainingGroup(optimizer, group)
        for optimizer in optimizers
        for group in optimizer["groups"]
        for name in group["params"]
    }


def _differences(
    table: str, state: Mapping[str, Any], trained: _TrainingGroup, *, fused: str, torch: str
) -> list[Mismatch]:
    twin, kind = _TWINS.get(state["optimizer"]), trained.optimizer["class"]
    both_updates = (
        f"table {table!r} is trained by the fused {state['optimizer']} {fused} and by {kind} "
        f"{torch}"
    )
    if twin is None or kind != twin.name:
        expected = "no optimizer of torch" if twin is None else f"only {twin.name}"
        return [Mismatch(f"{both_updates}; {expected} does the same", mismatches.OTHER_UPDATE)]
    acting = [name for name in _TORCH_ONLY if _acts(trained.group.get(name, 0))]
    acting += [f"a fused {name}" for name in _FUSED_ONLY if _acts(state.get(name, 0))]
    return [
        Mismatch(f"{both_updates}, with {name}: updates differ", mismatches.OTHER_UPDATE)
        for name in acting
    ]


def _acts(hyperparameter: Any) -> bool:
    return bool(hyperparameter != 0)


def _fused_state(own_state: Mapping[str, Any], trained: _TrainingGroup, parameter: str) -> _Tree:
    """Return a fused state like `fbgemm.Kernel.state`; what torch does not store is kept."""
    rate = float(trained.group["lr"])
    steps = trained.entry(parameter)["values"].get("step")
    return {
        **own_state,
        "iter": own_state["iter"] if steps is None else int(steps),
        "lr": rate,
        "group_lr": rate,
        "eps": float(trained.group.get("eps", own_state["eps"])),
    }


def _torch_settings(state: Mapping[str, Any]) -> dict[str, float]:
    # FBGEMM keeps the rate in float32. If it is the given rate, use that one, which is exact.
    is_scheduled = same_rate(state["lr"], state["group_lr"])
    return {"lr": state["group_lr"] if is_scheduled else state["lr"], "eps": state["eps"]}


def _torch_entry(state: Mapping[str, Any], steps: int) -> _Tree:
    """Return a state entry like `OptimizerState.capture`, without sums, which come with the rows.

    FBGEMM counts steps only for Adam. `steps` replaces the count; torch uses it only if the
    learning rate decays.
    """
    keys = _TWINS[state["optimizer"]].keys if state["optimizer"] in _TWINS else ()
    # The dtype in which torch's optimizers count steps.
    dtype = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
    step = torch.tensor(float(steps), dtype=dtype, device="cpu")
    values = {"step": step} if "step" in keys else {}
    return {"keys": list(keys), "values": values, "on_host": ["step"]}


def _merged(
    there: Sequence[Mapping[str, Any]],
    live: Sequence[Mapping[str, Any]],
    removed_names: Collection[str],
    arrivals: Mapping[str, _Arrival],
) -> Iterator[_Tree]:
    """Yield the checkpoint's optimizers without `removed_names`, with `arrivals` in their places.

    If all other parameters are in the same groups on both sides, groups stay in their places: ranks
    that build their optimizers alike may have empty groups. Otherwise, groups and optimizers that
    train only parameters of `removed_names` are taken out, and those that train only `arrivals` are
    put in as they are here.
    """
    if _same_places(there, live, removed_names, arrivals):
        for stored_optimizer, optimizer in zip(there, live, strict=True):
            pairs = zip(stored_optimizer["groups"], optimizer["groups"], strict=True)
            yield {
                **stored_optimizer,
                "groups": [
                    _as_arrived(group, arrivals)
                    if _only([group], arrivals)
                    else {**stored_group, "params": group["params"]}
                    for stored_group, group in pairs
                ],
                "state": _state_without(stored_optimizer, removed_names)
                | _entries(optimizer, arrivals),
            }
        return
    stored = iter(
        [
            _without(optimizer, removed_names)
            for optimizer in there
            if not _only(optimizer["groups"], removed_names)
        ]
    )
    for optimizer in live:
        entries = _entries(optimizer, arrivals)
        if _only(optimizer["groups"], arrivals):
            groups: list[Mapping[str, Any]] = [
                _as_arrived(g, arrivals) for g in optimizer["groups"]
            ]
            yield {**optimizer, "groups": groups, "state": entries, "other": {}}
            continue
        base = next(stored, None)
        if base is None:
            return  # the numbers of optimizers differ, which `OptimizerState` reports
        groups = list(_merged_groups(base["groups"], optimizer["groups"], arrivals))
        yield {**base, "groups": groups, "state": base["state"] | entries}
    yield from stored


def _same_places(
    stored: Sequence[Mapping[str, Any]],
    live: Sequence[Mapping[str, Any]],
    removed_names: Collection[str],
    arrivals: Collection[str],
) -> bool:
    """Whether groups train the same parameters, apart from `removed_names` and `arrivals`."""

    def places(optimizers: Sequence[Mapping[str, Any]], but: Collection[str]) -> object:
        return [
            (
                optimizer["class"],
                [
                    [name for name in group["params"] if name not in but]
                    for group in optimizer["groups"]
                ],
            )
            for optimizer in optimizers
        ]

    return places(stored, removed_names) == places(live, arrivals)


def _entries(
    optimizer: Mapping[str, Any], arrivals: Mapping[str, _Arrival]
) -> dict[str, Mapping[str, Any]]:
    names = [name for group in optimizer["groups"] for name in group["params"]]
    return {name: arrivals[name].entry for name in names if name in arrivals}


def _state_without(optimizer: Mapping[str, Any], removed_names: Collection[str]) -> dict[str, Any]:
    return {name: entry for name, entry in optimizer["state"].items() if name not in removed_names}


def _only(groups: Sequence[Mapping[str, Any]], names: Collection[str]) -> bool:
    """Whether the groups train some of these parameters and no others."""
    parameters = [name for group in groups for name in group["params"]]
    return bool(parameters) and all(name in names for name in parameters)


def _without(optimizer: Mapping[str, Any], removed_names: Collection[str]) -> _Tree:
    groups = [
        {**group, "params": [name for name in group["params"] if name not in removed_names]}
        for group in optimizer["groups"]
        if not _only([group], removed_names)
    ]
    return {**optimizer, "groups": groups, "state": _state_without(optimizer, removed_names)}


def _merged_groups(
    there: Sequence[Mapping[str, Any]],
    live: Sequence[Mapping[str, Any]],
    arrivals: Mapping[str, _Arrival],
) -> Iterator[Mapping[str, Any]]:
    stored = iter(there)
    for group in live:
        if _only([group], arrivals):
            yield _as_arrived(group, arrivals)
            continue
        base = next(stored, None)
        if base is None:
            return
        other_names = [name for name in group["params"] if name not in arrivals]
        yield {**base, "params": group["params"]} if base["params"] == other_names else base
    yield from stored


def _as_arrived(group: Mapping[str, Any], arrivals: Mapping[str, _Arrival]) -> _Tree:
    """Return a group that trains only arrivals, with the hyperparameters that they had."""
    arrived = dict(group)
    for name, value in arrivals[group["params"][0]].settings.items():
        if name in group:
            current = group[name]
            tensor = isinstance(current, Tensor) and not isinstance(value, Tensor)
            arrived[name] = torch.full_like(current, value) if tensor else value
    return arrived


def _other_settings(
    optimizers: Sequence[Mapping[str, Any]], arrivals: Mapping[str, _Arrival]
) -> list[Mismatch]:
    """Return a mismatch for each arrival whose group here has another hyperparameter."""
    return [
        Mismatch(
            f"{parameter!r} was trained with {name}={value} in the checkpoint, and its group has "
            f"{trained.group[name]}",
            mismatches.OWN_GROUP,
        )
        for parameter, trained in _trained(optimizers).items()
        if parameter in arrivals
        for name, value in arrivals[parameter].settings.items()
        if name in trained.group and not _equal(trained.group[name], value)
    ]


def _equal(value: Any, other_value: Any) -> bool:
    number = (int, float, Tensor)
    if isinstance(value, number) and isinstance(other_value, number):
        return same_rate(float(value), float(other_value))
    return bool(value == other_value)
