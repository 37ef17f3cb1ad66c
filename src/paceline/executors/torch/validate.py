"""What a batch must fulfil before it touches memory: the checks of csrc/batch.cpp, for executors written in Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ExecutorError
from paceline.executors.base import BLOCK_SIZE, Batch, Int32

_DTYPES: dict[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "bias"), np.float32),
    "seed": np.uint64,
    "draw_position": np.int64,
    "masks": np.uint32,
}
"""All others are int32."""
_TWO_DIMENSIONAL = {"block_tables", "block_copies", "masks"}


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What an executor has room for."""

    vocab_size: int
    num_blocks: int
    max_batched_tokens: int
    max_model_len: int


def validate(batch: Batch, limits: BatchLimits) -> None:
    """Check every size and index that the computation relies on.

    Raises:
        ExecutorError: the batch contradicts itself or the limits.
    """
    _check_arrays(batch)
    tokens, most = batch.num_tokens, limits.max_batched_tokens
    _require(0 < tokens <= most, "number of tokens", tokens, most)
    _check_sequences(batch)
    _check_blocks(batch, limits)
    _check_positions(batch)
    _check_range(batch.token_ids, 0, limits.vocab_size, "token out of range")
    _check_rows(batch, limits)
    _check_history_and_bias(batch, limits.vocab_size)
    _check_masks(batch, limits.vocab_size)


def _check_arrays(batch: Batch) -> None:
    for name in batch.__dataclass_fields__:
        array, dimensions = getattr(batch, name), 2 if name in _TWO_DIMENSIONAL else 1
        if not (
            isinstance(array, np.ndarray)
            and array.dtype == _DTYPES.get(name, np.int32)
            and array.ndim == dimensions
            and array.flags.c_contiguous
        ):
            raise ExecutorError(f"batch: {name} has the wrong dtype, dimensions or layout")
    if len(batch.block_tables) != batch.num_sequences:
        raise ExecutorError("batch: block_tables and context_len differ in length")
    if batch.block_copies.size and batch.block_copies.shape[1] != 2:
        raise ExecutorError("batch: block_copies must be pairs")


def _check_sequences(batch: Batch) -> None:
    starts, sequences, tokens = batch.query_start, batch.num_sequences, batch.num_tokens
    _require_length(batch.positions, tokens, "positions has another length than token_ids")
    _require_length(starts, sequences + 1, "query_start must have one entry more than context_len")
    _require_length(batch.adapter, sequences, "adapter has another length than context_len")
    _require(sequences > 0 and starts[0] == 0, "query_start must begin with 0", sequences, 0)
    _require(starts[-1] == tokens, "query_start must end with the number of tokens", int(starts[-1]), tokens)
    lengths = np.diff(starts)
    _require_all(lengths > 0, "a sequence has no tokens", starts[:-1], starts[1:])
    _require_all(batch.adapter == 0, "adapters are not supported", batch.adapter, 0)
    _require_all(batch.context_len >= lengths, "context_len is shorter than the query", batch.context_len, lengths)


