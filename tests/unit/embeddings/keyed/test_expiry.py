"""Rows that expire: those that a pass over the whole table finds in each step."""

from __future__ import annotations

import pytest
import torch

from recpoint.embeddings.keyed.expiry import Expiry


@pytest.mark.parametrize("ttl_batches", [1, 5, 63, 64, 200])
def test_the_rows_that_expire_are_those_of_a_pass_in_each_step(ttl_batches: int) -> None:
    generator = torch.Generator().manual_seed(1)
    last_use = torch.full((60,), -1, dtype=torch.int64)
    expiry = Expiry(ttl_batches)
    expired_rows = 0
    for steps in range(6 * ttl_batches):
        expired = expiry.expired(last_use, steps)
        due = (last_use >= 0) & (last_use < steps - ttl_batches)
        assert expired.sort().values.tolist() == torch.nonzero(due).view(-1).tolist()
        assert not len(expiry.expired(last_use, steps))
        last_use[expired] = -1
        expired_rows += len(expired)
        if steps % (ttl_batches // 3 + 1) == 0:
            last_use[torch.randint(1, 60, (3,), generator=generator)] = steps
        if steps % 37 == 0:
            last_use[torch.randint(1, 60, (1,), generator=generator)] = -1
        if steps % 101 == 100:
            expiry.forget()
            expiry.expired(last_use, steps)
    assert expired_rows > 3
