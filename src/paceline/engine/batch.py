"""From a plan to the executor's arrays, and back from its result."""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.engine.chunk import Chunk
from paceline.engine.outputs import TokenLogprobs
from paceline.engine.request import Request
from paceline.engine.sampling import SamplingParams
from paceline.errors import ExecutorError
from paceline.executors.base import Batch, Float32, Int32, RowStatus, StepResult

_SAMPLE = -1
"""Where a row's target is not a token to score."""

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


class Sample(NamedTuple):
    """A token that was drawn."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """Why there is none."""


class Outcome(NamedTuple):
    """What became of a chunk: computed, with the tokens sampled behind it and those of its prompt scored; or failed."""

    chunk: Chunk
    samples: Sequence[Sample] = ()
    """The next tokens: one, and as many more as the draft was right."""
    forks: Sequence[tuple[Request, Sample]] = ()
    """The first tokens of the choices that start here."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


class BatchBuilder:
    """Writes steps' plans as arrays, and keeps those of the sampling parameters while the same requests sample."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: list[Request] = []
        """Whose parameters are kept."""
        self._parameters = _parameters([], [])

    def build(self, chunks: Sequence[Chunk]) -> Batch:
        """One sequence per chunk, in order. Its rows: a row for each token of the prompt that is scored, then, if it
        samples, one for the next token, one behind each token of its draft, and one for each fork."""
        token_ids: list[int] = []
        positions: list[int] = []
        query_start = [0]
        context_len: list[int] = []
        logits_rows: list[int] = []
        rows: list[Request] = []
        targets: list[int] = []
        draw_position: list[int] = []
        copies: list[tuple[int, int]] = []
        for request, num_tokens, samples, draft in chunks:
            start = request.num_computed_tokens
            end = start + num_tokens
            first = len(token_ids)
            token_ids += request.tokens(start, end - len(draft))
            token_ids += draft
            positions += range(start, end)
            query_start.append(len(token_ids))
            context_len.append(end)
            if request.next_scored < len(request.prompt_ids):
                scored = _scored(request, end)
                logits_rows += range(first + scored.start - 1 - start, first + scored.stop - 1 - start)
                rows += [request] * len(scored)
                targets += request.tokens(scored.start, scored.stop)
                draw_position += [0] * len(scored)
            if samples and not draft and not request.forks:
                # Nearly always: it is worth a way of its own.
                logits_rows.append(len(token_ids) - 1)
                rows.append(request)
                targets.append(_SAMPLE)
                draw_position.append(len(request.output_ids))
            elif samples:
                num_output = len(request.output_ids)
                sampling = [request] * (1 + len(draft)) + request.forks
                logits_rows += range(len(token_ids) - 1 - len(draft), len(token_ids))
                logits_rows += [len(token_ids) - 1] * len(request.forks)
                rows += sampling
                targets += [_SAMPLE] * len(sampling)
                draw_position += range(num_output, num_output + 1 + len(draft))
                draw_position += [0] * len(request.forks)
            if request.copy_from is not None:
                copies.append((request.copy_from, request.block_table[start // self._block_size]))
        seen_start, seen_ids, seen_output_count = _ragged_history(rows)
        return Batch(
            token_ids=np.array(token_ids, np.int32),
            positions=np.array(positions, np.int32),
            query_start=np.array(query_start, np.int32),
            context_len=np.array(context_len, np.int32),
            block_tables=_block_tables([chunk.request for chunk in chunks], context_len, self._block_size),
            adapter=np.array([chunk.request.adapter for chunk in chunks], np.int32),
            block_copies=np.array(copies, np.int32) if copies else _NO_COPIES,
            logits_rows=np.array(logits_rows, np.int32),
            draw_position=np.array(draw_position, np.int64),
            seen_start=seen_start,
            seen_ids=seen_ids,
            seen_output_count=seen_output_count,
            mask_row=_NO_INT32,
            masks=_NO_MASKS,
            **self._row_parameters(rows, targets),
        )

    def _row_parameters(self, rows: list[Request], targets: list[int]) -> dict[str, Any]:
        """The fields of a Batch that follow from which requests have the rows; they change only as those do."""
        if max(targets, default=_SAMPLE) != _SAMPLE or any(request.is_banning for request in rows if request.bans):
            return _parameters(rows, targets)
        if rows != self._rows:
            self._rows, self._parameters = rows, _parameters(rows, targets)
        return self._parameters


def _scored(request: Request, end: int) -> range:
    """Positions of the prompt whose tokens are scored by a chunk that ends before ``end``."""
    return range(request.next_scored, min(end + 1, len(request.prompt_ids)))


def _parameters(rows: Sequence[Request], targets: Sequence[int]) -> dict[str, Any]:
    params = [request.params for request in rows]
    bias_start, bias_ids, bias = _ragged_bias(rows)
    return {
        "target_ids": np.array(targets, np.int32),
        "seed": np.array([request.seed for request in rows], np.uint64),
        "temperature": np.array([p.temperature for p in params], np.float32),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "top_k": np.array([max(p.top_k, 0) for p in params], np.int32),
        "repetition": np.array([p.repetition_penalty for p in params], np.float32),
        "presence": np.array([p.presence_penalty for p in params], np.float32),
        "frequency": np.array([p.frequency_penalty for p in params], np.float32),
        "num_logprobs": np.array([_num_logprobs(*row) for row in zip(params, targets, strict=True)], np.int32),
        "bias_start": bias_start,
        "bias_ids": bias_ids,
        "bias": bias,
    }


def _num_logprobs(params: SamplingParams, target: int) -> int:
    asked = params.logprobs if target == _SAMPLE else params.prompt_logprobs
    return -1 if asked is None else asked


def read_result(chunks: Sequence[Chunk], result: StepResult) -> list[Outcome]:
    """Sort the rows of ``BatchBuilder.build(chunks)``'s result back to the chunks."""
    rows = _Rows(result)
    outcomes = [_read_chunk(chunk, rows) for chunk in chunks]
    rows.check_read()
    return outcomes


