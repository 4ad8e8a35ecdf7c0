"""Refuses lookups that find no rows, and lookups of training that cannot be repeated."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from recpoint.embeddings.home.ranks import rank_and_count
from recpoint.errors import SettingsError

__all__ = ["refuse_caller", "refuse_no_memory"]


def refuse_caller(module: nn.Module, weight: Tensor, subject: str) -> None:
    """Refuse a caller that would train a keyed table wrongly.

    Args:
        module: the module that is looked up.
        weight: its weight.
        subject: the table, as messages name it.

    Raises:
        SettingsError: it is such a caller.
    """
    if torch._C._current_graph_task_id() != -1:
        found = "a lookup within a backward pass, as activation checkpointing does it again"
        expected = "lookups in the forward pass only, since each counts"
        next_step = "look keys up outside of what torch.utils.checkpoint calls"
    elif rank_and_count()[1] > 1:
        found = f"training on {rank_and_count()[1]} ranks"
        expected = "one trainer: ranks would give different keys to the same rows"
        next_step = "train keyed tables in one process"
    elif "_is_replica" in module.__dict__:
        found, expected = "a replica of nn.DataParallel", "the module itself"
        next_step = "train keyed tables in one process, without nn.DataParallel"
    elif not isinstance(weight, Parameter):
        found = "a weight in place of its parameter, which is not what the optimizer steps"
        expected = "a parameter, into which rows of new keys can be written"
        next_step = "leave the table out of torch.func.functional_call and of parametrizations"
    elif weight.is_cpu and weight.untyped_storage().is_shared():
        found = "a weight whose memory processes share, while each has its own keys"
        expected, next_step = "one process that trains", "do not call share_memory()"
    elif torch._C._get_tracing_state() is not None:
        found, expected = "torch.jit.trace", "a module that Python calls"
        next_step = "trace the model in evaluation, or with to_table(vocabulary) in its place"
    else:
        return
    raise SettingsError(subject, found=found, expected=expected, next_step=next_step)


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
