"""Lists every metric that is exported: its name, kind, labels and meaning.

Names and units follow Prometheus' guide: base units, `_total` for counters, a time stamp for an
event (`time() - x` is its age). The label `run` is the run URL, so it has one value for each run on
the host. No step, checkpoint or message is ever a label.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

__all__ = ["AGENT_METRICS", "METRICS", "ExposedMetric", "SINK_METRICS", "TRAINER_METRICS"]


class ExposedMetric(NamedTuple):
    """One metric; `name` is as exposed, without a histogram's `_bucket`, `_sum`, `_count`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


def _table(
    prefix: str, *rows: tuple[str, Literal["counter", "gauge", "histogram"], str, str]
) -> tuple[ExposedMetric, ...]:
    return tuple(
        ExposedMetric(f"{prefix}_{name}", kind, tuple(labels.split()), text)
        for name, kind, labels, text in rows
    )


_BUILD: Final = (("build_info", "gauge", "version", "Always 1; the label is recpoint's version."),)

#: From a training process (`recpoint.export_metrics`).
TRAINER_METRICS: Final = _table("recpoint", *_BUILD) + _table(
    "recpoint_trainer",
    ("running", "gauge", "run", "1 from restore() to close() of the Checkpointer, else 0."),
    (
        *("lag_seconds", "gauge", "run"),
        "Age of the newest committed checkpoint, counted from when it was cut; before the first "
        "commit, age of the training. Absent while not running.",
    ),
    (
        *("lag_batches", "gauge", "run"),
        "Batches that would be lost if the host died now. Absent while not running.",
    ),
    (
        *("interval_seconds", "gauge", "run"),
        "How long the last interval between two due checkpoints took. Absent in the first.",
    ),
    ("batches_total", "counter", "run", "Batches trained by this process."),
    (
        *("checkpoints_total", "counter", "run result"),
        "Checkpoints that were due, by result: committed (in the store), skipped (an earlier one "
        "was still on its way), cancelled (dropped for a newer one), failed.",
    ),
    (
        *("pending_checkpoints", "gauge", "run"),
        "Checkpoints that were cut and are not known to be in the store yet.",
    ),
    (
        *("stall_seconds", "histogram", "run"),
        "How long training stood still for each checkpoint that was cut.",
    ),
    (
        *("copied_rows_total", "counter", "run when"),
        "Rows that checkpoints copied, by when: before (while training went on) or in_stall (while "
        "it stood still). 0 where no row can be copied before.",
    ),
    (
        *("copied_bytes_total", "counter", "run when"),
        "Bytes of these rows with their row states, by when.",
    ),
    (
        *("cache_lookups_total", "counter", "run result"),
        "Ids that were looked up in tables in a cache, by result: hit, or miss (an evaluation, or "
        "a batch that the reader did not give). Absent without a cache.",
    ),
    (
        *("cache_rows_total", "counter", "run way"),
        "Rows that a cache fetched and wrote back, by way. Absent without a cache.",
    ),
    (
        *("cache_bytes_total", "counter", "run way"),
        "Bytes of rows and row states that a cache fetched from their home and wrote back, by way.",
    ),
    (
        *("cache_reduced_rows_total", "counter", "run when"),
        "Rows of this trainer's cache whose gradients other trainers sent, too, by when: before "
        "the step, or beside the next_batch. Absent without a cache.",
    ),
    (
        *("cache_wait_seconds_total", "counter", "run"),
        "How long training waited for rows of a cache. Absent without a cache.",
    ),
    (
        *("cache_window_batches", "gauge", "run"),
        "Batches whose rows a cache has, or has asked for, before they are trained.",
    ),
    (
        *("keyed_rows", "gauge", "run table"),
        "Rows of a keyed table that keys have now. Absent without such a table.",
    ),
    (
        *("keys", "gauge", "run table result"),
        "Keys of the table since training began, by result: inserted (got a row), evicted (lost it "
        "to others or by age), refused (were looked up and not admitted). Lower again after a "
        "restart, which goes back to a checkpoint.",
    ),
    (
        *("lost_servers", "gauge", "run"),
        "Embedding servers that were lost and whose rows are not all recovered. Rank 0 counts "
        "them. Absent without a cache.",
    ),
    (
        *("lost_rows", "gauge", "run"),
        "Rows and parity rows of these servers that are left to recover.",
    ),
    (
        *("server_rows", "gauge", "run server"),
        "Rows and parity rows that belong on an embedding server, by its number, as rank 0 "
        "knows it. Absent without servers.",
    ),
    (
        *("server_known_rows", "gauge", "run server"),
        "How many of them are there; fewer while the server is rebuilt after a loss.",
    ),
    (
        *("server_whole_timestamp_seconds", "gauge", "run server"),
        "When all rows of the server were there again after its last loss, since the epoch. "
        "Absent while it is rebuilt, and if it was never lost.",
    ),
    (
        *("stored_bytes_total", "counter", "run kind"),
        "Bytes that committed checkpoints take in the store, by kind: full or increment.",
    ),
    (
        *("failures_total", "counter", "run cause"),
        "Checkpoints that failed, by the class of their cause; the next checkpoint contains their "
        "rows. The log has the messages.",
    ),
    (
        *("restores_total", "counter", "run"),
        "Checkpoints that this process has restored and gone on from.",
    ),
    (
        *("unmarked_rows_total", "counter", "run"),
        "Rows that Options.verify_unmarked_rows found changed although nothing had marked them; "
        "the log names them.",
    ),
    (
        *("last_commit_timestamp_seconds", "gauge", "run"),
        "When the newest checkpoint of this process was committed, since the epoch. Absent before.",
    ),
    (
        *("agent_running", "gauge", "run"),
        "1 if an agent serves this trainer's staging area, 0 if none does.",
    ),
    (
        *("staging_free_bytes", "gauge", "run"),
        "Room for snapshots in the staging area; slots in use count as free.",
    ),
    (
        *("staging_bound_bytes", "gauge", "run"),
        "The most bytes that this trainer's snapshots may take in the staging area.",
    ),
)

