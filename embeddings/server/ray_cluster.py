"""Starts, finds and ends the embedding servers of one run on a Ray cluster.

Each server is an actor with a name that follows from the run, in the namespace `recpoint`. The
drivers of one job under torchrun are separate jobs of Ray, which see each other's actors only by a
name in a fixed namespace.

An actor stays on its node while that node lives. If the node is lost, Ray starts the actor on
another node that has the memory for it. The actor is empty then, and has another incarnation.
"""

from __future__ import annotations

import hashlib
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recpoint.embeddings.server.ray_head import BEFORE_RAY_SECONDS, Head, patience_of_ray
from recpoint.embeddings.server.ray_transport import RayTransport, ServerActor, actor_options
from recpoint.embeddings.server.tcp import TcpTransport
from recpoint.embeddings.server.transport import Transport
from recpoint.errors import ServerLost, SettingsError

__all__ = ["LOCAL_STORE_BYTES", "NAMESPACE", "RayCluster", "run_digest"]

NAMESPACE: Final = "recpoint"
#: Of a cluster that recpoint starts. Ray would take 30 % of memory, in /dev/shm, as staging does.
LOCAL_STORE_BYTES: Final = 256 << 20
_POLL_SECONDS: Final = 0.02
_CONNECT_SECONDS: Final = 20.0
#: An actor that was found lost, and whose process Ray takes for alive, has this time to answer.
_HANG_SECONDS: Final = 5.0


def run_digest(run: str) -> str:
    """Return 16 hexadecimal digits that stand for a run, in names of actors."""
    return hashlib.sha256(run.encode()).hexdigest()[:16]


