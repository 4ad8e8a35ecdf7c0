"""Makes a home of embedding servers on a Ray cluster."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import Literal, get_args

from recpoint.catalog.store.run_url import parse_run_url
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.home.ranks import rank_and_count
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.protected_home import made_home
from recpoint.embeddings.server.rank_agreement import (
    found_by_first_rank,
    require_parity_of_first_rank,
)
from recpoint.embeddings.server.ray_head import WatchedTransport
from recpoint.embeddings.server.transport import Transport
from recpoint.errors import SettingsError
from recpoint.installation import install_command

__all__ = ["ray"]

_Transport = Literal["tcp", "ray"]


def ray(
    address: str | None = "auto",
    per_node: int = 1,
    *,
    run: str | None = None,
    memory_bytes: int | None = None,
    transport: _Transport = "tcp",
    parity: Parity | None = None,
    timeout_seconds: float = 60.0,
    start_seconds: float = 300.0,
) -> Home:
    """Make a home of embedding servers on a Ray cluster: `per_node` servers on each of its nodes.

    recpoint must be installed on each node. Under torch.distributed all ranks call this together:
    rank 0 starts the servers, and the others find them.

    The servers' rows are in memory. A server that is lost, or that Ray has started again, has no
    rows. Without parity, calls then raise `ServerLost` until the last checkpoint is restored. With
    parity, the rows are recovered from the other servers while training goes on. A server that
    lives and does not answer counts as lost: rank 0 has Ray start it again.

    If the cluster's head has gone, training goes on for 45 s, and in that time the head may come
    back. Then calls raise `ClusterLost`, because Ray ends its processes 60 s after the loss of the
    head. Its environment variable RAY_gcs_rpc_server_reconnect_timeout_s sets another time than
    60 s, for all processes of the cluster.

    Args:
        address: "auto": the cluster that runs on this machine, or that of RAY_ADDRESS. HOST:PORT:
            this cluster. None or "local": a new cluster on this machine, until the home is closed.
            A process that is connected to a cluster stays connected to it.
        per_node: servers on each node.
        run: URL of the run that is trained. The servers then outlive this process if it is killed,
            and the next training of the run ends and replaces them. None: the servers end with this
            process.
        memory_bytes: memory that one server may need, which Ray's scheduler then keeps free for it.
            Without it, Ray may place a server where there is no room, and its memory monitor may
            end a server to make room.
        transport: how rows travel. "tcp": over connections to the servers, which listen at the
            address of their node and answer those who know a token; rows are not encrypted, as
            with Ray. "ray": by actor calls, for networks where only Ray's own ports are open;
            they take about three times as long.
        parity: how many servers may be lost at a time without a return to a checkpoint, and how
            many rows share parity; needs "tcp". Members of a stripe are on different nodes, as far
            as there are enough nodes. None: no parity.
        timeout_seconds: the longest time for one call.
        start_seconds: the longest time for all servers to start.

    Raises:
        SettingsError: Ray is not installed, there is no such cluster, a node has not enough memory,
            an argument cannot work, or `parity` is another one than on rank 0.
        ServerLost: a server does not start.
        RankLost: another rank does not answer.
    """
    for name, value in (
        ("per_node", per_node),
        ("memory_bytes", memory_bytes),
        ("timeout_seconds", timeout_seconds),
        ("start_seconds", start_seconds),
    ):
        if value is not None and not value > 0:
            raise SettingsError(
                name, found=repr(value), expected="more than 0", next_step="pass another value"
            )
    if transport not in get_args(_Transport):
        raise SettingsError(
            "transport",
            found=repr(transport),
            expected="'tcp' or 'ray'",
            next_step="pass another value",
        )
    if parity is not None and transport != "tcp":
        raise SettingsError(
            "transport",
            found=f"{transport!r} with parity",
            expected="'tcp': servers that keep parity call each other",
            next_step="leave transport out",
        )
    if find_spec("ray") is None:
        raise SettingsError(
            "recpoint.embeddings.ray",
            found="no ray installed",
            expected="ray, on this machine and on all nodes of the cluster",
            next_step=install_command("servers"),
        )
    from recpoint.embeddings.server.ray_cluster import RayCluster, run_digest

    key = secrets.token_hex(16) if run is None else parse_run_url(run).url
    rank, ranks = rank_and_count()
    if ranks > 1 and address in (None, "local"):
        raise SettingsError(
            "address",
            found=f"{address!r} in a training of {ranks} ranks",
            expected="one cluster for all ranks",
            next_step="`ray start --head` before training, and pass 'auto'",
        )
    cluster = RayCluster(address)
    homes: list[Home] = []
    digest = run_digest(key)

    def at_close() -> None:
        try:
            cluster.end()
        finally:
            cluster.leave()

    def joined(
        names: list[str],
        token: bytes | None,
        *,
        owner: int | None,
        hosts: list[str] | None,
    ) -> ServedHome:
        def connected(number: int, *, was_lost: bool = False) -> Transport:
            transport = cluster.transport(
                number,
                names,
                token=token,
                timeout_seconds=timeout_seconds,
                ends_hanging=was_lost and rank == 0,
            )
            return WatchedTransport(transport, cluster.head)

        if parity is not None:
            parity.require_servers(len(names))
        return made_home(
            [connected(number) for number in range(len(names))],
            parity=parity,
            timeout_seconds=timeout_seconds,
            owner=owner,
            hosts=hosts,
            # Ray starts a server again by itself if its process ends. It then listens at another
            # port.
            revive=partial(connected, was_lost=True),
            at_close=at_close,
        )

    def start() -> dict[str, object]:
        token = secrets.token_bytes(32) if transport == "tcp" else None
        names = cluster.start(
            digest,
            per_node=per_node,
            memory_bytes=memory_bytes,
            is_detached=run is not None,
            token=token,
            call_seconds=timeout_seconds,
            timeout_seconds=start_seconds,
        )
        home = joined(names, token, owner=None, hosts=None)
        homes.append(home)
        hosts = [greeting.host for greeting in home.greetings]
        return {
            "names": names,
            "token": token and token.hex(),
            "owner": home.owner,
            "hosts": hosts,
            "parity": parity and asdict(parity),
        }

    try:
        first_rank = found_by_first_rank(start, timeout_seconds=start_seconds + timeout_seconds)
        if rank == 0:
            return homes[0]
        require_parity_of_first_rank("ray", parity, first_rank["parity"])
        token = first_rank["token"] and bytes.fromhex(first_rank["token"])
        return joined(
            first_rank["names"], token, owner=first_rank["owner"], hosts=first_rank["hosts"]
        )
    except BaseException:
        if homes:
            homes[0].close()
        else:
            at_close()
        raise