#: From an agent (`recpoint agent --metrics-port`): first what it counts itself, then what it reads
#: from the store in the background.
AGENT_METRICS: Final = (
    _table("recpoint", *_BUILD)
    + _table(
        "recpoint_agent",
        ("prefect_up", "gauge", "", "1 if Prefect can be used; without it checkpoints go on."),
        ("staging_free_bytes", "gauge", "", "Free bytes of the staging area's file system."),
        ("staging_size_bytes", "gauge", "", "Size of the staging area's file system."),
        ("staged_jobs", "gauge", "run", "Checkpoints in the staging area: waiting, or at work."),
        (
            *("queue_age_seconds", "gauge", "run"),
            "How long the oldest staged checkpoint has been waiting; 0 without any.",
        ),
        (
            *("jobs_total", "counter", "run result"),
            "Staged checkpoints that the agent has finished, by result: committed, cancelled (the "
            "trainer had a newer one), rejected (it can never be stored).",
        ),
        (
            *("failures_total", "counter", "run cause"),
            "Failed attempts at storing a staged checkpoint, by the class of their cause; the "
            "agent tries again unless the error is permanent.",
        ),
        (
            *("stored_bytes_total", "counter", "run kind"),
            "Bytes that committed checkpoints take in the store, by kind: full or increment.",
        ),
        (
            *("full_bytes_total", "counter", "run"),
            "Bytes that these checkpoints would have taken as full, exact ones.",
        ),
        (
            *("commit_lag_seconds", "histogram", "run"),
            "From the cut of a checkpoint to its commit.",
        ),
        (
            *("last_commit_timestamp_seconds", "gauge", "run"),
            "When this agent committed its newest checkpoint, since the epoch. Absent before.",
        ),
        (
            *("chain_length", "gauge", "run"),
            "Manifests that a restore of the newest checkpoint reads, as of its commit. Absent "
            "before.",
        ),
        (
            *("consolidations_total", "counter", "run"),
            "Chains that this agent has merged in the background.",
        ),
        (
            *("missing_ranks", "gauge", "run"),
            "Other ranks and embedding servers whose part a checkpoint staged here has waited for "
            "longer than a minute (recpoint agent --name-ranks-after).",
        ),
        ("trainer_running", "gauge", "run", "1 if a trainer of the run is alive on this host."),
        (
            *("trainer_lost", "gauge", "run"),
            "1 if the trainer is gone and did not say that it ended: killed, or stopped by an "
            "error. 0 after a clean end, or SIGTERM.",
        ),
    )
    + _table(
        "recpoint_catalog",
        (
            *("refresh_timestamp_seconds", "gauge", "run"),
            "When the agent last read the other recpoint_catalog metrics from the store, since the "
            "epoch. If the store cannot be reached, they grow old.",
        ),
        (
            *("watch_start_timestamp_seconds", "gauge", "run"),
            "When the agent began to read the catalog, since the epoch; present before the first "
            "read succeeds.",
        ),
        (
            *("refresh_failures_total", "counter", "run cause"),
            "Failed reads of the catalog, by the class of the cause.",
        ),
        ("checkpoints", "gauge", "run", "Checkpoints in the store that count for restores."),
        ("created_timestamp_seconds", "gauge", "run", "When the run was made, since the epoch."),
        (
            *("restarts", "gauge", "run"),
            "Starts of trainers after the first; each continued from a checkpoint.",
        ),
        (
            *("ended", "gauge", "run"),
            "1 if the newest trainer, on any host, has recorded in the store that it ended.",
        ),
        (
            *("restore_manifests", "gauge", "run"),
            "Manifests that a restore of the newest good checkpoint reads. Absent if none is good.",
        ),
        ("restore_bytes", "gauge", "run", "Bytes of chunks that such a restore reads."),
        (
            *("value_bits", "gauge", "run"),
            "Bits of a value, on average, in the rows that the newest checkpoint stores. Absent if "
            "it stores none.",
        ),
        (
            *("keyed_rows", "gauge", "run table"),
            "Rows of a keyed table that keys have, as of the newest checkpoint. Absent without "
            "such a table.",
        ),
        ("keyed_capacity_rows", "gauge", "run table", "Rows that keys of the table can have."),
        (
            *("keys", "gauge", "run table result"),
            "Keys of the table since training began, as of the newest checkpoint, by result: "
            "inserted (got a row), evicted (lost it to others or by age), refused (were looked up "
            "and not admitted). Lower again after a restart, which goes back to a checkpoint.",
        ),
        (
            *("troubles", "gauge", "run kind"),
            "Stored checkpoints that are damaged, by kind: validation (failed, and passed none "
            "since), manifest (unreadable), chain (an object that it needs is missing or damaged).",
        ),
        (
            *("last_validation_timestamp_seconds", "gauge", "run"),
            "When the newest validation of any checkpoint that compared its bytes (level sample or "
            "full) and passed was recorded, since the epoch, by the store's clock. Absent before "
            "the first.",
        ),
    )
)

