"""Tables that a fused optimizer trained go on with the same optimizer of torch, and the other way.

A plan decides which: TorchRec's data-parallel tables, and those of a model without TorchRec, are
trained by an optimizer of torch, all others by the fused ones of FBGEMM. Three of these update the
rows that were looked up in the same way as one of torch. Between such a pair a checkpoint's tree
is rewritten, so that it is that of a run trained as the one here; row states have one name in both.

    fused, under the table       "sources": {name: [{table: {"optimizer", "iter", "lr", "eps", …}}]}
    torch, under the parameter   "optimizers": [{"class", "groups": [{"params", "lr", "eps", …}],
                                                 "state": {parameter: {"keys", "values", …}}}]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.restored_model import weight_name

__all__ = ["Trainers", "adopt", "lacks"]


class _Twin(NamedTuple):
    """An optimizer of torch that does what a fused one does.

    `keys`: what it has of a parameter, in its order.
    """

    name: str
    keys: tuple[str, ...] = ("step", "sum")


#: FBGEMM's names. Its Adam is none of them: the one of torch moves every row at each step.
_TWINS = {
    "exact_sgd": _Twin("torch.optim.sgd.SGD", ()),
    "exact_adagrad": _Twin("torch.optim.adagrad.Adagrad"),
    "exact_row_wise_adagrad": _Twin("torchrec.optim.rowwise_adagrad.RowWiseAdagrad"),
}
#: Fused, they do not exist, or pull on the rows that were looked up alone.
_OFF = ("momentum", "weight_decay", "lr_decay", "maximize")
#: Both have them, under these names.
_SHARED = ("lr", "eps")

_Tree = dict[str, Any]


class Trainers(NamedTuple):
    """What trains the tables of this process.

    Attributes:
        optimizers: those of torch, as `OptimizerState.capture` has them.
        fused: name of each source of tables -> its `state_dict`: of each fused table its state.
        tables: names of all tables that this process holds.
        elsewhere: names of those that other ranks hold, and this one does not.
    """

    optimizers: Sequence[Mapping[str, Any]]
    fused: Mapping[str, Mapping[str, Any]]
    tables: Collection[str]
    elsewhere: Collection[str]


def lacks(saved: _Tree, here: Trainers) -> bool:
    """Whether states of fused tables may be needed of ranks whose trees are not in `saved`."""
    fused_there, torch_there = _fused_there(saved), _groups(saved["optimizers"])
    trained = _groups(here.optimizers).keys() - torch_there.keys()
    return any(weight_name(table) in trained for table in set(here.tables) - fused_there.keys())


def adopt(saved: _Tree, here: Trainers) -> tuple[_Tree, list[str]]:
    """The tree as if its tables had been trained by what trains them here; why that is not so.

    Tables that are trained in one way on both sides stay as they are, and so does all else.

    Args:
        saved: as `rank_trees.tree_for` returned it; not changed.
        here: what trains the tables here.

    Returns:
        The tree, which shares tensors with `saved`, and one sentence for each table whose optimizer
        is another here. With such a sentence the tree is not to be restored.
    """
    fused_there = _fused_there(saved)
    torch_there = _groups(saved["optimizers"])
    torch_here = _groups(here.optimizers)
    found: list[str] = []

    leave = {weight_name(table) for table in here.elsewhere} & torch_there.keys()
    sources = dict(saved["sources"])
    for source, tables in here.fused.items():
        own = {}
        for table, state in tables.items():
            parameter = weight_name(table)
            if parameter in torch_there and table not in fused_there:
                leave.add(parameter)
                number, group = torch_there[parameter]
                optimizer = saved["optimizers"][number]
                found += _differences(table, state, optimizer, group, fused="here", torch="there")
                entry = optimizer["state"].get(parameter, {"values": {}})
                own[table] = _fused_state(state, group, entry)
        if own or (source not in sources and not tables):
            sources[source] = [*sources.get(source, ()), own]

    fused_here = {table for tables in here.fused.values() for table in tables}
    enter: dict[str, Mapping[str, Any]] = {}
    for table in set(here.tables) & fused_there.keys() - fused_here:
        parameter, state = weight_name(table), fused_there[table]
        if parameter not in torch_here:
            found.append(
                f"table {table!r} is trained by the fused {state['optimizer']} in the checkpoint, "
                "and by no optimizer here"
            )
        elif parameter not in torch_there:
            enter[parameter] = state
            number, group = torch_here[parameter]
            optimizer = here.optimizers[number]
            found += _differences(table, state, optimizer, group, fused="there", torch="here")
    for source in sources.keys() - here.fused.keys():
        if all(weight_name(table) in enter for one in sources[source] for table in one):
            del sources[source]  # none of its tables is left

    if leave or enter:
        optimizers = list(_merged(saved["optimizers"], here.optimizers, leave, enter))
        found += _other_rates(optimizers, enter)
        saved = {**saved, "optimizers": optimizers}
    return {**saved, "sources": sources}, found


def _fused_there(saved: _Tree) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for states in saved["sources"].values():
        for one in states:
            for table, state in one.items():
                if (state["iter"] or 0) >= (found.get(table, state)["iter"] or 0):
                    found[table] = state
    return found


def _groups(optimizers: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, Mapping[str, Any]]]:
    return {
        name: (number, group)
        for number, one in enumerate(optimizers)
        for group in one["groups"]
        for name in group["params"]
    }


def _differences(
    table: str,
    state: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    group: Mapping[str, Any],
    *,
    fused: str,
    torch: str,
) -> list[str]:
    where = {"here": "here", "there": "in the checkpoint"}
    twin = _TWINS.get(state["optimizer"])
    both = (
        f"table {table!r} is trained by the fused {state['optimizer']} {where[fused]} and by "
        f"{optimizer['class']} {where[torch]}"
    )
    if twin is None or optimizer["class"] != twin.name:
        expected = "no optimizer of torch" if twin is None else f"only {twin.name}"
        return [f"{both}; {expected} does the same"]
    acting = [name for name in _OFF if _acts(group.get(name, 0))]
    if _acts(state["weight_decay"]):
        acting.append("a fused weight_decay")
    return [f"{both}, with {name}: updates differ" for name in acting]


def _acts(hyperparameter: Any) -> bool:
    return bool(hyperparameter != 0)


def _fused_state(
    here: Mapping[str, Any], group: Mapping[str, Any], entry: Mapping[str, Any]
) -> _Tree:
    """As `fbgemm.Kernel.state` has it; what torch does not know is as it is here."""
    rate = float(group["lr"])
    steps = entry["values"].get("step")
    return {
        **here,
        "iter": here["iter"] if steps is None else int(steps),
        "lr": rate,
        "group_lr": rate,
        "eps": float(group.get("eps", here["eps"])),
    }


def _merged(
    there: Sequence[Mapping[str, Any]],
    here: Sequence[Mapping[str, Any]],
    leave: Collection[str],
    enter: Mapping[str, Mapping[str, Any]],
) -> Iterator[_Tree]:
    """The optimizers there without the parameters of `leave`, and with those of `enter` where they
    are here. Those that train no other are taken out, and put in as they are here."""
    stored = iter([_without(one, leave) for one in there if not _only(one["groups"], leave)])
    for one in here:
        entries = {
            name: _entry(enter[name]) for group in one["groups"] for name in group["params"]
            if name in enter
        }  # fmt: skip
        if _only(one["groups"], enter):
            groups: list[Mapping[str, Any]] = [_rated(group, enter) for group in one["groups"]]
            yield {**one, "groups": groups, "state": entries, "other": {}}
            continue
        base = next(stored, None)
        if base is None:
            return  # their numbers differ, which is told elsewhere
        groups = list(_merged_groups(base["groups"], one["groups"], enter))
        yield {**base, "groups": groups, "state": base["state"] | entries}
    yield from stored


def _only(groups: Sequence[Mapping[str, Any]], names: Collection[str]) -> bool:
    """Whether they train nothing but these."""
    parameters = [name for group in groups for name in group["params"]]
    return bool(parameters) and all(name in names for name in parameters)


def _without(optimizer: Mapping[str, Any], leave: Collection[str]) -> _Tree:
    groups = [
        {**group, "params": [name for name in group["params"] if name not in leave]}
        for group in optimizer["groups"]
        if not _only([group], leave)
    ]
    state = {name: entry for name, entry in optimizer["state"].items() if name not in leave}
    return {**optimizer, "groups": groups, "state": state}


def _merged_groups(
    there: Sequence[Mapping[str, Any]],
    here: Sequence[Mapping[str, Any]],
    enter: Mapping[str, Mapping[str, Any]],
) -> Iterator[Mapping[str, Any]]:
    stored = iter(there)
    for group in here:
        if _only([group], enter):
            yield _rated(group, enter)
            continue
        base = next(stored, None)
        if base is None:
            return
        others = [name for name in group["params"] if name not in enter]
        yield {**base, "params": group["params"]} if base["params"] == others else base
    yield from stored


def _rated(group: Mapping[str, Any], enter: Mapping[str, Mapping[str, Any]]) -> _Tree:
    """A group of such tables alone, with the hyperparameters that they had."""
    state = enter[group["params"][0]]
    found = dict(group)
    for name in _SHARED:
        if name in group:
            current = group[name]
            value = _shared(state, name)
            found[name] = torch.full_like(current, value) if isinstance(current, Tensor) else value
    return found


def _shared(state: Mapping[str, Any], name: str) -> float:
    # FBGEMM keeps the rate in float32: where it is the one that was given, that one.
    if name == "lr" and _same(state["lr"], state["group_lr"]):
        return float(state["group_lr"])
    return float(state[name])


def _same(one: float, other: float) -> bool:
    return torch.tensor(one).item() == torch.tensor(other).item()


def _entry(state: Mapping[str, Any]) -> _Tree:
    """As `OptimizerState.capture` has it; the sums come with the rows."""
    keys = _TWINS[state["optimizer"]].keys if state["optimizer"] in _TWINS else ()
    steps = torch.tensor(float(state["iter"] or 0))
    values = {"step": steps} if "step" in keys else {}
    return {"keys": list(keys), "values": values, "on_host": ["step"]}


def _other_rates(
    optimizers: Sequence[Mapping[str, Any]], enter: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Tables that share a group with what has other hyperparameters."""
    return [
        f"{parameter!r} was trained with {name}={_shared(state, name):g} in the checkpoint, and "
        f"its group has {float(group[name]):g}: give it a group of its own"
        for parameter, (_, group) in _groups(optimizers).items()
        if (state := enter.get(parameter)) is not None
        for name in _SHARED
        if name in group and not _same(float(group[name]), _shared(state, name))
    ]
