"""The part of a model that is not tables: dense layers, buffers, extra state of modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from recpoint.embeddings.tables import (
    Lookup,
    Table,
    TableSource,
    modules_of,
    refuse_other_tables,
)
from recpoint.trainer_plugin.dense_pieces import (
    Stored,
    form_of,
    hold_pieces,
    is_piece,
    lacks_some,
    layout_text,
    piece_of,
    write_into,
)

__all__ = ["ModelState"]


class _Named(NamedTuple):
    """Live tensors by name; `lookups`: by module, of plain embeddings; `own`: ids of the tables."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    lookups: dict[str, Tensor]
    own: set[int]


class ModelState:
    """Dense parameters, buffers (also those that are not persistent) and extra state, by name.

    Names are canonical (`catalog.restoring.names`); a tied parameter appears once, under its first
    name.

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
        seen = own | {id(table.weight) for table in self._others_tables}
        parameters: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        lookups: dict[str, Tensor] = {}
        for prefix, module in self._modules():
            if (
                isinstance(module, Lookup)
                and (weight := module._parameters.get("weight")) is not None
            ):
                lookups[prefix] = weight
            for found, named in ((parameters, module._parameters), (buffers, module._buffers)):
                for name, tensor in named.items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        found[f"{prefix}.{name}" if prefix else name] = tensor
        return _Named(parameters, buffers, lookups, own)

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        return modules_of(self._model, self._sources)

    def capture(self) -> dict[str, Any]:
        """The state; its tensors are the live ones, and of those that ranks share the pieces.

        Raises:
            SettingsError: the model has come to other tables than those that it was given with.
        """
        parameters, buffers, lookups, own = self._named()
        if {id(weight) for weight in lookups.values()} != own:
            refuse_other_tables(lookups, self._own_tables)
        extra = {
            name: module.get_extra_state()
            for name, module in self._modules()
            if _has_extra_state(module)
        }
        tensors: dict[str, Any] = parameters | buffers
        for name in [name for name, tensor in tensors.items() if is_piece(tensor)]:
            tensors[name] = piece_of(tensors[name])
            if tensors[name] is None:
                del tensors[name]
        return {"tensors": tensors, "extra": extra}

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
