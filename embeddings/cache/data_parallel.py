"""Keeps torch's DistributedDataParallel (DDP) away from the slots of tables that ranks share.

And compares what DDP must have averaged: the gradients of the dense layers.

DDP copies parameters from rank 0, and averages their gradients place by place. Slot 5 of one rank
has another row than slot 5 of the next, so neither must happen to slots.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from recpoint.errors import RanksDiffer, SettingsError

__all__ = ["DenseLayers", "leave_out", "refuse_wrapped"]

_log = logging.getLogger("recpoint")

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
    ids = {id(parameter) for parameter in slots}
    for module in model.modules():
        names = [name for name, parameter in module.named_parameters() if id(parameter) in ids]
        if names:
            ignored_names = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            # torch has no public call for it.
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                module, [*ignored_names, *names]
            )


class DenseLayers:
    """What a model has beside tables that ranks share: its gradients are the same on all ranks.

    Args:
        slots: name of a table -> its slots.
    """

    def __init__(self, slots: Mapping[str, Parameter]) -> None:
        self._slots = dict(slots)
        self._ids = {id(parameter) for parameter in slots.values()}
        #: Every DistributedDataParallel that was found to ignore the slots.
        self._wrappers: WeakSet[DistributedDataParallel] = WeakSet()
        self._has_warned = False

    def refuse_averaged_slots(self) -> None:
        """Refuse a lookup in the forward pass of a DDP that does not ignore the slots.

        DDP reads what it must ignore from the module that it wraps. If that module only contains
        the model that was given to `cached`, DDP finds nothing to ignore.

        Raises:
            SettingsError: the lookup is in such a pass.
        """
        running = DistributedDataParallel._get_active_ddp_module()
        if running is None or running in self._wrappers:
            return
        averaged = {id(parameter) for parameter in running._module_parameters}
        for name, parameter in self._slots.items():
            if id(parameter) in averaged:
                raise SettingsError(
                    f"cached table {name!r}",
                    found="DistributedDataParallel of a module that contains the model given to "
                    "cached(): slots would be averaged that have different rows on each rank",
                    expected="DistributedDataParallel of that model, or of a module in it",
                    next_step="call cached() with the module that DistributedDataParallel is to "
                    "wrap",
                )
        self._wrappers.add(running)

    def digest_of_gradients(self, optimizer: Optimizer) -> int:
        """Return a digest of some gradients that all ranks must have alike at a step; 0: of none.

        They are those that a DDP has averaged, or without one the other gradients of the optimizer
        that makes the step.
        """
        if self._wrappers:
            # A pass under no_sync() leaves gradients of this rank. Added up: a set has no order.
            synced = [wrapper for wrapper in self._wrappers if wrapper.require_forward_param_sync]
            return sum(_digest(self._outside(wrapper.parameters())) for wrapper in synced)
        if self._has_warned:
            return 0
        all_parameters = (
            parameter for group in optimizer.param_groups for parameter in group["params"]
        )
        return _digest(self._outside(all_parameters))

    def _outside(self, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
        return (parameter for parameter in parameters if id(parameter) not in self._ids)

    def notice_other_gradients(self, ranks: Sequence[int]) -> None:
        """Refuse, or warn once, that replicas of the dense layers will drift apart.

        DDP gives all ranks the same bits. What a script averages may be in pieces that are not
        known as such.

        Args:
            ranks: those whose digest differs from that of rank 0.

        Raises:
            RanksDiffer: DDP has averaged the gradients.
        """
        error = RanksDiffer(
            "the gradients of dense layers at an optimizer's step",
            found=f"other values on ranks {list(ranks)} than on rank 0",
            expected="averages, which are the same on all ranks: replicas drift apart otherwise",
            next_step="clip gradients with recpoint.embeddings.clip_grad_norm_(): torch's clips "
            "each rank by another factor, because each has gradients of its own batch for the "
            "tables; or see what else changes gradients on some ranks",
        )
        if self._wrappers:
            raise error
        self._has_warned = True
        _log.warning("%s", error)


def _digest(parameters: Iterable[Tensor]) -> int:
    """Return a digest of some values of gradients, 32 bits; waits for the device that has them.

    It is equal on ranks whose gradients have the same bits. Sparse gradients, and those in pieces
    on several ranks, are left out.
    """
    gradients = [
        parameter.grad
        for parameter in parameters
        if parameter.grad is not None
        and parameter.grad.layout is torch.strided
        and not hasattr(parameter.grad, "full_tensor")
    ]
    samples = [
        gradient.detach().flatten()[:_MOST_VALUES] for gradient in gradients[-_MOST_GRADIENTS:]
    ]
    digest = 0
    for values in samples:
        digest = zlib.crc32(values.cpu().contiguous().view(torch.uint8).numpy().data, digest)
    return digest