def _check_blocks(batch: Batch, limits: BatchLimits) -> None:
    context, table = batch.context_len, batch.block_tables
    _require_all(context <= limits.max_model_len, "context_len is beyond the model's", context, limits.max_model_len)
    blocks = -(-context // BLOCK_SIZE)
    width = table.shape[1]
    _require_all(blocks <= width, "a block table is too short for its context", width, blocks)
    column = np.arange(width)
    _check_range(table[column < blocks[:, None]], 0, limits.num_blocks, "block out of range")
    first_written = (context - np.diff(batch.query_start)) // BLOCK_SIZE
    written = table[(column >= first_written[:, None]) & (column < blocks[:, None])]
    shared, times = np.unique(written, return_counts=True)
    _require_all(times == 1, "two sequences write the same block", shared, limits.num_blocks)
    _check_range(batch.block_copies.reshape(-1), 0, limits.num_blocks, "copied block out of range")


def _check_positions(batch: Batch) -> None:
    lengths = np.diff(batch.query_start)
    expected = np.arange(batch.num_tokens) + np.repeat(batch.context_len - batch.query_start[1:], lengths)
    _require_all(batch.positions == expected, "positions must run up to context_len", batch.positions, expected)


def _check_rows(batch: Batch, limits: BatchLimits) -> None:
    rows, vocab = batch.num_rows, limits.vocab_size
    for name in ("target_ids", "seed", "draw_position", "top_k", "num_logprobs"):
        _require_length(getattr(batch, name), rows, name)
    for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency"):
        _require_length(getattr(batch, name), rows, "a sampling parameter has another length than logits_rows")
    _check_range(batch.logits_rows, 0, batch.num_tokens, "logits row out of range")
    _check_range(batch.target_ids, -1, vocab, "target out of range")
    _check_range(batch.num_logprobs, -1, vocab + 1, "num_logprobs out of range")
    row = np.arange(rows)
    warm = (batch.temperature >= 0) & np.isfinite(batch.temperature)
    _require_all(warm, "a temperature is negative or not finite", row, rows)
    penalties = np.isfinite(batch.repetition) & np.isfinite(batch.presence) & np.isfinite(batch.frequency)
    what = "a penalty is not finite, or a repetition penalty not above 0"
    _require_all(penalties & (batch.repetition > 0), what, row, rows)
    _require_all(~(np.isnan(batch.top_p) | np.isnan(batch.min_p)), "top_p or min_p is NaN", row, rows)


def _check_history_and_bias(batch: Batch, vocab: int) -> None:
    _require_length(batch.seen_output_count, len(batch.seen_ids), "seen_output_count")
    _check_ragged(batch.seen_start, batch.num_rows, len(batch.seen_ids), "seen_start")
    _require_length(batch.bias, len(batch.bias_ids), "bias")
    _check_ragged(batch.bias_start, batch.num_rows, len(batch.bias_ids), "bias_start")
    _check_range(batch.seen_ids, 0, vocab, "token out of range")
    _check_range(batch.bias_ids, 0, vocab, "token out of range")
    _require_all(batch.bias < np.inf, "a bias is NaN or +infinity", np.arange(len(batch.bias)), len(batch.bias))


def _check_ragged(start: Int32, rows: int, total: int, name: str) -> None:
    """``start`` is [rows + 1], ascending from 0 to the length of the arrays it cuts; or empty."""
    if not len(start):
        _require(total == 0, name, total, 0)
        return
    _require_length(start, rows + 1, name)
    _require(start[0] == 0, name, int(start[0]), 0)
    _require_all(start[:-1] <= start[1:], name, start[:-1], start[1:])
    _require(start[-1] == total, name, int(start[-1]), total)


def _check_masks(batch: Batch, vocab: int) -> None:
    if not len(batch.mask_row):
        return
    masks, words = batch.masks, -(-vocab // 32)
    _require_length(batch.mask_row, batch.num_rows, "mask_row")
    _require(not masks.size or masks.shape[1] == words, "masks have the wrong width", masks.shape[1], words)
    _check_range(batch.mask_row, -1, len(masks), "mask out of range")


def _check_range(values: Int32, lowest: int, end: int, what: str) -> None:
    _require_all((values >= lowest) & (values < end), what, values, end)


def _require_length(array: Sequence[Any] | NDArray[Any], length: int, what: str) -> None:
    _require(len(array) == length, what, len(array), length)


def _require_all(ok: NDArray[np.bool_], what: str, got: NDArray[Any] | int, limit: NDArray[Any] | int) -> None:
    """Name the first offender."""
    if not ok.all():
        first = int(np.argmin(ok))
        _require(False, what, int(np.broadcast_to(got, ok.shape)[first]), int(np.broadcast_to(limit, ok.shape)[first]))


def _require(ok: bool | np.bool_, what: str, got: int, limit: int) -> None:
    if not ok:
        raise ExecutorError(f"batch: {what} ({got}, limit {limit})")
