"""The simulation of a fleet, against tables computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.fleet_model import PAPER_FLEET, Costs, Fleet, Rates, costs, dirty_share
from recpoint import Consecutive, Continuous
from recpoint.trainer_plugin.settings import FixedBits

#: 4 ranks on 2 hosts, rows of 64 values and 4 bytes: 260 bytes, and 1,000,000 of them.
_FLEET = Fleet(
    ranks=4,
    hosts=2,
    network_bytes=10e6,
    dim=64,
    state_bytes=4,
    staging_bytes=4 * (130e6 + 125e3 + 144 * 2**20),
    hop_seconds=0.03,
)
_MODEL_BYTES = 260e6
_RATES = Rates(
    cut_bytes=65e6,
    encode_bytes={"lossless": 26e6, 4: 13e6},
    store_bytes=20e6,
    restore_bytes={"lossless": 40e6, 4: 8e6},
    stored_row_bytes={"lossless": 256.0, 4: 36.0},
    id_bytes=0.4,
    entry_bytes=250.0,
    hop_seconds=0.02,
)


def _costs(bits: FixedBits = 4, **given: Any) -> Costs:
    return costs(
        _FLEET,
        _RATES,
        **{
            "model_bytes": _MODEL_BYTES,
            "bits": bits,
            "policy": Consecutive(),
            "minutes": 30,
            "machines": 1,
            "record_bytes": 10_000,
            **given,
        },
    )


def test_a_full() -> None:
    exact, narrow = _costs("lossless"), _costs(4)
    # 130 MB a host at 65 MB/s, and two exchanges of three hops; 130 at 26 and at 13; 130 MB and
    # 20 MB at the network's 10.
    assert exact.coordination_seconds == pytest.approx(2 * 3 * 0.05)
    assert exact.stall_seconds == narrow.stall_seconds == pytest.approx(2.3)
    assert exact.persist_seconds == 13.0
    assert narrow.persist_seconds == 10.0
    assert narrow.lag_seconds == pytest.approx(1800 + 2.3 + 10)
    assert narrow.uses["stall"] == pytest.approx(2.3 / 1800)
    # 500,000 rows of a host: 260 bytes and two bits each; two groups of 72 MiB in the agent's.
    assert exact.memory_bytes == 130e6 + 125e3 + 144 * 2**20
    assert exact.uses["memory"] == pytest.approx(0.25)
    assert _costs(staged_jobs=2).memory_bytes == 260e6 + 125e3 + 144 * 2**20
    # 65 MB of a rank are two chunks of 32 MiB; 10 MB are one.
    assert (exact.chunks, narrow.chunks) == (8, 4)
    assert exact.manifest_bytes == 2000
    assert exact.uses["manifest"] == 0.2
    assert exact.uses["upload"] == 13 / 1800
    assert narrow.uses["encode"] == 10 / 1800
    assert (exact.first, narrow.first) == ("memory", "memory")
    assert exact.nearest[1] == "manifest"
    assert _costs("lossless", record_bytes=4_000).first == "manifest"
    assert _costs(4, minutes=0.1).first == "encode"


def test_a_host_that_is_worth_two() -> None:
    two = _costs(4, machines=2)
    assert two.stall_seconds == pytest.approx(1.3)  # ranks agree no faster
    assert two.persist_seconds == 5.0  # encoding; the network stays what it is
    assert _costs("lossless", machines=2).persist_seconds == 13.0


def test_a_chain() -> None:
    # Fulls at intervals 1 and 17 of 25; in between increments of 26 % of the rows.
    full, increment = 40e6, 260_000 * 40.4
    found = _costs(4)
    assert found.capacity == pytest.approx((full + 15 * increment) / 260e6)
    assert found.restore_seconds == pytest.approx((full + 15 * increment) / 2 / 8e6)
    mean = (2 * full + 23 * increment) / 25
    assert found.write_share == pytest.approx(mean / 2 / 1800 / 10e6)
    assert found.merge_seconds == 0


def test_a_chain_that_is_merged() -> None:
    # Each increment at once: a full and an increment are read, and a full is written, 24 times.
    full, increment = 40e6, 260_000 * 40.4
    found = _costs(4, policy=Continuous(), merge_every=1)
    assert found.capacity == pytest.approx(full / 260e6)
    assert found.merge_seconds == pytest.approx(24 * (2 * full + increment) / 25 / 10e6)


def test_the_curve() -> None:
    assert dirty_share(30) == 0.26
    assert dirty_share(330) == pytest.approx(0.52, abs=0.001)
    assert dirty_share(1e9) == 1.0
    assert PAPER_FLEET.network_bytes * 8 == 25e9
    assert PAPER_FLEET.row_bytes == 260
    eight = 8e12 / PAPER_FLEET.hosts
    assert math.isclose(eight / PAPER_FLEET.network_bytes, 160)
