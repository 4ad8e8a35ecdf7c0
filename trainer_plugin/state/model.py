"""Captures and restores the model's state outside tables, and merges the state of all ranks.

The state trees of all ranks of a checkpoint, merged for one of the ranks that restore it. Only the
tree of rank 0 holds the dense parameters that every rank has, and their optimizer state
(`ranks/agreement.py`). The tree of each other rank holds the rank's own state: pieces of dense
tensors, buffers, extra states, hyperparameters, schedulers, generators, reader, extras and the
state of its tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from recpoint.catalog.restore.dense import dense_shards, is_shard, parse_shard
from recpoint.embeddings.tables.managed_collisions import mapped_tables
from recpoint.embeddings.tables.tables import (
    Lookup,
    Table,
    TableSource,
    modules_of,
    refuse_other_tables,
)
from recpoint.trainer_plugin import mismatches
from recpoint.trainer_plugin.mismatches import Mismatch
from recpoint.trainer_plugin.tables import (
    Stored,
    can_hold,
    form_of,
    hold_pieces,
    is_piece,
    lacks_some,
    layout_text,
    piece_of,
    write_into,
)

__all__ = ["ModelState", "nearest", "optimizers_for", "own_part", "tree_for"]


class _NamedTensors(NamedTuple):
    """Live tensors of a model by name.

    Attributes:
        parameters, buffers: all except the tables.
        lookups: name of each plain embedding module -> its weight.
        own: ids of the weights of plain tables.
        tied: each further name of a parameter, buffer or table -> its first name.
        transient: names of the buffers that are not persistent.
    """

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    lookups: dict[str, Tensor]
    own: set[int]
    tied: dict[str, str]
    transient: list[str]


class ModelState:
    """Captures and restores dense parameters, all buffers and extra state, by name.

    Buffers include those that are not persistent. Names are canonical
    (`catalog.restore.state.canonical_name`); a tied parameter appears once, under its first name.

    Args:
        model: the model.
        tables: its tables, which are left out.
        sources: sources whose modules are left out.
    """

    def __init__(
        self, model: nn.Module, tables: Sequence[Table], sources: Sequence[TableSource] = ()
    ) -> None:
        self._model = model
        self._sources = sources
        source_tables = {table for source in sources for table in source.tables}
        self._own_tables = [table for table in tables if table not in source_tables]
        self._others_tables = [table for table in tables if table in source_tables]

    def tensors(self) -> dict[str, Tensor]:
        """Return the live parameters and buffers, by name."""
        named = self._named()
        return named.parameters | named.buffers

    def saved_names(self) -> dict[str, str]:
        """Return the names that a `state_dict` has: name, also of a tied tensor -> its first name.

        Tensors tied to a table and buffers that are not persistent are left out.
        """
        named = self._named()
        first_names = {name: name for name in (*named.parameters, *named.buffers)} | named.tied
        dense = named.parameters.keys() | named.buffers.keys()
        return {
            name: first
            for name, first in first_names.items()
            if first in dense and name not in named.transient
        }

    def parameters(self) -> dict[str, Tensor]:
        """Return the live parameters that this rank holds whole, by name."""
        named = self._named().parameters
        return {name: tensor for name, tensor in named.items() if not is_piece(tensor)}

    def buffers(self) -> dict[str, Tensor]:
        """Return the live buffers, by name."""
        return self._named().buffers

    def id_tensors(self) -> dict[str, list[str]]:
        """Return table whose raw ids TorchRec maps -> names of the dense tensors that map them.

        Sharded tables are left out: their raw ids are row states.
        """
        return {
            mapped.name: [f"{mapped.module_name}.{name}" for name in mapped.module.state_dict()]
            for mapped in mapped_tables(self._model)
        }

    def extra_states(self) -> list[str]:
        """Return the names of the modules that have extra state."""
        return [name for name, module in self._modules() if _has_extra_state(module)]

    def _named(self) -> _NamedTensors:
        hold_pieces(self._model)
        own_weights = {id(table.weight) for table in self._own_tables}
        names_seen: dict[int, str | None] = {
            id(t.weight): t.parameter_name for t in self._own_tables
        }
        names_seen |= dict.fromkeys(id(table.weight) for table in self._others_tables)
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
            for tensors, named, unsaved in (
                (parameters, module._parameters, frozenset()),
                (buffers, module._buffers, module._non_persistent_buffers_set),
            ):
                for name, tensor in named.items():
                    if tensor is None or self._is_left_out(module, name):
                        continue
                    full = f"{prefix}.{name}" if prefix else name
                    if id(tensor) not in names_seen:
                        names_seen[id(tensor)] = full
                        tensors[full] = tensor
                    elif (first := names_seen[id(tensor)]) is not None and first != full:
                        tied[full] = first
                    if name in unsaved:
                        transient.append(full)
        return _NamedTensors(parameters, buffers, lookups, own_weights, tied, transient)

    def _is_left_out(self, module: nn.Module, name: str) -> bool:
        return any(source.stores_buffer(module, name) for source in self._sources)

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        return modules_of(self._model, self._sources)

    def capture(self) -> dict[str, Any]:
        """Return the state, with live tensors; of tensors split over ranks, the pieces held here.

        Raises:
            SettingsError: the model's tables have changed since the Checkpointer was built.
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
        # An export for `load_state_dict` needs these names, too; most models have neither.
        names = {"tied": named.tied, "transient": named.transient}
        return {
            "tensors": tensors,
            "extra": extra,
            **{key: value for key, value in names.items() if value},
        }

    def lacks(self, saved: Mapping[str, Any]) -> bool:
        """Whether `saved` lacks pieces of this model's tensors, which other ranks may have."""
        stored = saved["tensors"]
        return any(
            name not in stored or lacks_some(tensor, stored[name], name=name)
            for name, tensor in self.tensors().items()
        )

    def completed(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return imported state as `restore` takes it, completed with what no file has.

        Buffers that are not persistent, and extra state, are those of this model as it is. Tied
        tensors may have any of their names.
        """
        first_names = self.saved_names()
        stored: Mapping[str, Stored] = saved["tensors"]
        unsaved_names = self.tensors().keys() - set(first_names.values())
        tensors: dict[str, Any] = {name: self.tensors()[name] for name in unsaved_names}
        for name, tensor in stored.items():
            tensors.setdefault(first_names.get(name, name), tensor)
        extra = {
            name: module.get_extra_state()
            for name, module in self._modules()
            if _has_extra_state(module)
        }
        return {"tensors": tensors, "extra": extra}

    def differences(self, saved: Mapping[str, Any]) -> list[Mismatch]:
        """Return what does not fit this model; [] if `restore` will work."""
        model_tensors, stored_tensors = self.tensors(), saved["tensors"]
        differences = [
            Mismatch(f"{name!r} is not in the checkpoint", mismatches.DENSE_ONLY_HERE)
            for name in model_tensors
            if name not in stored_tensors
        ]
        differences += [
            Mismatch(f"{name!r} is not in the model", mismatches.DENSE_ONLY_THERE)
            for name in stored_tensors
            if name not in model_tensors
        ]
        for name in model_tensors.keys() & stored_tensors.keys():
            model, stored = _form(model_tensors[name]), _form(stored_tensors[name])
            if model != stored:
                text = f"{name!r} is {model} in the model and {stored} in the checkpoint"
                differences.append(Mismatch(text, mismatches.DENSE_FORM))
            elif not can_hold(model_tensors[name], stored_tensors[name], name=name):
                text = (
                    f"{name!r} has elements that share memory in the model (expand()), and differ "
                    "in the checkpoint"
                )
                differences.append(Mismatch(text, mismatches.SHARED_MEMORY))
        extra = {name for name, module in self._modules() if _has_extra_state(module)}
        for name in sorted(extra ^ saved["extra"].keys()):
            text = f"the extra state of module {name!r} is only in one of the two"
            differences.append(Mismatch(text, mismatches.EXTRA_STATE))
        return sorted(differences)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Write what `capture` returned into the model, in place."""
        self.restore_some({name: saved["tensors"][name] for name in self.tensors()})
        for name, module in self._modules():
            if name in saved["extra"]:
                module.set_extra_state(saved["extra"][name])

    def restore_some(self, saved: Mapping[str, Stored]) -> None:
        """Write these tensors into the tensors of the same names, in place."""
        tensors = self.tensors()
        for name, stored in saved.items():
            write_into(tensors[name], stored, name=name)


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _form(tensor: Stored) -> str:
    shape, dtype = form_of(tensor)
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}{layout_text(tensor)}"


