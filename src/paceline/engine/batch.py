"""From a plan to the executor's arrays, and back from its result."""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.engine.request import Request, TokenLogprobs
from paceline.engine.scheduler import Chunk
from paceline.errors import ExecutorError
from paceline.executors.base import Batch, Float32, Int32, RowStatus, StepResult

_NO_INT32: Int32 = np.empty(0, np.int32)
_NO_FLOAT32: Float32 = np.empty(0, np.float32)
_NO_COPIES: Int32 = np.empty((0, 2), np.int32)
_NO_MASKS = np.empty((0, 0), np.uint32)
for _shared in (_NO_INT32, _NO_FLOAT32, _NO_COPIES, _NO_MASKS):
    _shared.flags.writeable = False

_STATUS_TEXT = {
    RowStatus.NON_FINITE: "the model computed logits that are not finite",
    RowStatus.NOTHING_ALLOWED: "logit_bias and masks leave no token to choose from",
}


class Outcome(NamedTuple):
    """What became of a chunk: computed, perhaps with a token sampled at its end, or failed."""

    chunk: Chunk
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class BatchBuilder:
    """Writes steps' plans as arrays, and keeps those of the sampling parameters while the same requests sample."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: list[Request] = []
        self._parameters = _parameters([])

    def build(self, chunks: Sequence[Chunk]) -> Batch:
        """One sequence per chunk, in order; one row per chunk that samples, in the same order."""
        token_ids: list[int] = []
        positions: list[int] = []
        query_start = [0]
        context_len: list[int] = []
        logits_rows: list[int] = []
        rows: list[Request] = []
        for request, num_tokens, samples in chunks:
            start = request.num_computed_tokens
            end = start + num_tokens
            token_ids += request.tokens(start, end)
            positions += range(start, end)
            query_start.append(len(token_ids))
            context_len.append(end)
            if samples:
                logits_rows.append(len(token_ids) - 1)
                rows.append(request)
        if rows != self._rows:
            self._rows, self._parameters = rows, _parameters(rows)
        seen_start, seen_ids, seen_output_count = _ragged_history(rows)
        return Batch(
            token_ids=np.array(token_ids, np.int32),
            positions=np.array(positions, np.int32),
            query_start=np.array(query_start, np.int32),
            context_len=np.array(context_len, np.int32),
            block_tables=_block_tables([chunk.request for chunk in chunks], context_len, self._block_size),
            adapter=np.array([chunk.request.adapter for chunk in chunks], np.int32),
            block_copies=_NO_COPIES,
            logits_rows=np.array(logits_rows, np.int32),
            draw_position=np.array([len(request.output_ids) for request in rows], np.int64),
            seen_start=seen_start,
            seen_ids=seen_ids,
            seen_output_count=seen_output_count,
            mask_row=_NO_INT32,
            masks=_NO_MASKS,
            **self._parameters,
        )


def _parameters(rows: Sequence[Request]) -> dict[str, Any]:
    """The fields of a Batch that follow from which requests sample, and do not change from step to step."""
    params = [request.params for request in rows]
    bias_start, bias_ids, bias = _ragged_bias(rows)
    return {
        "target_ids": np.full(len(rows), -1, np.int32),
        "seed": np.array([request.seed for request in rows], np.uint64),
        "temperature": np.array([p.temperature for p in params], np.float32),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "top_k": np.array([max(p.top_k, 0) for p in params], np.int32),
        "repetition": np.array([p.repetition_penalty for p in params], np.float32),
        "presence": np.array([p.presence_penalty for p in params], np.float32),
        "frequency": np.array([p.frequency_penalty for p in params], np.float32),
        "num_logprobs": np.array([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
        "bias_start": bias_start,
        "bias_ids": bias_ids,
        "bias": bias,
    }


def read_result(chunks: Sequence[Chunk], result: StepResult) -> list[Outcome]:
    """Sort the rows of ``BatchBuilder.build(chunks)``'s result back to the chunks."""
    rows = [chunk for chunk in chunks if chunk.samples]
    token_ids, status = result.token_ids.tolist(), result.status.tolist()
    if not len(token_ids) == len(status) == len(rows):
        raise ExecutorError(f"{len(token_ids)} tokens and {len(status)} states came back for {len(rows)} rows")
    outcomes = iter([_read_row(chunk, result, row, token_ids[row], status[row]) for row, chunk in enumerate(rows)])
    return [next(outcomes) if chunk.samples else Outcome(chunk) for chunk in chunks]


def _read_row(chunk: Chunk, result: StepResult, row: int, token_id: int, status: int) -> Outcome:
    if status:  # RowStatus.OK is 0
        return Outcome(chunk, error=_STATUS_TEXT[RowStatus(status)])
    count = chunk.request.params.logprobs
    if count is None:
        return Outcome(chunk, token_id)
    ids, values = result.top_ids[row, :count].tolist(), result.top_logprobs[row, :count].tolist()
    top = tuple((top_id, value) for top_id, value in zip(ids, values, strict=True) if top_id >= 0)
    return Outcome(chunk, token_id, TokenLogprobs(token_id, float(result.logprobs[row]), top))


def _block_tables(requests: Sequence[Request], context_len: Sequence[int], block_size: int) -> Int32:
    """Only the blocks that hold the context; a request may own more, for later chunks."""
    width = -(-max(context_len) // block_size)
    # -1 is all ones, so that padding bytes is padding int32.
    rows = [
        request.block_table[: -(-length // block_size)].tobytes().ljust(4 * width, b"\xff")
        for request, length in zip(requests, context_len, strict=True)
    ]
    return np.frombuffer(b"".join(rows), np.int32).reshape(len(rows), width)


def _ragged_history(rows: Sequence[Request]) -> tuple[Int32, Int32, Int32]:
    histories = [request.history for request in rows]
    if all(history is None for history in histories):
        return _NO_INT32, _NO_INT32, _NO_INT32
    ids = array("i")
    output_count = array("i")
    start = [0]
    for history in histories:
        if history is not None:
            ids += history.ids
            output_count += history.output_count
        start.append(len(ids))
    return np.array(start, np.int32), np.array(ids, np.int32), np.array(output_count, np.int32)


def _ragged_bias(rows: Sequence[Request]) -> tuple[Int32, Int32, Float32]:
    biases = [request.params.logit_bias for request in rows]
    if not any(biases):
        return _NO_INT32, _NO_INT32, _NO_FLOAT32
    ids: list[int] = []
    values: list[float] = []
    start = [0]
    for bias in biases:
        ids += bias.keys()
        values += bias.values()
        start.append(len(ids))
    return np.array(start, np.int32), np.array(ids, np.int32), np.array(values, np.float32)
