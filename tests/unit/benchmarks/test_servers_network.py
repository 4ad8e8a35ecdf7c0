"""The network of namespaces on which embedding servers are measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks.servers.network import NoNetwork, ShapedNetwork
from tests.polling import until

_RECEIVES = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as listener:
    print("listens", flush=True)
    connection, _ = listener.accept()
    while connection.recv(1 << 16):
        pass
"""
_SENDS = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""
_HOLDS = """
import time
from benchmarks.servers.network import ShapedNetwork
with ShapedNetwork() as network:
    nodes = network.add_nodes(2)
    print(*(node.inside("true")[1].split("/")[2] for node in nodes), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def network() -> Iterator[ShapedNetwork]:
    try:
        with ShapedNetwork() as network:
            network.add_nodes(2)
            yield network
    except NoNetwork as error:
        pytest.skip(f"not run: {error}")


def test_a_link_carries_no_more_than_its_rate(network: ShapedNetwork) -> None:
    one, other = network.add_nodes(2)
    network.shape(5e6)
    before = one.traffic(), other.traffic()
    with subprocess.Popen(
        other.inside(sys.executable, "-c", _RECEIVES, other.address), stdout=subprocess.PIPE
    ) as receiver:
        assert receiver.stdout is not None and receiver.stdout.readline() == b"listens\n"
        begun = time.perf_counter()
        subprocess.run(
            one.inside(sys.executable, "-c", _SENDS, other.address, "5000000"), check=True
        )
        receiver.wait()
        seconds = time.perf_counter() - begun
    assert seconds > 0.9
    sent = one.traffic().up - before[0].up
    assert 5_000_000 < sent < 5_500_000
    assert other.traffic().down - before[1].down >= 5_000_000


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left(network: ShapedNetwork, how: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLDS], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        held = [int(word) for word in holder.stdout.readline().split()]
        assert len(held) == 2 and all(os.path.exists(f"/proc/{pid}") for pid in held)
        holder.send_signal(how)
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in held) or None)
