"""Publishes a checkpoint of a run as a flow: followers of `published` move to it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from prefect import State, flow
from prefect.artifacts import Artifact
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import Field

from recpoint.catalog.restore.order import Selection
from recpoint.catalog.store.store import open_store
from recpoint.flows.parameters import NO_RESULTS, GenerationNumber, RunUrl, StepNumber
from recpoint.tasks.publish import PublishOutcome, publish_checkpoint
from recpoint.tasks.reports import artifact_key, emit
from recpoint.tasks.run_tags import tag_flow_run

__all__ = ["publish"]


def _run_name() -> str:
    parameters = flow_run.get_parameters()
    step = parameters["step"]
    checkpoint = f"newest {parameters['which']}" if step is None else f"step {step}"
    return f"publish {checkpoint} of {parameters['run_url']}"


@flow(
    name="publish",
    flow_run_name=_run_name,
    timeout_seconds=3600,
    persist_result=False,
    result_storage=NO_RESULTS,
)
async def publish(
    run_url: RunUrl,
    which: Literal["committed", "validated"] = "committed",
    step: StepNumber | None = None,
    generation: GenerationNumber | None = None,
    hold: bool | None = None,
    release: bool = False,
    force: bool = False,
    why: Annotated[str, Field(max_length=1024)] = "",
) -> State[Any]:
    """Make a checkpoint the published one; followers of the channel `published` move to it.

    Args:
        run_url: the run.
        which: used without `step`. committed: the newest committed checkpoint that no validation
            has failed. validated: the newest checkpoint that a validation of its bytes has passed.
        step: publish the checkpoint of this step. An older step rolls back. The checkpoint is held
            unless `hold` is false.
        generation: the generation of `step`; it may be off the live line.
        hold: keep this checkpoint published until a publication with `release` replaces it. If not
            set: hold if `step` is given.
        release: replace a checkpoint that is held.
        force: publish the given step although a validation of it failed.
        why: a note for people, shown with the publication.

    Returns:
        Completed; its message says whether anything changed.

    Raises:
        SettingsError: see `Selection`.
        NothingToRestore: there is no such checkpoint.
        RetentionRefused: a validation of the checkpoint failed, another one is held, or retention
            is deleting it.
        RecpointError: the checkpoint does not restore, or the store cannot be read.
    """
    await tag_flow_run(open_store(run_url).url)
    is_held = step is not None if hold is None else hold
    publication = await publish_checkpoint(
        run_url,
        Selection(step=step, generation=generation, validated_only=which == "validated"),
        held=is_held,
        release=release,
        force=force,
        why=why,
    )
    if publication.created:
        emit(
            "published",
            publication.run,
            run_url,
            step=publication.record.checkpoint.step,
            generation=publication.record.checkpoint.generation,
            number=publication.record.number,
            held=int(publication.record.held),
            why=publication.record.why,
        )
        await _show(run_url, publication)
    return Completed(message=_message(publication))


def _message(publication: PublishOutcome) -> str:
    text = f"publication {publication.record.number}: {publication.record.checkpoint}"
    doubt = "" if publication.doubt is None else f"; although {publication.doubt}"
    if publication.created:
        return f"{text}{doubt}"
    held_text = (
        f", held by {publication.record.who}: {publication.record.why}"
        if publication.record.held
        else ""
    )
    return f"nothing changed: {text}{held_text}{doubt}"


async def _show(run_url: str, publication: PublishOutcome) -> None:
    url = run_url.replace("`", "'")  # a backtick would end the code span
    records = [record for record in (publication.record, publication.before) if record is not None]
    await Artifact(
        type="table",
        key=artifact_key(run_url, publication.run, "published"),
        description=f"Step {publication.record.checkpoint.step} is published "
        f"(publication {publication.record.number}): `{url}`",
        data=[
            {
                "publication": record.number,
                "step": record.checkpoint.step,
                "generation": record.checkpoint.generation,
                "held": record.held,
                "who": record.who,
                "why": record.why,
            }
            for record in records
        ],
    ).acreate()
