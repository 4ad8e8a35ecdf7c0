"""Tables go on with what trains them here: a fused optimizer, or one of torch on any rank.

A sharding plan decides which. TorchRec's data-parallel tables, those of its compute kernel `dense`,
and those of a model without TorchRec are trained by an optimizer of torch, in the groups of the
ranks that hold them; all others by the fused ones of FBGEMM. Three of these update the rows that
were looked up in the same way as one of torch does. So before a tree is restored, it is rewritten
to that of a run whose tables were held and trained as those here; row states have one name in all.

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

__all__ = ["Trainers", "adopt", "lacks", "same_rate"]


#: Whose fused optimizers are known here.
_SOURCE: Final = "torchrec"


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
#: In a fused optimizer they do not exist, or pull on the rows that were looked up alone.
_TORCH_ONLY = ("momentum", "weight_decay", "lr_decay", "maximize")
#: In one of torch they do not exist, or pull on all rows.
_FUSED_ONLY = ("weight_decay", "max_gradient", "max_norm")
#: Both have them, under these names.
_SHARED = ("lr", "eps")

_Tree = dict[str, Any]


class Trainers(NamedTuple):
    """What trains the tables of this process.

    Attributes:
        optimizers: those of torch, as `OptimizerState.capture` has them.
        fused: name of each source of tables -> its `state_dict`.
        tables: names of all tables that this process holds.
        elsewhere: names of those that other ranks hold, and this one does not.
    """

    optimizers: Sequence[Mapping[str, Any]]
    fused: Mapping[str, Any]
    tables: Collection[str]
    elsewhere: Collection[str]


class _Trained(NamedTuple):
    """A parameter of an optimizer of torch: of which, in which group, with which state."""

    optimizer: Mapping[str, Any]
    group: Mapping[str, Any]

    def entry(self, parameter: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.optimizer["state"].get(
            parameter, {"keys": [], "values": {}, "on_host": []}
        )
        return found


class _Arrival(NamedTuple):
    """A parameter that comes to an optimizer of torch: its hyperparameters, and its state."""

    settings: Mapping[str, Any]
    entry: Mapping[str, Any]


class _There:
    """What trained the tables of the checkpoint, on all ranks whose trees are known."""

    def __init__(self, saved: _Tree) -> None:
        self.fused: dict[str, Mapping[str, Any]] = {}
        for states in saved["sources"].get(_SOURCE, ()):
            for table, state in states.items():
                if (state["iter"] or 0) >= (self.fused.get(table, state)["iter"] or 0):
                    self.fused[table] = state
        self.own = _trained(saved["optimizers"])
        self.all: dict[str, _Trained] = {}
        for optimizers in saved["other_optimizers"]:
            # The state of what all ranks have is in the tree of the lowest.
            self.all = _trained(optimizers) | self.all
        self.all |= self.own


def lacks(saved: _Tree, here: Trainers) -> bool:
    """Whether it may be told by ranks whose trees are not in `saved` what trained a table."""
    there = _There(saved)
    trained = _trained(here.optimizers).keys() | {
        weight_name(table) for table in here.fused.get(_SOURCE, ())
    }
    unknown = {weight_name(table) for table in set(here.tables) - there.fused.keys()}
    return bool(unknown & trained - there.all.keys())


def adopt(saved: _Tree, here: Trainers) -> tuple[_Tree, list[str]]:
    """The tree as if its tables had been trained by what trains them here; why that is not so.

    Tables that are trained in one way on both sides stay as they are, and so does all else.

    Args:
        saved: as `model.tree_for` returned it; not changed.
        here: what trains the tables here.

    Returns:
        The tree, which shares tensors with `saved`, and one sentence for each table whose optimizer
        is another here. With such a sentence the tree is not to be restored.
    """
    there = _There(saved)
    own, fused_here = _trained(here.optimizers), dict(here.fused.get(_SOURCE, {}))
    gone = {weight_name(table) for table in {*here.elsewhere, *fused_here}} & there.own.keys()
    found: list[str] = []

    states: dict[str, Any] = {}
    for table, state in fused_here.items():
        trained = there.all.get(weight_name(table))
        if trained is not None and table not in there.fused:
            found += _differences(table, state, trained, fused="here", torch="in the checkpoint")
            states[table] = _fused_state(state, trained, weight_name(table))

    arrivals: dict[str, _Arrival] = {}
    for table in sorted(set(here.tables) - fused_here.keys()):
        parameter, fused = weight_name(table), there.fused.get(table)
        trained, now = there.all.get(parameter), own.get(parameter)
        if now is None:
            if fused is not None:
                found.append(
                    f"table {table!r} is trained by the fused {fused['optimizer']} in the "
                    "checkpoint, and by no optimizer here"
                )
        elif fused is not None:
            found += _differences(table, fused, now, fused="in the checkpoint", torch="here")
            steps = int(saved["batches_done"])
            arrivals[parameter] = _Arrival(_torch_settings(fused), _torch_entry(fused, steps))
        elif trained is not None and parameter not in there.own:
            if now.optimizer["class"] != trained.optimizer["class"]:
                found.append(
                    f"table {table!r} is trained by {now.optimizer['class']} here and by "
                    f"{trained.optimizer['class']} in the checkpoint"
                )
            settings = {name: value for name, value in trained.group.items() if name != "params"}
            arrivals[parameter] = _Arrival(settings, trained.entry(parameter))

    if gone or arrivals:
        optimizers = list(_merged(saved["optimizers"], here.optimizers, gone, arrivals))
        found += _other_settings(optimizers, arrivals)
        saved = {**saved, "optimizers": optimizers}
    return {**saved, "sources": _sources(saved["sources"], here, states, arrivals)}, found


def _sources(
    stored: Mapping[str, list[Any]],
    here: Trainers,
    states: Mapping[str, Any],
    arrivals: Mapping[str, _Arrival],
) -> dict[str, list[Any]]:
    """The states of all sources, with those of tables that torch trained there."""
    found = dict(stored)
    if _SOURCE in here.fused:
        if states or (_SOURCE not in found and not here.fused[_SOURCE]):
            found[_SOURCE] = [*found.get(_SOURCE, ()), dict(states)]
    elif all(weight_name(table) in arrivals for one in found.get(_SOURCE, ()) for table in one):
        found.pop(_SOURCE, None)  # the model here is a plain one, and none of its tables is left
    return found


def same_rate(one: float, other: float) -> bool:
    """Whether two hyperparameters are the same in float32, as FBGEMM keeps some."""
    rates = torch.tensor([one, other], dtype=torch.float32, device="cpu")
    return bool(rates[0] == rates[1])


def _trained(optimizers: Sequence[Mapping[str, Any]]) -> dict[str, _Trained]:
    return {
        name: _Trained(one, group)
        for one in optimizers
        for group in one["groups"]
        for name in group["params"]
    }


def _differences(
    table: str, state: Mapping[str, Any], trained: _Trained, *, fused: str, torch: str
) -> list[str]:
    twin, kind = _TWINS.get(state["optimizer"]), trained.optimizer["class"]
    both = (
        f"table {table!r} is trained by the fused {state['optimizer']} {fused} and by {kind} "
        f"{torch}"
    )
    if twin is None or kind != twin.name:
        expected = "no optimizer of torch" if twin is None else f"only {twin.name}"
        return [f"{both}; {expected} does the same"]
    acting = [name for name in _TORCH_ONLY if _acts(trained.group.get(name, 0))]
    acting += [f"a fused {name}" for name in _FUSED_ONLY if _acts(state.get(name, 0))]
    return [f"{both}, with {name}: updates differ" for name in acting]


def _acts(hyperparameter: Any) -> bool:
    return bool(hyperparameter != 0)


def _fused_state(here: Mapping[str, Any], trained: _Trained, parameter: str) -> _Tree:
    """As `fbgemm.Kernel.state` has it; what torch does not know is as it is here."""
    rate = float(trained.group["lr"])
    steps = trained.entry(parameter)["values"].get("step")
    return {
        **here,
        "iter": here["iter"] if steps is None else int(steps),
        "lr": rate,
        "group_lr": rate,
        "eps": float(trained.group.get("eps", here["eps"])),
    }


def _torch_settings(state: Mapping[str, Any]) -> dict[str, float]:
    # FBGEMM keeps the rate in float32: where it is the one that was given, that one.
    given = same_rate(state["lr"], state["group_lr"])
    return {"lr": state["group_lr"] if given else state["lr"], "eps": state["eps"]}


def _torch_entry(state: Mapping[str, Any], steps: int) -> _Tree:
    """As `OptimizerState.capture` has it; the sums come with the rows.

    FBGEMM counts batches for Adam only; without a decay of the rate torch counts them in vain.
    """
    keys = _TWINS[state["optimizer"]].keys if state["optimizer"] in _TWINS else ()
    # In the dtype that torch's optimizers count in.
    dtype = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
    step = torch.tensor(float(steps), dtype=dtype, device="cpu")
    values = {"step": step} if "step" in keys else {}
    return {"keys": list(keys), "values": values, "on_host": ["step"]}


def _merged(
    there: Sequence[Mapping[str, Any]],
    here: Sequence[Mapping[str, Any]],
    gone: Collection[str],
    arrivals: Mapping[str, _Arrival],
) -> Iterator[_Tree]:
    """The optimizers there without the parameters of `gone`, and with those of `arrivals` where
    they are here. Where the others are in the same places on both sides, places stay: ranks that
    build theirs alike have empty ones. Else those that train no other are taken out, and put in as
    they are here."""
    if _same_places(there, here, gone, arrivals):
        for same, one in zip(there, here, strict=True):
            pairs = zip(same["groups"], one["groups"], strict=True)
            yield {
                **same,
                "groups": [
                    _as_arrived(group, arrivals)
                    if _only([group], arrivals)
                    else {**stored_group, "params": group["params"]}
                    for stored_group, group in pairs
                ],
                "state": _state_without(same, gone) | _entries(one, arrivals),
            }
        return
    stored = iter([_without(one, gone) for one in there if not _only(one["groups"], gone)])
    for one in here:
        entries = _entries(one, arrivals)
        if _only(one["groups"], arrivals):
            groups: list[Mapping[str, Any]] = [_as_arrived(g, arrivals) for g in one["groups"]]
            yield {**one, "groups": groups, "state": entries, "other": {}}
            continue
        base = next(stored, None)
        if base is None:
            return  # their numbers differ, which is told elsewhere
        groups = list(_merged_groups(base["groups"], one["groups"], arrivals))
        yield {**base, "groups": groups, "state": base["state"] | entries}
    yield from stored


def _same_places(
    there: Sequence[Mapping[str, Any]],
    here: Sequence[Mapping[str, Any]],
    gone: Collection[str],
    arrivals: Collection[str],
) -> bool:
    """Whether every group trains the same, but for parameters that are gone or arrive."""

    def places(optimizers: Sequence[Mapping[str, Any]], but: Collection[str]) -> object:
        return [
            (
                one["class"],
                [[name for name in group["params"] if name not in but] for group in one["groups"]],
            )
            for one in optimizers
        ]

    return places(there, gone) == places(here, arrivals)


def _entries(
    optimizer: Mapping[str, Any], arrivals: Mapping[str, _Arrival]
) -> dict[str, Mapping[str, Any]]:
    names = [name for group in optimizer["groups"] for name in group["params"]]
    return {name: arrivals[name].entry for name in names if name in arrivals}


def _state_without(optimizer: Mapping[str, Any], gone: Collection[str]) -> dict[str, Any]:
    return {name: entry for name, entry in optimizer["state"].items() if name not in gone}


def _only(groups: Sequence[Mapping[str, Any]], names: Collection[str]) -> bool:
    """Whether they train nothing but these."""
    parameters = [name for group in groups for name in group["params"]]
    return bool(parameters) and all(name in names for name in parameters)


def _without(optimizer: Mapping[str, Any], gone: Collection[str]) -> _Tree:
    groups = [
        {**group, "params": [name for name in group["params"] if name not in gone]}
        for group in optimizer["groups"]
        if not _only([group], gone)
    ]
    return {**optimizer, "groups": groups, "state": _state_without(optimizer, gone)}


def _merged_groups(
    there: Sequence[Mapping[str, Any]],
    here: Sequence[Mapping[str, Any]],
    arrivals: Mapping[str, _Arrival],
) -> Iterator[Mapping[str, Any]]:
    stored = iter(there)
    for group in here:
        if _only([group], arrivals):
            yield _as_arrived(group, arrivals)
            continue
        base = next(stored, None)
        if base is None:
            return
        others = [name for name in group["params"] if name not in arrivals]
        yield {**base, "params": group["params"]} if base["params"] == others else base
    yield from stored


def _as_arrived(group: Mapping[str, Any], arrivals: Mapping[str, _Arrival]) -> _Tree:
    """A group of such tables alone, with the hyperparameters that they had."""
    found = dict(group)
    for name, value in arrivals[group["params"][0]].settings.items():
        if name in group:
            current = group[name]
            tensor = isinstance(current, Tensor) and not isinstance(value, Tensor)
            found[name] = torch.full_like(current, value) if tensor else value
    return found


def _other_settings(
    optimizers: Sequence[Mapping[str, Any]], arrivals: Mapping[str, _Arrival]
) -> list[str]:
    """Tables that share a group with what has other hyperparameters."""
    return [
        f"{parameter!r} was trained with {name}={value} in the checkpoint, and its group has "
        f"{trained.group[name]}: give it a group of its own"
        for parameter, trained in _trained(optimizers).items()
        if parameter in arrivals
        for name, value in arrivals[parameter].settings.items()
        if name in trained.group and not _equal(trained.group[name], value)
    ]


def _equal(one: Any, other: Any) -> bool:
    number = (int, float, Tensor)
    if isinstance(one, number) and isinstance(other, number):
        return same_rate(float(one), float(other))
    return bool(one == other)
