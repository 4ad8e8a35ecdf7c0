"""The part of a model that is not tables: dense layers, buffers, extra state of modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recpoint.trainer_plugin.tables import Table

__all__ = ["ModelState"]


class ModelState:
    """Dense parameters, buffers (also those that are not persistent) and extra state, by name.

    Names are the full ones of `named_parameters` and `named_buffers`; a tied parameter appears
    once, under its first name.
    """

    def __init__(self, model: nn.Module, tables: Sequence[Table]) -> None:
        self._model = model
        self._tables = tables

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors by name."""
        tables = {id(table.weight) for table in self._tables}
        found: dict[str, Tensor] = {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if id(parameter) not in tables
        }
        found.update(self._model.named_buffers())
        return found

    def capture(self) -> dict[str, Any]:
        """The state; its tensors are the live ones."""
        extra = {
            name: module.get_extra_state()
            for name, module in self._model.named_modules()
            if _has_extra_state(module)
        }
        return {"tensors": self.tensors(), "extra": extra}

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """What does not fit, one sentence each; [] when `restore` will work."""
        here, there = self.tensors(), saved["tensors"]
        found = [f"{name!r} is not in the checkpoint" for name in here if name not in there]
        found += [f"{name!r} is not in the model" for name in there if name not in here]
        for name in here.keys() & there.keys():
            model, stored = _form(here[name]), _form(there[name])
            if model != stored:
                found.append(f"{name!r} is {model} in the model and {stored} in the checkpoint")
        extra = {name for name, module in self._model.named_modules() if _has_extra_state(module)}
        for name in sorted(extra ^ saved["extra"].keys()):
            found.append(f"the extra state of module {name!r} is only in one of the two")
        return sorted(found)

    def restore(self, saved: Mapping[str, Any], names: Sequence[str] | None = None) -> None:
        """Write the saved state into the model, in place.

        Args:
            saved: as `capture` returned it.
            names: only these tensors, and no extra state; None: everything.
        """
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                if names is None or name in names:
                    tensor.copy_(saved["tensors"][name])
        if names is not None:
            return
        for name, module in self._model.named_modules():
            if name in saved["extra"]:
                module.set_extra_state(saved["extra"][name])


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
