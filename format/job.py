"""Defines the job that a trainer hands to the agent, and the agent's answer (format §7)."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import FailFast, Field, model_validator

from recpoint.format.dtypes import FLOAT_DTYPES, MAX_DIMS, Dtype, array_bytes, item_bytes
from recpoint.format.first_values import FirstValueRule
from recpoint.format.history import History
from recpoint.format.keyed_use import KeyedUses, check_keyed
from recpoint.format.manifest import (
    CODE_BITS,
    MAX_CHAIN_LENGTH,
    CacheUse,
    ChainLength,
    CheckedStripes,
    ChosenMethod,
    CopiedAhead,
    Kind,
    MeasuredLoss,
    Quantizer,
    RankCount,
    RowStateSpec,
    ServerCount,
    StateBits,
    TableSpec,
    Word,
    check_copied_ahead,
    check_links,
    check_parts,
    check_tables,
    is_absent,
)
from recpoint.format.naming import MAX_RANK, job_stem
from recpoint.format.records import (
    CheckpointRef,
    Generation,
    HexFloat,
    HexToken,
    Milliseconds,
    Part,
    Record,
    Step,
)
from recpoint.format.untrusted_json import brief

__all__ = [
    "QUANTIZERS",
    "Allocation",
    "Cancel",
    "Job",
    "Outcome",
    "QuantizerName",
    "Segment",
    "StagedTable",
]

#: The quantizers that a trainer can ask for; with "auto" the agent chooses (format §7).
QuantizerName = Literal["auto", "asymmetric", "symmetric", "greedy", "refit"]
QUANTIZERS: tuple[QuantizerName, ...] = get_args(QuantizerName)

_Bytes = Annotated[int, Field(ge=0, lt=2**63)]


class Segment(Part):
    """One array in the slot file: little-endian, C order, at a multiple of 64 bytes."""

    name: Annotated[str, Field(pattern=r"\A[a-z0-9_.]{1,64}\z")]
    dtype: Dtype
    shape: Annotated[tuple[_Bytes, ...], Field(max_length=MAX_DIMS, strict=False), FailFast()]
    offset: Annotated[int, Field(ge=0, lt=2**63, multiple_of=64)]
    bytes: _Bytes
    crc32c: Annotated[int, Field(ge=0, lt=2**32)]

    @model_validator(mode="after")
    def _length(self) -> Self:
        if self.bytes != array_bytes(self.dtype, self.shape):
            raise ValueError(f"{self.bytes} bytes do not match its dtype and shape")
        return self


class Allocation(Part):
    """How the agent chooses a width for each row of a table (format §7, allocation).

    `price` is what one bit may cost. A row's importance is `scale` times the mean of its values of
    the row state with index `state`, each less `initial`, values below zero counted as zero. A
    state of U8 has codes, each of which stands for a count of lookups.
    """

    price: HexFloat
    state: Annotated[int, Field(ge=0, lt=64)]
    scale: HexFloat
    initial: Annotated[HexFloat | None, Field(exclude_if=is_absent)] = None  # None: 0

    @model_validator(mode="after")
    def _positive(self) -> Self:
        for name in ("price", "scale", "initial"):
            text = getattr(self, name)
            if text is not None and float.fromhex(text) <= 0:
                raise ValueError(f"the {name} of an allocation must be above zero")
        return self


class StagedTable(Part):
    """One table's rows in the slot, and how the agent shall store them.

    The shard of its rank is the rows `first_row` … `first_row + shard_rows - 1` of the table, and
    ids in the slot are positions in the shard. A `scattered` shard is any `shard_rows` rows, as
    embedding servers hold them: `first_row` is 0, and ids in the slot are positions in the table.
    """

    spec: TableSpec
    first_row: _Bytes
    shard_rows: _Bytes  # 0: the rank holds nothing of the table
    row_count: _Bytes
    all_rows: bool  # true: every row of the shard is staged, in order, without an ids segment
    bits: Annotated[int, Field(ge=2, le=64)]  # of CODE_BITS; or the dtype's own width: exact
    quantizer: QuantizerName  # ignored if the table is stored exactly
    state_bits: StateBits | None  # bits of row states where §3.5 allows fewer; None: as they are
    method: ChosenMethod | None  # quantizes the rows; None: the agent chooses if bits asks for it
    codes: bool  # true: the slot holds the rows as quantized by `method`, not their values
    scattered: Annotated[Literal[True] | None, Field(exclude_if=is_absent)] = None
    allocation: Annotated[Allocation | None, Field(exclude_if=is_absent)] = None  # None: one width
    residual: Annotated[Literal[True] | None, Field(exclude_if=is_absent)] = None  # codes: of §3.7
    second_moments: Annotated[  # indices of row states that are never negative, ascending
        tuple[Annotated[int, Field(ge=0, lt=64)], ...] | None,
        Field(min_length=1, max_length=64, strict=False, exclude_if=is_absent),
    ] = None
    first_values: Annotated[FirstValueRule | None, Field(exclude_if=is_absent)] = None

    @model_validator(mode="after")
    def _rows(self) -> Self:
        rows = self.shard_rows
        if self.row_count > rows or (self.all_rows and (self.row_count != rows or not rows)):
            raise ValueError(f"{self.row_count} rows are staged of a shard of {rows}")
        if self.first_row + rows > self.spec.rows or (self.first_row and not rows):
            raise ValueError(f"a shard of {rows} rows from {self.first_row} of {self.spec.rows}")
        if self.scattered and (self.first_row or self.all_rows):
            raise ValueError("scattered rows need their ids, which are positions in the table")
        if self.bits not in (*CODE_BITS, 8 * item_bytes(self.spec.dtype)):
            raise ValueError(f"{self.bits} bits for a table of {self.spec.dtype}")
        if self.codes and (self.method is None or not self.is_quantized):
            raise ValueError("staged codes need a method, and fewer bits than the dtype has")
        if self.codes and self.spec.dtype == "F64":
            raise ValueError("a table of F64 cannot be staged as codes")
        if self.residual and (self.codes or not self.is_quantized or self.spec.dtype == "F64"):
            raise ValueError("residuals need staged values of a quantized table, not of F64")
        if self.first_values and (self.codes or self.residual or not self.is_quantized):
            raise ValueError("first values need staged values of a quantized table")
        return self

    @model_validator(mode="after")
    def _allocated(self) -> Self:
        if self.allocation is None:
            return self
        states = self.spec.row_states
        if self.bits != max(CODE_BITS) or not self.is_quantized:
            raise ValueError(f"an allocation needs {max(CODE_BITS)} bits, not {self.bits}")
        if self.codes:
            raise ValueError("an allocation needs staged values, not codes")
        if self.allocation.state >= len(states):
            raise ValueError(
                f"an allocation by row state {self.allocation.state} of {len(states)} row states"
            )
        state = states[self.allocation.state]
        if state.dtype not in (*FLOAT_DTYPES, "U8"):
            raise ValueError(f"an allocation by the row state {state.name!r:.80} of {state.dtype}")
        return self

    @model_validator(mode="after")
    def _moments(self) -> Self:
        moments, count = self.second_moments or (), len(self.spec.row_states)
        if list(moments) != sorted({index for index in moments if index < count}):
            raise ValueError(f"second moments {brief(list(moments))} of {count} row states")
        return self

    @property
    def is_quantized(self) -> bool:
        """Whether its rows are stored with fewer bits than their dtype has."""
        return self.bits < 8 * item_bytes(self.spec.dtype)

    @property
    def id_bound(self) -> int:
        """The number above all ids in the slot."""
        return self.spec.rows if self.scattered else self.shard_rows

    @property
    def least_state_bits(self) -> StateBits | None:
        """The fewest bits of a value of staged row states that are stored narrower; None: none."""
        pairs = list(zip(self.spec.row_states, self.state_dtypes, strict=True))
        if not self.row_count or all(dtype == state.dtype for state, dtype in pairs):
            return None
        return 8 if any(state.is_coded(dtype) for state, dtype in pairs) else 16

    @property
    def state_dtypes(self) -> tuple[Dtype, ...]:
        """The dtypes in which its row states are stored."""
        return tuple(
            self._state_dtype(index, state) for index, state in enumerate(self.spec.row_states)
        )

    def _state_dtype(self, index: int, state: RowStateSpec) -> Dtype:
        if self.state_bits is None:
            return state.dtype
        is_moment = index in (self.second_moments or ())
        if self.state_bits == 8 and is_moment and state.may_be_narrower:
            return "U8"  # codes; a chunk with a value that has no code keeps the state as it is
        return state.narrow_dtype


class Job(Record):
    """A complete snapshot in a slot of the staging area."""

    format: Literal["recpoint/job"] = "recpoint/job"
    run_url: Annotated[str, Field(max_length=4096)]
    run: HexToken
    step: Step
    generation: Generation
    attempt: HexToken
    kind: Kind
    base: CheckpointRef | None
    parent: CheckpointRef | None
    chain_length: ChainLength
    policy: Word
    rank: Annotated[int, Field(ge=0, le=MAX_RANK)]
    ranks: RankCount
    servers: Annotated[ServerCount | None, Field(exclude_if=is_absent)] = None
    tables: Annotated[tuple[StagedTable, ...], Field(max_length=100_000, strict=False), FailFast()]
    slot: Annotated[str, Field(pattern=r"\Ar[0-9]{5}-[0-9]{1,4}\.bin\z")]
    slot_bytes: _Bytes
    segments: Annotated[tuple[Segment, ...], Field(max_length=1_000_000, strict=False), FailFast()]
    snapshot_ms: Milliseconds
    staged_ms: Milliseconds
    stall_us: _Bytes
    copied_ahead: Annotated[CopiedAhead | None, Field(exclude_if=is_absent)] = None
    loss: Annotated[MeasuredLoss | None, Field(exclude_if=is_absent)] = None
    keyed: Annotated[KeyedUses | None, Field(exclude_if=is_absent)] = None
    cache: Annotated[CacheUse | None, Field(exclude_if=is_absent)] = None
    stripes: Annotated[CheckedStripes | None, Field(exclude_if=is_absent)] = None
    full_bytes: _Bytes
    quantized_by: Annotated[str, Field(max_length=255)]  # implementation; "": no codes are staged
    interval_batches: _Bytes  # batches since the previous checkpoint, to show the agent's lag
    history: History

    @property
    def ref(self) -> CheckpointRef:
        """The checkpoint that this job becomes."""
        return CheckpointRef(step=self.step, generation=self.generation, attempt=self.attempt)

    @property
    def parts(self) -> int:
        """How many parts the checkpoint has: one of each rank, then one of each server."""
        return self.ranks + (self.servers or 0)

    @property
    def has_state(self) -> bool:
        """Whether a rank has staged it; a job of an embedding server has rows and samples only."""
        return self.rank < self.ranks

    @property
    def stem(self) -> str:
        """File name of the job without its ending."""
        return job_stem(self.generation, self.step, self.rank)

    @property
    def dirty_rows(self) -> int:
        """Rows staged, over all tables."""
        return sum(table.row_count for table in self.tables)

    def segment(self, name: str) -> Segment:
        """Return the segment called `name`; raise KeyError if there is none."""
        for segment in self.segments:
            if segment.name == name:
                return segment
        raise KeyError(name)

    @model_validator(mode="after")
    def _links(self) -> Self:
        check_links(self.kind, self.step, self.base, self.parent, self.chain_length)
        check_parts(self.ranks, self.servers)
        check_copied_ahead(self.copied_ahead, self.parts)
        check_keyed(self.keyed, [table.spec for table in self.tables])
        if self.kind == "full" and any(table.residual for table in self.tables):
            raise ValueError("a full has no residuals")
        if self.rank >= self.parts:
            raise ValueError(f"rank {self.rank} of {self.parts}")
        check_tables([table.spec for table in self.tables])
        if self.parts == 1 and any(
            table.shard_rows != table.spec.rows or table.scattered for table in self.tables
        ):
            raise ValueError("the only rank holds all rows of each table")
        return self

    @model_validator(mode="after")
    def _segments(self) -> Self:
        end = 0
        for segment in sorted(self.segments, key=lambda segment: segment.offset):
            if segment.offset < end:
                raise ValueError(f"segment {segment.name} overlaps the one before it")
            end = segment.offset + segment.bytes
        if end > self.slot_bytes:
            raise ValueError(f"the segments end at {end}, the slot at {self.slot_bytes}")
        if len({segment.name for segment in self.segments}) != len(self.segments):
            raise ValueError("two segments have one name")
        return self


class Outcome(Record):
    """The agent's answer to a job: the checkpoint is committed or rejected; the slot is free."""

    format: Literal["recpoint/outcome"] = "recpoint/outcome"
    step: Step
    generation: Generation
    attempt: HexToken
    result: Literal["committed", "rejected"]
    error_type: str  # name of the class in recpoint.errors; "" when committed
    error: str
    stored_bytes: _Bytes  # of all chunks of the checkpoint
    rank_bytes: _Bytes  # of this rank's chunks
    links_to_read: Annotated[int, Field(ge=0, le=MAX_CHAIN_LENGTH)]  # by a restore; 0: rejected
    quantizers: Annotated[
        tuple[Quantizer, ...], Field(max_length=100_000, strict=False), FailFast()
    ]
    finished_ms: Milliseconds


class Cancel(Record):
    """A trainer's request to drop a job, because a newer checkpoint takes its place."""

    format: Literal["recpoint/cancel"] = "recpoint/cancel"
    step: Step
    generation: Generation
    attempt: HexToken
