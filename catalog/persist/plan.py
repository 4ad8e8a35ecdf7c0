"""Plans the chunks of a staged job, and the groups in which they are persisted; does no I/O.

Keys and contents of chunks follow from the job alone. An agent that starts over after a kill
therefore writes the same bytes under the same keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from recpoint.catalog.staging.job import StagedJob, sample_name
from recpoint.errors import MalformedObject
from recpoint.format.chunk import sample_arrays
from recpoint.format.dtypes import Dtype, array_bytes, item_bytes
from recpoint.format.first_values import most_first_rows
from recpoint.format.job import Segment, StagedTable
from recpoint.format.manifest import CODE_BITS, MAX_CHUNK_BYTES, Scheme
from recpoint.format.naming import MAX_CHUNK

__all__ = [
    "CHUNK_BYTES",
    "FIRST",
    "GROUP_BYTES",
    "GROUP_SPOOL_BYTES",
    "TENSORS_EACH",
    "ChunkGroup",
    "RowBlock",
    "StateBlock",
    "StatePiece",
    "StoredForm",
    "chunk_numbers",
    "exact_row_bytes",
    "plan_groups",
    "rows_of_block",
    "rows_of_chunk",
    "rows_of_largest_chunk",
    "stored_forms",
    "stored_row_bytes",
    "tensor_chunks",
]

#: Most bytes of a chunk's body (format §3 asks for chunks of 32 MiB or less, header included).
CHUNK_BYTES = (32 << 20) - (64 << 10)

#: Most staged bytes of a group. Large, because each group costs a workflow engine tens of
#: milliseconds.
GROUP_BYTES = 512 << 20

#: Most bytes that a group of several chunks takes in the spool. The spool may be in memory, and
#: holds two groups at once beside the chunks in upload and their copies in the store's client.
GROUP_SPOOL_BYTES = 72 << 20

#: Dtypes of row parameters. Each has chunks of its own: in a common chunk, one row that needs F32
#: would cost every other row four bytes.
_PARAMETER_DTYPES: tuple[Dtype, ...] = ("F16", "F32")

#: Most tensors of a chunk of state or samples: their names and shapes must fit into its header.
TENSORS_EACH = 4_000

#: Most bytes of one row id in a row set: 8 bytes of a delta, and what zstd adds to incompressible
#: data.
_ID_BYTES = 9


class StoredForm(NamedTuple):
    """What the rows of a chunk have in common (format §3).

    Attributes:
        bits: bits of each stored value; 0: a rule gives the rows, which are not stored.
        parameters: dtype of the row parameters; None: the rows come back exactly.
    """

    bits: int
    parameters: Dtype | None

    def scheme(self, table: StagedTable) -> Scheme:
        """Return the scheme of the chunks."""
        if self.parameters is None:
            return "exact" if self.bits else "first"
        return "residual" if table.residual else "asymmetric"

    def row_bytes(self, table: StagedTable) -> int:
        """Return the bytes of one row's values, or of its codes and their parameters."""
        values = (table.spec.dim * self.bits + 7) // 8
        return values if self.parameters is None else values + 2 * item_bytes(self.parameters)


#: Of rows that no batch has changed, if the table's rule is known (format §3.9).
FIRST: Final = StoredForm(0, None)


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """Rows `first` … `first + rows − 1` of the rows staged for a table.

    The rows of each form (`stored_forms`) become chunks of their own, of at most `rows_of_chunk`
    rows each. Numbers of chunks are reserved for each form, from `number` on (`chunk_numbers`).
    """

    table: int
    first: int
    rows: int
    number: int


@dataclass(frozen=True, kw_only=True)
class StatePiece:
    """One tensor of a state chunk: elements `first` … `first + count − 1` of a segment.

    `name` and `shape` are the tensor's name and shape in the chunk.
    """

    segment: str
    name: str
    first: int
    count: int
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StateBlock:
    """One chunk of state, or of the tables' samples."""

    content: Literal["state", "sample"]
    number: int
    pieces: tuple[StatePiece, ...]


@dataclass(frozen=True, kw_only=True)
class ChunkGroup:
    """Blocks that are quantized, encoded and uploaded together.

    Attributes:
        index: position of the group in the job.
        blocks: its blocks.
        quantized: whether it has rows to quantize.
        staged_bytes: bytes of its blocks in the slot.
    """

    index: int
    blocks: tuple[RowBlock | StateBlock, ...]
    quantized: bool
    staged_bytes: int


def exact_row_bytes(table: StagedTable) -> int:
    """Return the bytes of one staged row: its values and row states."""
    states = sum(array_bytes(state.dtype, state.shape) for state in table.spec.row_states)
    return table.spec.dim * item_bytes(table.spec.dtype) + states