_WHOLE = frozenset(("model", "optimizers"))


def own_part(tree: Mapping[str, Any], *, alike: Collection[str]) -> dict[str, Any]:
    """Return the part of its whole tree that a rank other than 0 stores.

    Args:
        tree: as `training_state.TrainingState` captures it; split tensors as pieces.
        alike: names of the tensors that are equal on all ranks, together with their optimizer
            state.
    """
    tensors = {name: t for name, t in tree["model"]["tensors"].items() if name not in alike}
    optimizers = []
    for optimizer in tree["optimizers"]:
        state = {
            name: _pieces(entry) if name in alike else entry
            for name, entry in optimizer["state"].items()
        }
        optimizers.append({**optimizer, "state": state})
    return {**tree, "model": {**tree["model"], "tensors": tensors}, "optimizers": optimizers}


def _pieces(entry: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in entry["values"].items() if is_shard(value)}
    return {**entry, "values": values}


def tree_for(
    state: Mapping[int, object], rank: int, count: int, stored: int
) -> dict[str, Any] | None:
    """Merge the trees of a checkpoint's ranks into one tree for a rank of this job.

    Split dense tensors become lists of `DenseShard`, from all ranks whose trees are whole.

    Args:
        state: rank -> its tree, as read. The trees of rank 0 and of this rank, if the checkpoint
            has it, are whole; other trees may be whole, in part, or missing.
        rank: rank of this process.
        count: number of ranks now.
        stored: number of ranks of the checkpoint.

    Returns:
        The tree; None: the checkpoint holds no training state. `rng` is None if the checkpoint has
        no rank of this number. `other_optimizers` are the optimizers of the other trees that were
        read. `readers` are the states of all ranks' readers, None for those not read. `reader` is
        the state of this rank's reader, None if the number of ranks has changed.

    Raises:
        MalformedObject: a piece is malformed.
    """
    trees: dict[int, dict[str, Any]] = {
        number: tree for number, tree in sorted(state.items()) if isinstance(tree, dict)
    }
    if len(trees) < len(state):
        return None
    whole: dict[int, Any] = {n: tree for n, tree in trees.items() if _is_whole(tree)}
    if 0 not in whole or (rank in state and rank not in whole):
        return None
    first, own_tree = whole[0], whole.get(rank)
    readers = [trees[n].get("reader") if n in trees else None for n in range(stored)]
    sources: dict[str, list[Any]] = {}
    for tree in trees.values():
        for name, value in tree.get("sources", {}).items():
            sources.setdefault(name, []).append(value)
    return {
        **first,
        "model": _model(
            first["model"], None if own_tree is None else own_tree["model"], dense_shards(whole)
        ),
        "optimizers": optimizers_for(whole, first if own_tree is None else own_tree),
        "other_optimizers": [
            tree["optimizers"]
            for number, tree in trees.items()
            if number != (0 if own_tree is None else rank) and "optimizers" in tree
        ],
        "schedulers": own_tree["schedulers"]
        if own_tree and own_tree["schedulers"]
        else first["schedulers"],
        "reader": readers[rank] if stored == count else None,
        "readers": readers,
        "extras": first.get("extras") if own_tree is None else own_tree.get("extras"),
        "sources": sources,
        "rng": None if own_tree is None else own_tree.get("rng"),
    }


