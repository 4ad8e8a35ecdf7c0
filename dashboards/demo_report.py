"""What a demo tells at its end: its checkpoints, where to look, and the proof in words."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from recpoint.dashboards import terminal
from recpoint.dashboards.demo import DemoResult
from recpoint.dashboards.terminal import Listed
from recpoint.format.naming import ManifestName

__all__ = ["report_views"]


def report_views(result: DemoResult, *, server_stopped: bool) -> list[RenderableType]:
    """For a terminal; the JSON line that follows them is not among them."""
    entries = [
        Listed(name=ManifestName(manifest.step, manifest.generation), live=True, manifest=manifest)
        for manifest in reversed(result.manifests)
    ]
    document = result.document
    look = f"{document['prefect_ui']}, flow persist, tag run:{result.run_url.rpartition('/')[2]}"
    if server_stopped:
        look += " (the server was stopped: recpoint server start)"
    elif result.ui.own_server:
        look += " (it stays; to stop it: recpoint server stop)"
    fields: list[tuple[str, object]] = [
        ("run", f"{result.run_url} (recpoint list, show, check, restore)"),
        (
            "persisted",
            f"{document['persisted_by_prefect']} as Prefect flows, "
            f"{document['persisted_without_prefect']} without Prefect",
        ),
        ("look at", look),
        ("AUC", f"{document['auc']:.6f}, uninterrupted {document['auc_uninterrupted']:.6f}"),
    ]
    return [
        Text(),
        terminal.checkpoints_table(entries, title="Checkpoints"),
        Text(),
        terminal.fields_table(fields),
        *terminal.check_views(result.check)[-1:],
        _proof(result),
    ]


def _proof(result: DemoResult) -> Text:
    document = result.document
    killed, restored = document["killed_at_step"], document["restored_step"]
    ranks = document["ranks"]
    who = f"rank {ranks - 1} of {ranks} " if ranks > 1 else ""
    story = f"{who}killed with SIGKILL at step {killed}, restored at step {restored}: after "
    story += (
        f"{document['steps']} steps weights, optimizer state, random generators and next batch "
    )
    if document["resumed_bit_identical"]:
        proof = "are the same, bit for bit, as those of the run that was never interrupted."
        return Text.assemble(("proof: ", "bold green"), story, proof)
    differing = ", ".join(name for name, same in document["digests_equal"].items() if not same)
    if document["bits"] != "lossless":
        proof = f"differ ({differing}), as they must at {document['bits']} bits; compare the AUC."
        return Text.assemble(("not bit-identical: ", "yellow"), story, proof)
    return Text.assemble(("NOT PROVEN: ", "bold red"), story, f"differ: {differing}.")