def plan_groups(staged: StagedJob) -> list[ChunkGroup]:
    """Return the groups of a job, in the order in which they are persisted.

    Raises:
        MalformedObject: a chunk of one row would exceed the format's bound.
    """
    groups: list[ChunkGroup] = []
    blocks: list[RowBlock | StateBlock] = []
    quantized, total, spooled = False, 0, 0

    def close() -> None:
        nonlocal blocks, quantized, total, spooled
        if blocks:
            groups.append(
                ChunkGroup(
                    index=len(groups),
                    blocks=tuple(blocks),
                    quantized=quantized,
                    staged_bytes=total,
                )
            )
        blocks, quantized, total, spooled = [], False, 0, 0

    for block, size, spool, narrow in _blocks(staged):
        if blocks and (total + size > GROUP_BYTES or spooled + spool > GROUP_SPOOL_BYTES):
            close()
        blocks.append(block)
        total += size
        spooled += spool
        quantized = quantized or narrow
    close()
    return groups


def _blocks(staged: StagedJob) -> list[tuple[RowBlock | StateBlock, int, int, bool]]:
    """Return each block with its staged bytes, most spool bytes, and whether it is quantized."""
    weighed: list[tuple[RowBlock | StateBlock, int, int, bool]] = []
    # The state comes first: it is small, and an error in it shows early.
    whole = [[piece] for piece in _state_pieces(staged)]
    blocks = _tensor_blocks(staged, "state", whole)
    blocks += _tensor_blocks(staged, "sample", _sample_pieces(staged))
    for state in blocks:
        weighed.append(
            (state, sum(_piece_bytes(staged, piece) for piece in state.pieces), 0, False)
        )
    for index, table in enumerate(staged.job.tables):
        row_bytes, spool = exact_row_bytes(table), _spool_row_bytes(table)
        for block in _row_blocks(staged, index, table):
            weighed.append((block, block.rows * row_bytes, block.rows * spool, table.is_quantized))
    return weighed


def stored_forms(table: StagedTable) -> tuple[StoredForm, ...]:
    """Return the forms in which rows of a table may be stored; the last one is the exact form."""
    widths: tuple[int, ...] = ()
    if table.allocation is not None:
        widths = CODE_BITS
    elif table.is_quantized:
        widths = (table.bits,)
    forms = [StoredForm(bits, dtype) for bits in widths for dtype in _PARAMETER_DTYPES]
    forms += [] if table.first_values is None else [FIRST]
    return (*forms, StoredForm(8 * item_bytes(table.spec.dtype), None))