#: From a publisher (`recpoint publish-to --metrics-port`).
SINK_METRICS: Final = _table("recpoint", *_BUILD) + _table(
    "recpoint_sink",
    (
        *("lag_seconds", "gauge", "run sink"),
        "How long the run has had a better checkpoint than readers of the sink see; 0: it has "
        "none. Absent before the first look.",
    ),
    (
        *("step", "gauge", "run sink"),
        "Step of the checkpoint that readers of the sink see. Absent while there is none.",
    ),
    (
        *("deferred_rows", "gauge", "run sink"),
        "Rows that a budget has left at older checkpoints; 0: there are none. Absent while readers "
        "see no checkpoint.",
    ),
    (
        *("deferred_bytes", "gauge", "run sink"),
        "Bytes of these rows.",
    ),
    (
        *("deferred_versions", "gauge", "run sink"),
        "How many versions of the sink the oldest of these rows has missed; 0: there are none.",
    ),
    (
        *("look_timestamp_seconds", "gauge", "run sink"),
        "When the publisher last read both the run and the sink, since the epoch. If one of them "
        "cannot be reached, it grows old. Before the first such look: when the publisher started.",
    ),
    (
        *("failures_total", "counter", "run sink cause"),
        "Looks of the publisher that ended with an error, by the class of its cause; it tries "
        "again.",
    ),
)

METRICS: Final = tuple(dict.fromkeys(TRAINER_METRICS + AGENT_METRICS + SINK_METRICS))
