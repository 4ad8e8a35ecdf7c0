"""Replaces the ids that a module looks up with the slots of their rows.

A module whose table is cached has a weight of slots. Its hooks are called before and after each
lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Never

import torch
from torch import Tensor, nn

from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.cached_table import CachedTable
from recpoint.embeddings.tables.tables import Lookup
from recpoint.errors import SettingsError

__all__ = ["CachedLookups", "cache_of"]


class CachedLookups:
    """Replaces the ids of each lookup of one module with the slots of their rows."""

    #: Code that refuses models whose hooks change the lookups' inputs must refuse this one.
    reads_only = False

    def __init__(self, cache: Cache, name: str) -> None:
        self.cache = cache
        self.name = name
        self._outside_graphs: Callable[..., Any] = torch.compiler.disable(self._with_slots)

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the lookup with slots in place of ids."""
        return self._outside_graphs(module, args, kwargs)

    def _with_slots(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ids = args[0] if args else kwargs["input"]
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
            return args, kwargs  # torch refuses it
        if module.__dict__.pop("weight", None) is not None:
            # A lookup before was interrupted, so that `looked_up` was not called.
            self._reset_padding(module)
        self.cache.tables[self.name].slots.refuse_other(module.weight)
        weights = kwargs.get("per_sample_weights", args[2] if len(args) > 2 else None)
        # The gradient of weights is computed from the rows, so that these must stay, too.
        trains = torch.is_grad_enabled() and any(
            isinstance(tensor, Tensor) and tensor.requires_grad
            for tensor in (module.weight, weights)
        )
        if trains and isinstance(module, nn.EmbeddingBag) and not module.sparse:
            slots = self._own_rows(module, ids)
        else:
            slots = self.cache.slots_of(self.name, ids, trains=trains)
            if trains:
                module.__dict__["weight"] = self._weight(module)
        if args:
            return (slots, *args[1:]), kwargs
        return args, {**kwargs, "input": slots}

    def _own_rows(self, module: nn.EmbeddingBag, ids: Tensor) -> Tensor:
        """Give one lookup a weight of its rows alone, in the order of their ids.

        For dense gradients of bags, torch sorts the ids and sums gradients in that order. The sort
        is not stable, so that sums of slots would differ from sums of rows in their last bits.
        Places among the rows sort as the ids do.

        Returns:
            The place of each id in this weight, of the shape and dtype of `ids`.
        """
        rows, places = torch.unique(ids, return_inverse=True)
        slots = self.cache.slots_of(self.name, rows, trains=True)
        own_weight = self._weight(module).index_select(0, slots)
        padding_row = self.cache.tables[self.name].slots.padding_row
        if padding_row is not None:
            padding_places = torch.nonzero(rows == padding_row).view(-1)
            module.padding_idx = int(padding_places) if padding_places.numel() else None
        module.__dict__["weight"] = own_weight
        typed_places: Tensor = places.to(ids.dtype)
        return typed_places

    def _weight(self, module: Any) -> Tensor:
        """Return the weight for a lookup with gradients on.

        In the module's `__dict__` it is found before the parameter; `looked_up` removes it.
        """
        weight: Tensor = module.weight
        if not weight.requires_grad:  # a frozen table, with trained weights of samples
            return weight
        return self.cache.tables[self.name].gradients.weight_of_lookup(sparse=module.sparse)

    def looked_up(self, module: Any, _args: Any, output: Any) -> None:
        """Take the rows of the lookup out of the module again, and follow its graph."""
        rows = self.cache.tables[self.name]
        rows.made_lookup(output)
        if module.__dict__.pop("weight", None) is not None:
            self._reset_padding(module)

    def _reset_padding(self, module: Any) -> None:
        slots = self.cache.tables[self.name].slots
        if slots.padding_row is not None:
            module.padding_idx = slots.padding

    def refuse_state(self, *_: object) -> None:
        """Refuse `load_state_dict`: a state dict has the rows of slots, or of another model.

        Raises:
            SettingsError: always.
        """
        raise SettingsError(
            f"cached table {self.name!r}",
            found="load_state_dict() of a model whose tables are in a cache",
            expected="rows that come from a checkpoint, because most of them are not in the "
            "model's memory",
            next_step="restore with Checkpointer.restore(), and read rows with "
            "recpoint.embeddings.read_rows()",
        )

    def table(self, name: str, parameter_name: str, module: Lookup) -> CachedTable:
        """Describe the module's table; see `tables.DescribesTable`."""
        return CachedTable(
            name=name,
            parameter_name=parameter_name,
            module=module,
            cache=self.cache,
            key_in_cache=self.name,
        )

    def __getattr__(self, name: str) -> Never:
        if name != "__name__":  # torch.jit.script reads it
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise SettingsError(
            f"cached table {self.name!r}",
            found="torch.jit.script, which cannot compile lookups through a cache",
            expected="a model whose tables are not cached",
            next_step="restore a checkpoint into such a model, and script that",
        )

    def __reduce__(self) -> Never:
        raise SettingsError(
            f"cached table {self.name!r}",
            found="a copy of the model, which would train the same slots",
            expected="one model for each cache",
            next_step="take a checkpoint, and restore it into another model",
        )


def cache_of(model: nn.Module) -> Cache | None:
    """Return the cache of a model's tables; None: no table is cached."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, CachedLookups):
                return hook.cache
    return None