class RayCluster:
    """This process's connection to a Ray cluster. All homes of the process share it.

    If the process was connected before, that connection is used and stays. Otherwise the process
    leaves the cluster when the last home is closed.

    Args:
        address: as for `recpoint.embeddings.ray`.

    Attributes:
        head: of the cluster. If it is away too long, the process leaves the cluster as well.

    Raises:
        SettingsError: there is no such cluster, or the process is connected to another one.
    """

    _lock: Final = threading.Lock()
    _homes = 0  # that use a connection which recpoint has made

    def __init__(self, address: str | None) -> None:
        self._is_ours = False
        self._started: list[Any] = []
        with RayCluster._lock:
            if not ray.is_initialized():
                _connect(address)
                self._is_ours = True
            else:
                if address not in (None, "local", "auto"):
                    _require_address(address)
                self._is_ours = RayCluster._homes > 0
            RayCluster._homes += self._is_ours
        self.head = Head(
            ray.get_runtime_context().gcs_address,
            seconds=max(0.0, patience_of_ray() - BEFORE_RAY_SECONDS),
            give_up=self._forsake,
        )

    def leave(self) -> None:
        """Leave the cluster, unless others in this process use it. A second call does nothing."""
        self.head.stop()
        with RayCluster._lock:
            RayCluster._homes -= self._is_ours
            if self._is_ours and not RayCluster._homes:
                ray.shutdown()
            self._is_ours = False

    def _forsake(self) -> None:
        """Leave a cluster whose head has gone, also if other homes use it: they have no head, too.

        Otherwise Ray would end this process. A connection of the script's own is not ended.
        """
        self._started.clear()
        with RayCluster._lock:
            RayCluster._homes -= self._is_ours
            if self._is_ours and ray.is_initialized():
                ray.shutdown()
            self._is_ours = False

    def start(
        self,
        digest: str,
        *,
        per_node: int,
        memory_bytes: int | None,
        is_detached: bool,
        token: bytes | None,
        call_seconds: float = 60.0,
        timeout_seconds: float,
    ) -> list[str]:
        """Start servers on all nodes, in place of those that this run has already.

        Args:
            digest: what the names of the actors begin with.
            per_node: servers on each node.
            memory_bytes: of each server, as Ray's scheduler counts them; None: not counted.
            is_detached: whether the actors go on when this process ends.
            token: what callers over TCP know; None: the servers take actor calls only.
            call_seconds: how long a call between two servers may take.
            timeout_seconds: the longest time to wait for all of them.

        Returns:
            the names of the actors, in the order of the servers.

        Raises:
            SettingsError: a node has not enough memory for its servers.
            ServerLost: a server does not start. `end` ends the others.
        """
        deadline = time.monotonic() + timeout_seconds
        nodes = sorted(
            (node for node in ray.nodes() if node["Alive"]),
            key=lambda node: (node["NodeManagerAddress"], node["NodeID"]),
        )
        for node in nodes:
            node_bytes = node["Resources"].get("memory", 0)
            if memory_bytes is not None and node_bytes < per_node * memory_bytes:
                raise SettingsError(
                    "memory_bytes",
                    found=f"{memory_bytes} for each of {per_node} servers on node"
                    f" {node['NodeManagerAddress']}",
                    expected=f"at most {int(node_bytes)} together, which Ray counts there",
                    next_step="pass fewer bytes, or start the node with `ray start --memory`",
                )
        self._replace(digest, deadline)
        places = [node["NodeID"] for node in nodes for _ in range(per_node)]
        names = [f"{digest}-{number}" for number in range(len(places))]
        titles = [_title(number, names) for number in range(len(places))]
        for name, title, node_id in zip(names, titles, places, strict=True):
            options = actor_options() | {
                "name": name,
                "namespace": NAMESPACE,
                # Soft: once the node is lost, the actor may start on another one. A hard affinity
                # would end it for ever, and a placement group would wait for a new node.
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True),
            }
            if is_detached:
                options["lifetime"] = "detached"
            if memory_bytes is not None:
                options["memory"] = memory_bytes
            actor_class = ray.remote(ServerActor).options(**options)
            self._started.append(actor_class.remote(title, token, call_seconds))
        for actor, title in zip(self._started, titles, strict=True):
            seconds_left = max(0.0, deadline - time.monotonic())
            RayTransport(actor, name=title, timeout_seconds=seconds_left).hello()
        return names

    def transport(
        self,
        number: int,
        names: Sequence[str],
        *,
        token: bytes | None,
        timeout_seconds: float,
        ends_hanging: bool = False,
    ) -> Transport:
        """Return a transport to an actor that was started. Waits for one that starts again.

        Args:
            number: of the server.
            names: of all actors.
            token: as the actors were started with; None: actor calls.
            timeout_seconds: the longest time that a call may take.
            ends_hanging: whether the actor's process is ended if it does not answer.

        Raises:
            ServerLost: there is no such actor, or it does not answer.
            ClusterLost: the cluster's head was away too long.
        """
        self.head.wait()
        title = _title(number, names)
        try:
            actor = ray.get_actor(names[number], namespace=NAMESPACE)
        except ValueError as error:
            raise ServerLost(
                title,
                found="no such actor on this Ray cluster",
                expected="the actor that rank 0 has started",
                next_step="connect all ranks to one cluster; see `ray list actors`",
            ) from error
        by_calls = RayTransport(actor, name=title, timeout_seconds=timeout_seconds)
        if ends_hanging:
            by_calls.end_if_hanging(min(_HANG_SECONDS, timeout_seconds))
        if token is None:
            return by_calls
        address = by_calls.address()
        name = f"{title} at {address[0]}:{address[1]}"
        return TcpTransport(address, token, name=name, timeout_seconds=timeout_seconds)

    def end(self) -> None:
        """End the servers that were started here. Another server that took a name stays."""
        started, self._started = self._started, []
        if ray.is_initialized():
            for actor in started:
                ray.kill(actor, no_restart=True)

    def _replace(self, digest: str, deadline: float) -> None:
        """End all servers of a run, and wait until their names are free.

        Raises:
            ServerLost: one does not end in time.
        """
        while names := self._names(digest):
            for name in names:
                try:
                    ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
                except (ValueError, ray.exceptions.RayActorError):
                    continue  # has ended meanwhile
            if time.monotonic() > deadline:
                raise ServerLost(
                    f"actor {names[0]} in namespace {NAMESPACE}",
                    found="an embedding server of an earlier training, which does not end",
                    expected="that it ends when Ray is asked to end it",
                    next_step="see `ray list actors`; end its process",
                )
            time.sleep(_POLL_SECONDS)

    @staticmethod
    def _names(digest: str) -> list[str]:
        return [
            actor["name"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == NAMESPACE and actor["name"].startswith(f"{digest}-")
        ]


def _title(number: int, names: Sequence[str]) -> str:
    return f"embedding server {number + 1} of {len(names)} (Ray actor {names[number]})"


def _connect(address: str | None) -> None:
    """Connect to a cluster, or start one on this machine.

    Raises:
        SettingsError: there is no such cluster.
    """
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False}
    if address in (None, "local"):
        options |= {"object_store_memory": LOCAL_STORE_BYTES, "include_dashboard": False}
        address = "local"
    elif address.startswith("ray://"):
        raise SettingsError(
            "address",
            found=f"{address!r}, of a Ray client's server",
            expected="trainers on machines of the cluster, connected by HOST:PORT or 'auto'",
            next_step="run `ray start --address HOST:PORT` on this machine, and pass 'auto'",
        )
    elif address != "auto":
        _require_listener(address)
    # Ray takes SIGTERM for itself, which belongs to the training script.
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, logging_level="warning", **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SettingsError(
            "address",
            found=f"{address!r}, and Ray says: {error}",
            expected="a Ray cluster that runs there, with this version of Ray and Python",
            next_step="`ray start --head`, or address=None, which starts one on this machine",
        ) from error
    finally:
        if is_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _require_listener(address: str) -> None:
    """Refuse an address where nobody listens: Ray would try for many minutes.

    Raises:
        SettingsError: names the address.
    """
    host, _, port = _resolved(address).rpartition(":")
    if not host or not port.isdecimal():
        failure = "which is no HOST:PORT"
    else:
        try:
            endpoint = (host.strip("[]"), int(port))
            socket.create_connection(endpoint, timeout=_CONNECT_SECONDS).close()
            return
        except (OSError, OverflowError) as error:
            failure = f"and the system says: {error}"
    raise SettingsError(
        "address",
        found=f"{address!r}, {failure}",
        expected="HOST:PORT of a Ray cluster's head, which `ray start --head` prints",
        next_step="`ray start --head` there, or address=None, which starts one on this machine",
    )


def _resolved(address: str) -> str:
    """Return an address as Ray takes it: names of this machine stand for its address."""
    host, _, port = address.rpartition(":")
    if host in ("127.0.0.1", "localhost", "[::1]"):
        return f"{ray.util.get_node_ip_address()}:{port}"
    return address


def _require_address(address: str) -> None:
    own_address = ray.get_runtime_context().gcs_address
    if _resolved(address) != own_address:
        raise SettingsError(
            "address",
            found=f"{address!r}, in a process that is connected to {own_address}",
            expected="one Ray cluster in a process",
            next_step="pass 'auto', or call ray.shutdown() before",
        )