def _is_whole(tree: object) -> bool:
    return isinstance(tree, dict) and tree.keys() >= _WHOLE


def nearest(rank: int, count: int, stored: int, known_trees: Mapping[int, object]) -> set[int]:
    """Return the ranks of a checkpoint that are likely to have the pieces which a rank lacks.

    Libraries cut tensors in the order of ranks, so the first answer is the ranks whose share lies
    where this rank's share does. If `known_trees` holds the trees of all these, the answer grows to
    twice as many ranks on both sides.

    Args:
        rank: rank of this process.
        count: number of ranks now.
        stored: number of ranks of the checkpoint.
        known_trees: rank -> its tree as far as read, whole or in part.
    """
    have = {number for number, tree in known_trees.items() if _is_whole(tree)}
    first, end = rank * stored // count, -(-(rank + 1) * stored // count)
    reach = 0
    while True:
        near = set(range(max(0, first - reach), min(stored, end + reach)))
        if len(near) == stored or not near <= have:
            return near
        reach = max(1, 2 * reach)


def _model(
    first: Mapping[str, Any], own_tree: Mapping[str, Any] | None, pieces: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the model of this rank; if the checkpoint has no such rank, the model of rank 0."""
    if own_tree is None:
        return {**first, "tensors": first["tensors"] | pieces}
    return {**own_tree, "tensors": first["tensors"] | own_tree["tensors"] | pieces}


def optimizers_for(
    trees: Mapping[int, Any], own_tree: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Merge the optimizers of several ranks' trees.

    Args:
        trees: rank -> its whole tree.
        own_tree: tree of one rank. The result has its hyperparameters, and no state of tables that
            only other ranks hold. None: the result has the state of all ranks.
    """
    saved = [tree["optimizers"] for tree in trees.values()]
    return [
        _optimizer(
            [tree[number] for tree in saved],
            None if own_tree is None else own_tree["optimizers"][number],
        )
        for number in range(min(map(len, saved), default=0))
    ]


def _optimizer(saved: list[Any], own_tree: Mapping[str, Any] | None) -> dict[str, Any]:
    trained_names = {name for tree in saved for name in _trained(tree)}
    elsewhere = trained_names - set(_trained(own_tree)) if own_tree is not None else set()
    entries: dict[str, Any] = {}
    for tree in saved:
        for name, entry in tree["state"].items():
            if name in elsewhere:
                continue
            merged = entries.setdefault(name, {**entry, "values": {}})
            for key, value in entry["values"].items():
                if is_shard(value):
                    shard = parse_shard(value, name=f"{name}, {key}")
                    merged["values"].setdefault(key, []).append(shard)
                else:
                    merged["values"].setdefault(key, value)
    return {**(saved[0] if own_tree is None else own_tree), "state": entries}


def _trained(optimizer: Mapping[str, Any]) -> list[str]:
    return [name for group in optimizer["groups"] for name in group["params"]]
