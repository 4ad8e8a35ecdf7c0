"""Reads and writes the model's state besides tables, of this rank and of other ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from recpoint.catalog.restore.dense import dense_shards, is_shard, parse_shard
from recpoint.embeddings.tables import Lookup, Table, TableSource, modules_of, refuse_other_tables
from recpoint.trainer_plugin.tables import (
    Stored,
    form_of,
    hold_pieces,
    is_piece,
    lacks_some,
    layout_text,
    piece_of,
    write_into,
)

__all__ = ["ModelState", "nearest", "optimizers_for", "own_part", "tree_for"]


# The part of a model that is not tables: dense layers, buffers, extra state of modules.


class _Named(NamedTuple):
    """Live tensors by name.

    Attributes:
        parameters, buffers: all but the tables.
        lookups: by module, of plain embeddings.
        own: ids of the tables' parameters.
        tied: each further name of a parameter or buffer, a table's included -> its first name.
        transient: names of the buffers that are not persistent.
    """

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    lookups: dict[str, Tensor]
    own: set[int]
    tied: dict[str, str]
    transient: list[str]


class ModelState:
    """Dense parameters, buffers (also those that are not persistent) and extra state, by name.

    Names are canonical (`catalog.restore.state.canonical_name`); a tied parameter appears once,
    under its first name.

    Args:
        model: whose.
        tables: of it, which are no part of this.
        sources: answer for modules of it, which are none either.
    """

    def __init__(
        self, model: nn.Module, tables: Sequence[Table], sources: Sequence[TableSource] = ()
    ) -> None:
        self._model = model
        self._sources = sources
        theirs = {table for source in sources for table in source.tables}
        self._own_tables = [table for table in tables if table not in theirs]
        self._others_tables = [table for table in tables if table in theirs]

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors by name."""
        named = self._named()
        return named.parameters | named.buffers

    def parameters(self) -> dict[str, Tensor]:
        """The live parameters that are here whole."""
        named = self._named().parameters
        return {name: tensor for name, tensor in named.items() if not is_piece(tensor)}

    def buffers(self) -> dict[str, Tensor]:
        """The live buffers."""
        return self._named().buffers

    def extra_states(self) -> list[str]:
        """Names of the modules that have extra state."""
        return [name for name, module in self._modules() if _has_extra_state(module)]

    def _named(self) -> _Named:
        hold_pieces(self._model)
        own = {id(table.weight) for table in self._own_tables}
        seen: dict[int, str | None] = {id(t.weight): t.parameter_name for t in self._own_tables}
        seen |= dict.fromkeys(id(table.weight) for table in self._others_tables)
        parameters: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        lookups: dict[str, Tensor] = {}
        tied: dict[str, str] = {}
        transient: list[str] = []
        for prefix, module in modules_of(self._model, self._sources, every_name=True):
            if (
                isinstance(module, Lookup)
                and (weight := module._parameters.get("weight")) is not None
            ):
                lookups[prefix] = weight
            for found, named, unsaved in (
                (parameters, module._parameters, frozenset()),
                (buffers, module._buffers, module._non_persistent_buffers_set),
            ):
                for name, tensor in named.items():
                    if tensor is None:
                        continue
                    full = f"{prefix}.{name}" if prefix else name
                    if id(tensor) not in seen:
                        seen[id(tensor)] = full
                        found[full] = tensor
                    elif (first := seen[id(tensor)]) is not None and first != full:
                        tied[full] = first
                    if name in unsaved:
                        transient.append(full)
        return _Named(parameters, buffers, lookups, own, tied, transient)

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        return modules_of(self._model, self._sources)

    def capture(self) -> dict[str, Any]:
        """The state; its tensors are the live ones, and of those that ranks share the pieces.

        Raises:
            SettingsError: the model has come to other tables than those that it was given with.
        """
        named = self._named()
        if {id(weight) for weight in named.lookups.values()} != named.own:
            refuse_other_tables(named.lookups, self._own_tables)
        extra = {
            name: module.get_extra_state()
            for name, module in self._modules()
            if _has_extra_state(module)
        }
        tensors: dict[str, Any] = named.parameters | named.buffers
        for name in [name for name, tensor in tensors.items() if is_piece(tensor)]:
            tensors[name] = piece_of(tensors[name])
            if tensors[name] is None:
                del tensors[name]
        # What a file for `load_state_dict` needs to know besides; most models have neither.
        names = {"tied": named.tied, "transient": named.transient}
        return {
            "tensors": tensors,
            "extra": extra,
            **{key: value for key, value in names.items() if value},
        }

    def lacks(self, saved: Mapping[str, Any]) -> bool:
        """Whether other ranks may have pieces of tensors that are here, beside these."""
        there = saved["tensors"]
        return any(
            name not in there or lacks_some(tensor, there[name], name=name)
            for name, tensor in self.tensors().items()
        )

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """What does not fit, one sentence each; [] when `restore` will work."""
        here, there = self.tensors(), saved["tensors"]
        found = [f"{name!r} is not in the checkpoint" for name in here if name not in there]
        found += [f"{name!r} is not in the model" for name in there if name not in here]
        for name in here.keys() & there.keys():
            model, stored = _form(here[name]), _form(there[name])
            if model != stored:
                found.append(f"{name!r} is {model} in the model and {stored} in the checkpoint")
        extra = {name for name, module in self._modules() if _has_extra_state(module)}
        for name in sorted(extra ^ saved["extra"].keys()):
            found.append(f"the extra state of module {name!r} is only in one of the two")
        return sorted(found)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Write what `capture` returned into the model, in place."""
        self.restore_some({name: saved["tensors"][name] for name in self.tensors()})
        for name, module in self._modules():
            if name in saved["extra"]:
                module.set_extra_state(saved["extra"][name])

    def restore_some(self, saved: Mapping[str, Stored]) -> None:
        """Write these tensors into those of the same names, in place."""
        here = self.tensors()
        for name, stored in saved.items():
            write_into(here[name], stored, name=name)


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _form(tensor: Stored) -> str:
    shape, dtype = form_of(tensor)
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}{layout_text(tensor)}"


# The state trees of all ranks of a checkpoint, as one of the ranks that restore it needs them.
#
# Dense parameters that every rank has, and what optimizers have of them, are in the tree of rank 0
# alone (`ranks/agreement.py`). Of the others each has what is its own: pieces of dense tensors,
# buffers, extra states, hyperparameters, schedulers, generators, reader, extras, the state of its
# tables.


_WHOLE = frozenset(("model", "optimizers"))


def own_part(tree: Mapping[str, Any], *, alike: Collection[str]) -> dict[str, Any]:
    """What a rank other than 0 stores of its whole tree.

    Args:
        tree: as `training_state.TrainingState` captures it; pieces of tensors as pieces.
        alike: names of the tensors that are the same on all ranks; so is what the optimizers have
            of them.
    """
    tensors = {name: t for name, t in tree["model"]["tensors"].items() if name not in alike}
    optimizers = []
    for one in tree["optimizers"]:
        state = {
            name: _pieces(entry) if name in alike else entry for name, entry in one["state"].items()
        }
        optimizers.append({**one, "state": state})
    return {**tree, "model": {**tree["model"], "tensors": tensors}, "optimizers": optimizers}


def _pieces(entry: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in entry["values"].items() if is_shard(value)}
    return {**entry, "values": values}


def tree_for(
    state: Mapping[int, object], rank: int, count: int, stored: int
) -> dict[str, Any] | None:
    """One tree for a rank, of those of a checkpoint; None: they hold no training state.

    Pieces of dense tensors are lists of `DenseShard`, of all ranks whose trees are whole. `rng` is
    None where no rank of this number was there; `other_optimizers` are those of the trees of other
    ranks, as far as they were read; `readers` are the states of all ranks' readers,
    None of those that were not read; `reader` is that of this one, None where the number of ranks
    is another.

    Args:
        state: rank -> its tree, as restored: of rank 0 and of this one, where it was there, whole;
            of others whole, in part, or not at all.
        rank: of this process.
        count: of ranks now.
        stored: of ranks of the checkpoint.

    Raises:
        MalformedObject: a piece that is none.
    """
    trees: dict[int, dict[str, Any]] = {
        number: tree for number, tree in sorted(state.items()) if isinstance(tree, dict)
    }
    if len(trees) < len(state):
        return None
    whole: dict[int, Any] = {n: tree for n, tree in trees.items() if _is_whole(tree)}
    if 0 not in whole or (rank in state and rank not in whole):
        return None
    first, own = whole[0], whole.get(rank)
    readers = [trees[n].get("reader") if n in trees else None for n in range(stored)]
    sources: dict[str, list[Any]] = {}
    for tree in trees.values():
        for name, value in tree.get("sources", {}).items():
            sources.setdefault(name, []).append(value)
    return {
        **first,
        "model": _model(first["model"], None if own is None else own["model"], dense_shards(whole)),
        "optimizers": optimizers_for(whole, first if own is None else own),
        "other_optimizers": [
            tree["optimizers"]
            for number, tree in trees.items()
            if number != (0 if own is None else rank) and "optimizers" in tree
        ],
        "schedulers": own["schedulers"] if own and own["schedulers"] else first["schedulers"],
        "reader": readers[rank] if stored == count else None,
        "readers": readers,
        "extras": first.get("extras") if own is None else own.get("extras"),
        "sources": sources,
        "rng": None if own is None else own.get("rng"),
    }


def _is_whole(tree: object) -> bool:
    return isinstance(tree, dict) and tree.keys() >= _WHOLE


def nearest(rank: int, count: int, stored: int, known: Mapping[int, object]) -> set[int]:
    """Ranks of a checkpoint that are likely to have the pieces which one of now lacks.

    Libraries cut tensors in the order of ranks, so those come first whose share lies where this
    rank's does; each time that it is asked with the trees of all these, twice as many beside them.

    Args:
        rank, count: of this process, and how many there are.
        stored: how many the checkpoint has.
        known: the trees that are there, whole or in part.
    """
    have = {number for number, tree in known.items() if _is_whole(tree)}
    first, end = rank * stored // count, -(-(rank + 1) * stored // count)
    reach = 0
    while True:
        near = set(range(max(0, first - reach), min(stored, end + reach)))
        if len(near) == stored or not near <= have:
            return near
        reach = max(1, 2 * reach)


def _model(
    first: Mapping[str, Any], own: Mapping[str, Any] | None, pieces: Mapping[str, Any]
) -> dict[str, Any]:
    """The model of a rank that was there, else with the buffers and extra states of rank 0."""
    if own is None:
        return {**first, "tensors": first["tensors"] | pieces}
    return {**own, "tensors": first["tensors"] | own["tensors"] | pieces}


def optimizers_for(trees: Mapping[int, Any], own: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The optimizers of a rank, of the trees of several.

    Args:
        trees: whole ones, by rank.
        own: of the rank whose hyperparameters they have, and that has no state of tables which only
            others hold; None: they have the state of all, and are no rank's.
    """
    saved = [tree["optimizers"] for tree in trees.values()]
    return [
        _optimizer(
            [one[number] for one in saved], None if own is None else own["optimizers"][number]
        )
        for number in range(min(map(len, saved), default=0))
    ]


def _optimizer(saved: list[Any], own: Mapping[str, Any] | None) -> dict[str, Any]:
    others = {name for one in saved for name in _trained(one)}
    elsewhere = others - set(_trained(own)) if own is not None else set()
    entries: dict[str, Any] = {}
    for one in saved:
        for name, entry in one["state"].items():
            if name in elsewhere:
                continue
            found = entries.setdefault(name, {**entry, "values": {}})
            for key, value in entry["values"].items():
                if is_shard(value):
                    shard = parse_shard(value, name=f"{name}, {key}")
                    found["values"].setdefault(key, []).append(shard)
                else:
                    found["values"].setdefault(key, value)
    return {**(saved[0] if own is None else own), "state": entries}


def _trained(one: Mapping[str, Any]) -> list[str]:
    return [name for group in one["groups"] for name in group["params"]]
