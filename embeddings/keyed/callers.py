"""Refuses lookups that find no rows, and lookups of training that cannot be repeated."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from recpoint.embeddings.home.ranks import rank_and_count
from recpoint.embeddings.keyed.slot_values import SlotValues
from recpoint.errors import SettingsError

__all__ = ["refuse_caller", "refuse_no_memory", "refuse_recording"]


def refuse_caller(module: nn.Module, weight: Tensor, rows: SlotValues) -> None:
    """Refuse a caller that would train a keyed table wrongly.

    Args:
        module: the module that is looked up.
        weight: its weight.
        rows: the rows of the table's slots.

    Raises:
        SettingsError: it is such a caller.
    """
    ranks = rank_and_count()[1]
    if torch._C._current_graph_task_id() != -1:
        found = "a lookup within a backward pass, as activation checkpointing does it again"
        expected = "lookups in the forward pass only, since each counts"
        next_step = "look keys up outside of what torch.utils.checkpoint calls"
    elif ranks > 1 and rows.memory.ranks == 1:
        found = f"training on {ranks} ranks, and rows in a cache of one trainer"
        expected = "a cache whose home all ranks share, or the whole table in each rank's memory"
        next_step = "call cached() after init_process_group, with a home of "
        next_step += "recpoint.embeddings.servers(count=...)"
    elif ranks > 1 and weight is not rows.weight:
        found = f"training on {ranks} ranks with a weight that was put in place of the table's own"
        expected = "the whole table on each rank; fully_shard and its like cut parameters"
        next_step = "use DistributedDataParallel, and cut dense layers only"
    elif (
        rows.sparse
        and rows.memory.is_whole  # slots of a cache are none of its parameters
        and getattr(DistributedDataParallel, "_active_ddp_module", None) is not None
    ):
        found = "sparse=True in DistributedDataParallel"
        expected = "dense gradients: it takes sparse ones of torch's own embedding modules only"
        next_step = "build the table with sparse=False"
    elif "_is_replica" in module.__dict__:
        found, expected = "a replica of nn.DataParallel", "the module itself"
        next_step = "use DistributedDataParallel, or train in one process"
    elif not isinstance(weight, Parameter):
        found = "a weight in place of its parameter, which is not what the optimizer steps"
        expected = "a parameter, into which rows of new keys can be written"
        next_step = "leave the table out of torch.func.functional_call and of parametrizations"
    elif weight.is_cpu and weight.untyped_storage().is_shared():
        found = "a weight whose memory processes share, while each has its own keys"
        expected, next_step = "memory of this process", "do not call share_memory()"
    else:
        return
    raise SettingsError(rows.subject, found=found, expected=expected, next_step=next_step)


def refuse_no_memory(weight: Tensor, subject: str) -> None:
    """Refuse a table whose rows are nowhere.

    Args:
        weight: the weight by which the slots know their rows.
        subject: the table, as messages name it.

    Raises:
        SettingsError: the weight is on the meta device.
    """
    if weight.is_meta:
        raise SettingsError(
            subject,
            found="a weight on the meta device, which has no rows",
            expected="rows in memory, or in a cache and at home",
            next_step="call recpoint.embeddings.cached(model, home, ...) before training, or leave "
            'device="meta" out',
        )


def refuse_recording(keys: Tensor, subject: str) -> None:
    """Refuse a lookup that is recorded, to be repeated with other keys or without any.

    Recordings see operations on tensors. That a key has a row is none, so a recording would give
    the rows of these keys, or none at all, to all others.

    Args:
        keys: what is looked up.
        subject: the table, as messages name it.

    Raises:
        SettingsError: torch records it, or the keys have no values.
    """
    if torch._C._get_tracing_state() is not None:
        found = "torch.jit.trace"
    elif isinstance(keys, FakeTensor | FunctionalTensor) or (
        torch._C._len_torch_dispatch_stack()
        and any(
            isinstance(mode, FakeTensorMode | ProxyTorchDispatchMode)
            for mode in _get_current_dispatch_mode_stack()
        )
    ):
        found = "torch.export, make_fx or a FakeTensorMode"
    elif torch._C._functorch.is_functorch_wrapped_tensor(keys):
        found = "a transform of torch.func, such as vmap"
    else:
        return
    raise SettingsError(
        subject,
        found=f"a lookup within {found}",
        expected="a module that Python calls with keys",
        next_step="record the model with to_table(vocabulary) in its place, or look keys up "
        "before; torch.compile works",
    )
