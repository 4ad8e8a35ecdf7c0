"""Makes a small network on this machine: nodes with links of a chosen rate, joined by one switch.

A node is a network namespace. Its link to the switch is a pair of virtual devices, and `tc tbf`
bounds the rate in each direction. A process holds each namespace, and ends when its standard input
does. So the whole network is gone when this process ends, however it ends. The network of the
machine itself is not touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

__all__ = ["LINK", "NoNetwork", "Node", "ShapedNetwork", "Traffic"]

#: Name of a node's own device.
LINK = "link0"

_TOOLS = ("unshare", "nsenter", "ip", "tc")
_PATIENCE_SECONDS = 10.0
#: A bucket holds what a link carries in this time, and its queue what it carries in the other.
_BURST_SECONDS = 0.002
_QUEUE_SECONDS = 0.1
#: The longest packet that a virtual device hands over at once.
_LEAST_BURST_BYTES = 1 << 16


class NoNetwork(Exception):
    """This machine or this user cannot make the network; the message says why."""


class Traffic(NamedTuple):
    """Bytes that a link has carried, with headers.

    Attributes:
        up: from the node.
        down: to the node.
    """

    up: int
    down: int


class _Namespace:
    """A network namespace that a process of this class holds."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["unshare", "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at a terminal is for the benchmark
        )
        self.path = f"/proc/{self._process.pid}/ns/net"
        self.pid = self._process.pid
        deadline = time.monotonic() + _PATIENCE_SECONDS
        host_namespace = os.readlink("/proc/self/ns/net")
        while self._process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                if os.readlink(self.path) != host_namespace:
                    return
            time.sleep(0.01)
        complaint = self.close()
        raise NoNetwork(f"no network namespace: {complaint}")

    def close(self) -> str:
        """End the process; return what it said of errors. A second call does nothing."""
        assert self._process.stdin is not None and self._process.stderr is not None
        if self._process.stdin.closed:
            return ""
        self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._process.stderr as stderr:
            return stderr.read().decode().strip()

    def inside(self, *command: str) -> list[str]:
        """Return a command that runs another one in this namespace, as the same process."""
        return ["nsenter", f"--net={self.path}", *command]

    def run(self, *command: str) -> str:
        """Run a command in this namespace; return what it prints."""
        process = subprocess.run(self.inside(*command), capture_output=True, text=True, check=False)
        if process.returncode:
            complaint = process.stderr.strip() or f"exit code {process.returncode}"
            raise NoNetwork(f"`{' '.join(command[:4])}` fails: {complaint}")
        return process.stdout


class Node:
    """A node of the network.

    Attributes:
        address: IPv4 address of its link.
    """

    def __init__(self, hub: _Namespace, number: int) -> None:
        self.address = f"10.77.0.{number + 1}"
        self._hub, self._port = hub, f"port{number}"
        self._namespace = _Namespace()
        try:
            hub.run(
                "ip", "link", "add", self._port, "type", "veth",
                "peer", "name", LINK, "netns", str(self._namespace.pid),
            )  # fmt: skip
            hub.run("ip", "link", "set", self._port, "master", "switch", "up")
            self._namespace.run("ip", "address", "add", f"{self.address}/24", "dev", LINK)
            for device in ("lo", LINK):
                self._namespace.run("ip", "link", "set", device, "up")
        except BaseException:
            self.close()
            raise

    @property
    def network(self) -> str:
        """Path of its network namespace."""
        return self._namespace.path

    def inside(self, *command: str) -> list[str]:
        """Return a command that runs another one on this node, as the same process."""
        return self._namespace.inside(*command)

    def shape(self, bytes_per_s: float | None) -> None:
        """Bound the rate of the link in each direction; None: no bound."""
        for namespace, device in ((self._namespace, LINK), (self._hub, self._port)):
            if bytes_per_s is None:
                with suppress(NoNetwork):  # it has none
                    namespace.run("tc", "qdisc", "delete", "dev", device, "root")
                continue
            burst = max(_LEAST_BURST_BYTES, round(bytes_per_s * _BURST_SECONDS))
            namespace.run(
                "tc", "qdisc", "replace", "dev", device, "root", "tbf",
                "rate", f"{round(8 * bytes_per_s)}bit", "burst", f"{burst}b",
                "latency", f"{round(1000 * _QUEUE_SECONDS)}ms",
            )  # fmt: skip

    def traffic(self) -> Traffic:
        """Return what the link has carried since it was made."""
        (port,) = json.loads(self._hub.run("ip", "-s", "-j", "link", "show", self._port))
        counters = port["stats64"]
        return Traffic(up=counters["rx"]["bytes"], down=counters["tx"]["bytes"])

    def close(self) -> None:
        """Give the node up; processes on it must have ended."""
        self._namespace.close()


class ShapedNetwork:
    """Nodes that reach each other, and nothing else.

    As a context manager, it is gone at the end of the block.

    Raises:
        NoNetwork: this machine or this user cannot make one.
    """

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise NoNetwork("network namespaces need Linux")
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            raise NoNetwork(f"{', '.join(missing)}: not installed (util-linux, iproute2)")
        if os.geteuid() != 0:
            raise NoNetwork("network namespaces need root")
        self._nodes: list[Node] = []
        self._hub = _Namespace()
        try:
            self._hub.run("ip", "link", "add", "switch", "type", "bridge")
            self._hub.run("ip", "link", "set", "switch", "up")
        except BaseException:
            self.close()
            raise

    def add_nodes(self, count: int) -> Sequence[Node]:
        """Return new nodes, whose links have no bound yet.

        Raises:
            NoNetwork: the system refuses one, or cannot shape its link.
        """
        nodes = []
        for _ in range(count):
            node = Node(self._hub, len(self._nodes))
            self._nodes.append(node)
            node.shape(1e9)
            node.shape(None)
            nodes.append(node)
        return nodes

    def shape(self, bytes_per_s: float | None) -> None:
        """Bound the rate of all links in each direction; None: no bound."""
        for node in self._nodes:
            node.shape(bytes_per_s)

    def close(self) -> None:
        """Remove everything. A second call does nothing."""
        while self._nodes:
            self._nodes.pop().close()
        self._hub.close()

    def __enter__(self) -> ShapedNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
