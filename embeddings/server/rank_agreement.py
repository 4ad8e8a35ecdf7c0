"""Tells all ranks of a training what rank 0 has found, or that it failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recpoint.embeddings.home.ranks import rank_and_count
from recpoint.embeddings.parity.stripes import Parity
from recpoint.errors import RankLost, ServerLost, SettingsError

__all__ = ["found_by_first_rank", "require_parity_of_first_rank"]


def found_by_first_rank(
    find: Callable[[], dict[str, Any]], *, timeout_seconds: float
) -> dict[str, Any]:
    """Call `find` on rank 0, and return its result on all ranks. All ranks call this together.

    Args:
        find: returns what JSON can carry.
        timeout_seconds: the longest time that a rank waits for the others.

    Raises:
        RankLost: a rank did not answer.
        ServerLost: `find` failed on rank 0, and this is another rank. Rank 0 raises the error.
    """
    rank, count = rank_and_count()
    if count == 1:
        return find()
    failed: Exception | None = None
    message: dict[str, Any] = {}
    if rank == 0:
        try:
            message = {"found": find()}
        except Exception as error:
            failed = error
            message = {"failed": str(error)}
    data = json.dumps(message).encode()
    try:
        # A group of its own, on the CPU, because training may have another backend.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        try:
            size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
            dist.broadcast(size, 0, group=group)
            text = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
            if rank == 0:
                text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(text, 0, group=group)
        finally:
            dist.destroy_process_group(group)
    except RuntimeError as error:
        if failed is not None:
            raise failed from None
        raise RankLost(
            f"rank {rank}",
            found=f"no answer from the other ranks: {error}",
            expected=f"that all ranks ask for embedding servers, within {timeout_seconds:g} s",
            next_step="see the other ranks' logs",
        ) from error
    if failed is not None:
        raise failed
    if rank == 0:
        answer: dict[str, Any] = message["found"]
        return answer
    answer_text: dict[str, Any] = json.loads(text.numpy().tobytes())
    if "failed" in answer_text:
        raise ServerLost(
            "embedding servers",
            found=f"an error on rank 0: {answer_text['failed']}",
            expected="servers that rank 0 has started",
            next_step="see the log of rank 0",
        )
    answer = answer_text["found"]
    return answer


def require_parity_of_first_rank(
    function: str, own: Parity | None, told: dict[str, int] | None
) -> None:
    """Refuse another parity than that of rank 0: rows would be looked for in other slots.

    Args:
        function: what was called with `parity`.
        own: the parity of this rank.
        told: the fields of rank 0's.

    Raises:
        SettingsError: says what both are.
    """
    first = told and Parity(**told)
    if own != first:
        raise SettingsError(
            f"{function}(parity=...)",
            found=f"{own} on rank {rank_and_count()[0]}, {first} on rank 0",
            expected="the same parity on all ranks",
            next_step="call it with the same parity on all ranks",
        )