def rows_of_block(table: StagedTable) -> int:
    """Return the most rows of a table in one block.

    Rows of one width fill one chunk. Rows of several widths are divided over many chunks, which
    would be small for as many rows: so a block has as many of them as fit a group.
    """
    if table.allocation is not None:
        most = GROUP_SPOOL_BYTES // _spool_row_bytes(table)
    else:
        ids = 0 if table.all_rows else _ID_BYTES
        most = CHUNK_BYTES // (stored_row_bytes(table) + ids)
    return max(1, min(most, GROUP_BYTES // exact_row_bytes(table)))


def rows_of_chunk(table: StagedTable, form: StoredForm) -> int:
    """Return the most rows of one form in a chunk."""
    if form == FIRST:
        return most_first_rows(table.spec)
    is_only_form = form.parameters is not None or not table.is_quantized
    if table.allocation is None and is_only_form:
        return rows_of_block(table)
    return max(1, CHUNK_BYTES // (form.row_bytes(table) + _state_bytes(table) + _ID_BYTES))


def chunk_numbers(table: StagedTable) -> list[range]:
    """Return the numbers reserved for the chunks of each form in a block, counted from its own."""
    numbers: list[range] = []
    first, rows = 0, rows_of_block(table)
    for form in stored_forms(table):
        chunks = -(-rows // rows_of_chunk(table, form))  # if all rows are of this form
        numbers.append(range(first, first + chunks))
        first += chunks
    return numbers


def rows_of_largest_chunk(table: StagedTable) -> int:
    """Return the most rows of a table that any chunk can have."""
    return min(
        rows_of_block(table), max(rows_of_chunk(table, form) for form in stored_forms(table))
    )


def tensor_chunks(sizes: Iterable[int]) -> int:
    """Return how many chunks of state hold tensors of these sizes, in bytes, in this order."""
    chunks = total = tensors = 0
    for size in sizes:
        # A large tensor is divided into pieces. All but the last of these fill a chunk each.
        whole, remainder = (0, size) if size <= CHUNK_BYTES else divmod(size, CHUNK_BYTES)
        for piece in (
            *itertools.repeat(CHUNK_BYTES, whole),
            *([remainder] if remainder or not whole else ()),
        ):
            if not chunks or total + piece > CHUNK_BYTES or tensors == TENSORS_EACH:
                chunks, total, tensors = chunks + 1, 0, 0
            total, tensors = total + piece, tensors + 1
    return chunks


def _row_blocks(staged: StagedJob, index: int, table: StagedTable) -> list[RowBlock]:
    exact = exact_row_bytes(table)
    if exact + _ID_BYTES > MAX_CHUNK_BYTES - (1 << 20):
        raise MalformedObject(
            str(staged.path),
            found=f"rows of {exact} bytes in {table.spec.name!r:.200}",
            expected=f"rows that fit a chunk of {MAX_CHUNK_BYTES} bytes",
            next_step="split the table's rows over several tables",
        )
    rows_each, numbers = rows_of_block(table), chunk_numbers(table)[-1].stop
    starts = range(0, table.row_count, rows_each)
    if len(starts) * numbers > MAX_CHUNK + 1:
        raise MalformedObject(
            str(staged.path),
            found=f"{table.row_count:,} rows in {table.spec.name!r:.200}, which may need "
            f"{len(starts) * numbers:,} chunks",
            expected=f"at most {MAX_CHUNK + 1:,}",
            next_step="split the table's rows over several ranks or tables",
        )
    return [
        RowBlock(
            table=index,
            first=first,
            rows=min(rows_each, table.row_count - first),
            number=position * numbers,
        )
        for position, first in enumerate(starts)
    ]


def _tensor_blocks(
    staged: StagedJob, content: Literal["state", "sample"], together: list[list[StatePiece]]
) -> list[StateBlock]:
    """Return chunks of pieces; the pieces of one list of `together` go into the same chunk."""
    blocks: list[StateBlock] = []
    pieces: list[StatePiece] = []
    total = 0

    def close() -> None:
        blocks.append(StateBlock(content=content, number=len(blocks), pieces=tuple(pieces)))

    for tensor_pieces in together:
        size = sum(_piece_bytes(staged, piece) for piece in tensor_pieces)
        if pieces and (
            total + size > CHUNK_BYTES or len(pieces) + len(tensor_pieces) > TENSORS_EACH
        ):
            close()
            pieces, total = [], 0
        pieces += tensor_pieces
        total += size
    if pieces:
        close()
    return blocks


def _sample_pieces(staged: StagedJob) -> list[list[StatePiece]]:
    """Return, for each table that has a sample, the parts of the sample."""
    pieces = []
    for index, table in enumerate(staged.job.tables):
        names = [sample_name(index, part) for part in sample_arrays(table.spec, 1)]
        parts = [_whole(name, staged.segments[name]) for name in names if name in staged.segments]
        if parts:
            pieces.append(parts)
    return pieces


def _state_pieces(staged: StagedJob) -> list[StatePiece]:
    if not staged.job.has_state:
        return []
    pieces = [_whole("tree", staged.segments["tree"])]
    number = 0
    while (name := f"tensor.{number}") in staged.segments:
        segment = staged.segments[name]
        if segment.bytes <= CHUNK_BYTES:
            pieces.append(_whole(name, segment))
        else:
            elements_each = CHUNK_BYTES // item_bytes(segment.dtype)
            elements = segment.bytes // item_bytes(segment.dtype)
            for position, first in enumerate(range(0, elements, elements_each)):
                count = min(elements_each, elements - first)
                pieces.append(
                    StatePiece(
                        segment=name,
                        name=f"{name}.{position}",
                        first=first,
                        count=count,
                        shape=(count,),
                    )
                )
        number += 1
    return pieces


def _whole(name: str, segment: Segment) -> StatePiece:
    elements = segment.bytes // item_bytes(segment.dtype)
    return StatePiece(segment=name, name=name, first=0, count=elements, shape=segment.shape)


def _piece_bytes(staged: StagedJob, piece: StatePiece) -> int:
    return piece.count * item_bytes(staged.segments[piece.segment].dtype)


def _spool_row_bytes(table: StagedTable) -> int:
    """Return the most bytes of one row in the spool; data stored as staged stays in the slot."""
    row_bytes = 0 if table.all_rows and table.allocation is None else _ID_BYTES
    if table.is_quantized:
        forms = stored_forms(table)
        row_bytes += max(form.row_bytes(table) for form in forms[:-1])
        # The number of its form, and a bit in the mask of each form's chunks.
        row_bytes += 1 + -(-len(forms) // 8)
    states = zip(table.state_dtypes, table.spec.row_states, strict=True)
    rounded = (
        state.row_bytes(stored_dtype)
        for stored_dtype, state in states
        if stored_dtype != state.dtype
    )
    return row_bytes + sum(rounded)


def stored_row_bytes(table: StagedTable) -> int:
    """Return the stored bytes of one row, without its id; the most if it is quantized."""
    forms = stored_forms(table)
    coded = forms[:-1] or forms
    return max(form.row_bytes(table) for form in coded) + _state_bytes(table)


def _state_bytes(table: StagedTable) -> int:
    """Return the stored bytes of one row's row states."""
    states = zip(table.state_dtypes, table.spec.row_states, strict=True)
    return sum(state.row_bytes(dtype) for dtype, state in states)
