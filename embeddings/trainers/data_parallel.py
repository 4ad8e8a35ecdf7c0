"""Keeps torch's DistributedDataParallel (DDP) away from the slots of tables that ranks share.

And compares what DDP must have averaged: the gradients of the dense layers.

DDP copies parameters from rank 0, and averages their gradients place by place. Slot 5 of one rank
has another row than slot 5 of the next, so neither must happen to slots.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import Parameter

from recpoint.errors import SettingsError

__all__ = ["digest_of_gradients", "leave_out", "refuse_averaged", "refuse_wrapped"]

#: Gradients that are compared between ranks, and values of each. A factor changes all values.
_MOST_GRADIENTS: Final = 8
_MOST_VALUES: Final = 16


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model that DDP has wrapped already: it would wait for gradients of whole tables.

    Raises:
        SettingsError: a module of it is a DDP.
    """
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise SettingsError(
            "cached(model)",
            found="a model that DistributedDataParallel has wrapped",
            expected="a model that is wrapped afterwards, because each table gets another "
            "parameter",
            next_step="call cached() first, and DistributedDataParallel(model) then",
        )


def leave_out(model: nn.Module, slots: Collection[Parameter]) -> None:
    """Have DDP ignore the slots if it wraps the model later, or a module of it.

    Args:
        model: the model. Parameters that DDP ignores already stay so.
        slots: parameters of the model.
    """
    ids = {id(one) for one in slots}
    for module in model.modules():
        names = [name for name, one in module.named_parameters() if id(one) in ids]
        if names:
            before = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            # torch has no public call for it.
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                module, [*before, *names]
            )


def refuse_averaged(slots: Mapping[str, Parameter], allowed: WeakSet[nn.Module]) -> None:
    """Refuse a lookup in the forward pass of a DDP that does not ignore the slots.

    DDP reads what it must ignore from the module that it wraps. If that module only contains the
    model that was given to `cached`, DDP finds nothing to ignore.

    Args:
        slots: name of a table -> its slots.
        allowed: every DDP that was found to ignore the slots; another one that does is added.

    Raises:
        SettingsError: the lookup is in such a pass.
    """
    running = DistributedDataParallel._get_active_ddp_module()
    if running is None or running in allowed:
        return
    averaged = {id(one) for one in running._module_parameters}
    for name, one in slots.items():
        if id(one) in averaged:
            raise SettingsError(
                f"cached table {name!r}",
                found="DistributedDataParallel of a module that contains the model given to "
                "cached(): slots would be averaged that have different rows on each rank",
                expected="DistributedDataParallel of that model, or of a module in it",
                next_step="call cached() with the module that DistributedDataParallel is to wrap",
            )
    allowed.add(running)


def digest_of_gradients(parameters: Iterable[Tensor]) -> int:
    """Return a digest of some values of the parameters' gradients, 32 bits.

    It is equal on ranks whose gradients have the same bits. Sparse gradients, and those in pieces
    on several ranks, are left out. It waits for the device that has them.
    """
    gradients = [
        one.grad
        for one in parameters
        if one.grad is not None
        and one.grad.layout is torch.strided
        and not hasattr(one.grad, "full_tensor")
    ]
    samples = [one.detach().flatten()[:_MOST_VALUES] for one in gradients[-_MOST_GRADIENTS:]]
    digest = 0
    for values in samples:
        digest = zlib.crc32(values.cpu().contiguous().view(torch.uint8).numpy().data, digest)
    return digest