class _Rows:
    """Reads a result row by row."""

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self._token_ids, self._status = result.token_ids.tolist(), result.status.tolist()
        self._next = 0

    def next(self, count: int | None) -> Sample:
        """The next row, with ``count`` likeliest tokens, or without log-probabilities (None)."""
        row = self._next
        self._next += 1
        if row >= len(self._token_ids):
            raise ExecutorError(f"only {len(self._token_ids)} rows came back")
        token_id = self._token_ids[row]
        if self._status[row]:  # RowStatus.OK is 0
            return Sample(token_id, error=_STATUS_TEXT[RowStatus(self._status[row])])
        if count is None:
            return Sample(token_id)
        ids = self._result.top_ids[row, :count].tolist()
        values = self._result.top_logprobs[row, :count].tolist()
        top = tuple((top_id, value) for top_id, value in zip(ids, values, strict=True) if top_id >= 0)
        return Sample(token_id, TokenLogprobs(token_id, float(self._result.logprobs[row]), top))

    def check_read(self) -> None:
        if not self._next == len(self._token_ids) == len(self._status):
            raise ExecutorError(
                f"{len(self._token_ids)} tokens and {len(self._status)} states came back for {self._next} rows"
            )


def _read_chunk(chunk: Chunk, rows: _Rows) -> Outcome:
    request = chunk.request
    params = request.params
    if not chunk.draft and not request.forks and request.next_scored == len(request.prompt_ids):
        # Nearly always: it is worth a way of its own.
        if not chunk.samples:
            return Outcome(chunk)
        sample = rows.next(params.logprobs)
        return Outcome(chunk, (sample,)) if sample.error is None else Outcome(chunk, error=sample.error)
    prompt = [
        rows.next(params.prompt_logprobs) for _ in _scored(request, request.num_computed_tokens + chunk.num_tokens)
    ]
    samples, forks = [], []
    if chunk.samples:
        samples = [rows.next(params.logprobs) for _ in range(1 + len(chunk.draft))]
        forks = [(fork, rows.next(params.logprobs)) for fork in request.forks]
    failed = next((sample.error for sample in (*prompt, *samples[:1]) if sample.error is not None), None)
    if failed is not None:
        return Outcome(chunk, error=failed)
    scores = tuple(sample.logprobs for sample in prompt if sample.logprobs is not None)
    return Outcome(chunk, _accepted(samples, chunk.draft), forks, scores)


def _accepted(samples: Sequence[Sample], draft: Sequence[int]) -> Sequence[Sample]:
    """The draws up to the first that is not what the draft said; those behind it had another context."""
    for index, token_id in enumerate(draft):
        if samples[index].token_id != token_id:
            return samples[: index + 1]
    return samples


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
    biases = [_bias(request) for request in rows]
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


def _bias(request: Request) -> Mapping[int, float]:
    """What is added to the logits of the request's next token."""
    if not request.is_banning:
        return request.params.logit_bias
    assert request.bans is not None
    return {**request.params.logit_bias, **dict.fromkeys(request.bans.token_ids(request.output_ids), -math.inf)}
