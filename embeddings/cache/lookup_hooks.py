"""Replaces the ids that a module looks up with the slots of their rows.

A module whose table is cached has a weight of slots. Its hooks are called before and after each
lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Never

import torch
from torch import Tensor, nn

from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.cached_keys import CachedKeys, keyed_lookups_of
from recpoint.embeddings.cache.cached_table import CachedTable
from recpoint.embeddings.cache.lookup_places import rows_of_lookup
from recpoint.embeddings.cache.refused_uses import copy_refused, loaded_state_refused
from recpoint.embeddings.tables.tables import Lookup
from recpoint.errors import SettingsError

__all__ = ["CachedLookups", "cache_of", "cached_modules"]


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
        rows = rows_of_lookup(
            self.cache,
            self.name,
            ids,
            trains=trains,
            sparse=module.sparse,
            is_bag=isinstance(module, nn.EmbeddingBag),
        )
        if trains:
            # In the module's `__dict__` it is found before the parameter; `looked_up` removes it.
            module.__dict__["weight"] = rows.weight
            module.padding_idx = rows.padding
        if args:
            return (rows.places, *args[1:]), kwargs
        return args, {**kwargs, "input": rows.places}

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
        """Refuse `load_state_dict`; see `loaded_state_refused`.

        Raises:
            SettingsError: always.
        """
        raise loaded_state_refused(self.name)

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
        raise copy_refused(self.name)


def cached_modules(model: nn.Module) -> Iterator[tuple[str, CachedLookups | CachedKeys]]:
    """Yield the name of each module whose table is cached, and what finds its rows."""
    for name, module in model.named_modules():
        keys = keyed_lookups_of(module)
        if keys is not None:
            yield name, keys
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, CachedLookups):
                yield name, hook


def cache_of(model: nn.Module) -> Cache | None:
    """Return the cache of a model's tables; None: no table is cached."""
    return next((lookups.cache for _, lookups in cached_modules(model)), None)
