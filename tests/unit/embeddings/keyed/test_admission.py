"""Which keys get rows: those seen often enough, of whom old lookups fade."""

from __future__ import annotations

import torch

from recpoint.embeddings.keyed.admission import Probability, Seen


def test_a_key_is_admitted_when_it_is_seen_for_the_nth_time() -> None:
    gate = Seen(times=3).gate(10)
    keys = torch.tensor([-(2**63), -1, 5])
    for _ in range(2):
        assert not len(gate.admitted(keys, 0))
        gate.count(keys)
    assert torch.equal(gate.admitted(keys, 0), keys)
    assert not len(gate.admitted(torch.tensor([6]), 0))


def test_counts_are_halved_after_eight_lookups_a_row() -> None:
    gate = Seen(times=4).gate(2000)
    key = torch.tensor([7])
    for _ in range(3):
        gate.count(key)
    gate.count(torch.arange(100, 16_096))  # 15,999 of 16,000
    assert torch.equal(gate.admitted(key, 0), key)
    gate.count(torch.tensor([9]))
    assert not len(gate.admitted(key, 0))  # seen once, after halving
    gate.count(key)
    assert not len(gate.admitted(key, 0))
    gate.count(key)
    assert torch.equal(gate.admitted(key, 0), key)


def test_a_key_among_many_that_come_once_is_admitted() -> None:
    gate = Seen(times=10).gate(1000)
    key = torch.tensor([-3])
    for batch in range(9):
        assert not len(gate.admitted(key, 0))
        gate.count(torch.cat([key, torch.arange(700 * batch, 700 * (batch + 1))]))
    assert torch.equal(gate.admitted(key, 0), key)
    assert not len(gate.admitted(torch.arange(6_300), 0))


def test_a_gate_goes_on_from_what_it_stored() -> None:
    gate, other = Seen(times=3).gate(2000), Seen(times=3).gate(2000)
    for first in range(0, 18_000, 900):
        gate.count(torch.arange(first, first + 900) % 2_400)
    state = gate.state_dict()
    assert state["added"] == 2_000
    other.load_state_dict(state)
    keys = torch.arange(2500)
    assert state["counts"].max() > 0
    for gate_after in (gate, other):
        for _ in range(2):
            gate_after.count(torch.arange(600))
    admitted = gate.admitted(keys, 0)
    assert 0 < len(admitted) < 2500
    assert torch.equal(admitted, other.admitted(keys, 0))
    assert gate.state_dict()["added"] == other.state_dict()["added"] == 3_200
    other.load_state_dict({})
    assert not other.state_dict()["counts"].any()


def test_a_probability_is_a_share_of_the_keys_of_each_step() -> None:
    rule, keys = Probability(share=0.2), torch.arange(20_000)
    shares = [len(rule.admitted(keys, steps)) / len(keys) for steps in (0, 1)]
    assert all(abs(share - 0.2) < 0.01 for share in shares)
    assert not torch.equal(rule.admitted(keys, 0), rule.admitted(keys, 1))
    assert len(Probability(share=1).admitted(keys, 3)) == len(keys)
