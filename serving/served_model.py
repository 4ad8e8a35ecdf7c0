"""A model that is served: where its tables lie, and how its dense layers are replaced."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from recpoint.catalog.chunks.logical_tables import logical_tables
from recpoint.catalog.restoring.names import canonical_name
from recpoint.catalog.restoring.restored_model import dense_tensors, extra_states
from recpoint.embeddings.served_tables import FloatTable, ServedTable
from recpoint.errors import IncompatibleModel
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Manifest
from recpoint.serving.coded_modules import CodedBag, CodedEmbedding, coded_lookups

__all__ = ["ServedModel"]


class ServedModel:
    """One model of a serving process; put into evaluation mode, without gradients.

    Names are those of checkpoints (`catalog.restoring.names`), also of a model that was compiled.

    Args:
        model: with embeddings of its own, or with those of `coded_modules.replace_lookups`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)
        self._coded = coded_lookups(model)
        self._weights: dict[str, Tensor] = {
            canonical_name(model, name) or "weight": module.weight
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }

    def table(self, name: str) -> FloatTable | None:
        """The weight of an embedding, as a table; None for one that is kept as codes."""
        weight = self._weights.get(name)
        return None if weight is None else FloatTable(weight.detach())

    def use(self, tables: Mapping[str, ServedTable]) -> None:
        """Let lookups of coded embeddings go to these tables."""
        for name, module in self._coded.items():
            if isinstance(module, CodedEmbedding | CodedBag):
                module.table = tables[name]

    def check_tables(self, manifest: Manifest) -> None:
        """Whether the model's tables are those of the checkpoint.

        Raises:
            IncompatibleModel: they differ, each difference named.
        """
        here = {*self._weights, *self._coded}
        there = logical_tables(manifest.tables)
        found = [f"table {name!r} is not in the checkpoint" for name in here - there.keys()]
        found += [f"table {name!r} is not in the model" for name in there.keys() - here]
        for name in self._weights.keys() & there.keys():
            weight, spec = self._weights[name], there[name]
            stored = (spec.rows, spec.dim), torch_dtype(spec.dtype)
            if (tuple(weight.shape), weight.dtype) != stored:
                found.append(f"table {name!r} is {_form(weight)} in the model and {stored} stored")
        _refuse(manifest, found)

    def check_dense(self, manifest: Manifest, state: Mapping[int, object]) -> None:
        """Whether its dense layers are those of the checkpoint; errors as `check_tables`."""
        here, there = self._dense(), dense_tensors(state)
        found = [f"{name!r} is not in the checkpoint" for name in here.keys() - there.keys()]
        found += [f"{name!r} is not in the model" for name in there.keys() - here.keys()]
        for name in here.keys() & there.keys():
            if (here[name].shape, here[name].dtype) != (there[name].shape, there[name].dtype):
                found.append(
                    f"{name!r} is {_form(here[name])} in the model and {_form(there[name])} stored"
                )
        for name in extra_states(state).keys() - self._modules().keys():
            found.append(f"the extra state of module {name!r} is only in the checkpoint")
        _refuse(manifest, found)

    def load_dense(self, state: Mapping[int, object]) -> None:
        """Replace dense layers, buffers and extra state; `check_dense` has looked at them."""
        stored = dense_tensors(state)
        with torch.no_grad():
            for name, tensor in self._dense().items():
                tensor.copy_(stored[name])
        modules = self._modules()
        for name, extra in extra_states(state).items():
            modules[name].set_extra_state(extra)

    def _modules(self) -> dict[str, nn.Module]:
        # What wraps the model comes before what it wraps, and has the same name.
        named = self.model.named_modules()
        return {canonical_name(self.model, name): module for name, module in named}

    def _dense(self) -> dict[str, Tensor]:
        tables = {id(weight) for weight in self._weights.values()}
        found: dict[str, Tensor] = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if id(parameter) not in tables
        }
        found.update(self.model.named_buffers())
        return {canonical_name(self.model, name): tensor for name, tensor in found.items()}


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _refuse(manifest: Manifest, differences: list[str]) -> None:
    if differences:
        raise IncompatibleModel(
            f"checkpoint of {manifest.ref}",
            found="; ".join(sorted(differences)),
            expected="the tables and dense layers of the model that is served",
            next_step="build the served model as the trainer builds it",
        )
