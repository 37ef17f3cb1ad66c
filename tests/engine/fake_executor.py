"""An executor without a model that holds the engine to the contract of ``Batch``, like an adversary."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import accumulate

import numpy as np

from paceline.errors import ExecutorError
from paceline.executors.base import BLOCK_SIZE, Batch, KVGeometry, RowStatus, StepResult
from paceline.models.spec import LayerSpec, ModelSpec

_ROOT = 17

_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_PER_ROW = (*_FLOATS, "target_ids", "seed", "draw_position", "top_k", "num_logprobs")
_OTHER_DTYPES = {
    **dict.fromkeys((*_FLOATS, "bias"), np.float32),
    "seed": np.uint64,
    "draw_position": np.int64,
    "masks": np.uint32,
}


def _link(previous: int, token_id: int) -> int:
    """One link of the chain that stands for "all tokens up to here"."""
    return hash((previous, token_id))


class FakeExecutor:
    """Stores in each KV slot its position, its token and a hash of the whole context up to it.

    A wrong block table, a block that two requests write, a prefix published too early or a token computed from the
    wrong place breaks a chain of hashes, and ``violations`` says where. The sampled token is a function of the whole
    context, the parameters and, with a temperature, of (seed, draw position): any mix-up changes the output.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        block_size: int = BLOCK_SIZE,
        vocab_size: int = 256,
        max_batched_tokens: int = 512,
    ) -> None:
        self.spec = ModelSpec(
            architecture="fake",
            name="fake",
            vocab_size=vocab_size,
            context_length=4096,
            layers=(LayerSpec(None),),
            hidden_size=2,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            intermediate_size=2,
            attention_scale=1.0,
            norm_eps=1e-5,
            tied_embeddings=True,
        )
        self.kv_geometry = KVGeometry(block_size, num_blocks, bytes_per_block=0)
        self.max_batched_tokens = max_batched_tokens
        self.violations: list[str] = []
        self.batches: list[Batch] = []
        self.script: dict[int, Sequence[int]] = {}
        """Seed -> what its request generates, instead of hashes."""
        self.poison: set[int] = set()
        """Token ids that make ``execute`` raise when they are to be computed."""
        self.bad_status: dict[int, RowStatus] = {}
        """Seed -> status of its rows."""
        self.before_step: Callable[[], None] = lambda: None
        self.ref_count: Callable[[int], int] | None = None
        """The pool's count, to see blocks shared with requests that are not in the batch."""
        self.closed = False
        self._legitimate: set[int] | None = None
        self._kv = [[(-1, -1, 0)] * block_size for _ in range(num_blocks)]

    def expect(self, sequences: Iterable[Sequence[int]]) -> None:
        """From now on, only prefixes of these sequences may be computed."""
        self._legitimate = {link for tokens in sequences for link in accumulate(tokens, _link, initial=_ROOT)}

    def execute(self, batch: Batch) -> StepResult:
        self.before_step()
        self.batches.append(batch)
        self._check_shapes(batch)
        self._check_writers(batch)
        for source, destination in batch.block_copies.tolist():
            self._kv[destination] = list(self._kv[source])
        if self.poison & set(batch.token_ids.tolist()):
            raise ExecutorError("a poisoned token")
        contexts = [link for sequence in range(batch.num_sequences) for link in self._compute(batch, sequence)]
        return self._sample(batch, contexts)

    def touch_kv(self) -> Iterator[None]:
        return iter(())

    def close(self) -> None:
        self.closed = True

    def _require(self, condition: bool, violation: str) -> None:
        if not condition:
            self.violations.append(violation)
            raise AssertionError(violation)

    def _check_shapes(self, batch: Batch) -> None:
        for field in fields(batch):
            array = getattr(batch, field.name)
            dtype = _OTHER_DTYPES.get(field.name, np.int32)
            self._require(array.dtype == dtype and array.flags.c_contiguous, f"{field.name} is {array.dtype}")
        tokens, sequences, rows = batch.num_tokens, batch.num_sequences, batch.num_rows
        self._require(0 < tokens <= self.max_batched_tokens, f"{tokens} tokens in a step")
        self._require(len(batch.positions) == tokens, "positions and tokens differ in length")
        self._require(len(batch.query_start) == sequences + 1, "query_start has the wrong length")
        self._require(len(batch.adapter) == len(batch.block_tables) == sequences, "sequence arrays differ in length")
        self._require(int(batch.query_start[-1]) == tokens and int(batch.query_start[0]) == 0, "query_start is off")
        for name in _PER_ROW:
            self._require(len(getattr(batch, name)) == rows, f"{name} has not {rows} rows")
        for start, ids in ((batch.seen_start, batch.seen_ids), (batch.bias_start, batch.bias_ids)):
            whole = not len(start) or (len(start) == rows + 1 and int(start[-1]) == len(ids))
            self._require(whole, "a ragged array's starts do not fit")
        in_vocabulary = (batch.token_ids >= 0).all() and (batch.token_ids < self.spec.vocab_size).all()
        self._require(bool(in_vocabulary), "a token is outside the vocabulary")

    def _check_writers(self, batch: Batch) -> None:
        size = self.kv_geometry.block_size
        holders = Counter(int(block) for block in batch.block_tables.ravel() if block >= 0)
        for sequence in range(batch.num_sequences):
            begin, end = int(batch.query_start[sequence]), int(batch.query_start[sequence + 1])
            table = batch.block_tables[sequence].tolist()
            context = int(batch.context_len[sequence])
            held = table[: -(-context // size)]
            self._require(all(0 <= block < self.kv_geometry.num_blocks for block in held), f"block table {table}")
            self._require(begin < end, "a sequence without tokens")
            self._require(
                batch.positions[begin:end].tolist() == list(range(context - (end - begin), context)),
                f"positions of sequence {sequence} do not end at its context",
            )
            for block in {table[int(position) // size] for position in batch.positions[begin:end]}:
                count = holders[block] if self.ref_count is None else max(holders[block], self.ref_count(block))
                self._require(count == 1, f"block {block} is written and has {count} owners")

    def _compute(self, batch: Batch, sequence: int) -> list[int]:
        """Write the sequence's tokens, then walk its whole context; returns the hash of the context at each of them.

        What comes behind the first token that is sampled at is only proposed: nobody need know it.
        """
        size = self.kv_geometry.block_size
        table = batch.block_tables[sequence].tolist()
        begin, end = int(batch.query_start[sequence]), int(batch.query_start[sequence + 1])
        for token_id, position in zip(
            batch.token_ids[begin:end].tolist(), batch.positions[begin:end].tolist(), strict=True
        ):
            previous = self._slot(table, position - 1)[2] if position else _ROOT
            self._kv[table[position // size]][position % size] = (position, token_id, _link(previous, token_id))
        sampled_at = batch.logits_rows[batch.target_ids < 0]
        known = min((row for row in sampled_at.tolist() if begin <= row < end), default=end - 1) + 1
        context = int(batch.context_len[sequence])
        link, links = _ROOT, []
        for position in range(context):
            stored_position, token_id, stored_link = self._slot(table, position)
            link = _link(link, token_id)
            self._require(
                stored_position == position and stored_link == link,
                f"position {position} of sequence {sequence} holds KV of position {stored_position}, token {token_id}",
            )
            links.append(link)
            self._require(
                self._legitimate is None or link in self._legitimate or position >= context - (end - known),
                f"no request has token {token_id} at position {position} of sequence {sequence}",
            )
        return links[context - (end - begin) :]

    def _slot(self, table: list[int], position: int) -> tuple[int, int, int]:
        size = self.kv_geometry.block_size
        return self._kv[table[position // size]][position % size]

    def _sample(self, batch: Batch, contexts: list[int]) -> StepResult:
        token_ids, status, logprobs = [], [], []
        for row, (token, target) in enumerate(zip(batch.logits_rows.tolist(), batch.target_ids.tolist(), strict=True)):
            row_status = self.bad_status.get(int(batch.seed[row]), RowStatus.OK)
            status.append(int(row_status))
            if row_status != RowStatus.OK:
                token_ids.append(-1)
            else:
                token_ids.append(self._draw(batch, row, contexts[token]) if target < 0 else target)
            logprobs.append(-1.0 if target < 0 else score(contexts[token], target))
        width = max(int(batch.num_logprobs.max(initial=-1)), 0)
        asked = bool((batch.num_logprobs >= 0).any())
        top_ids = np.full((len(token_ids) if asked else 0, width), -1, np.int32)
        for row, count in enumerate(batch.num_logprobs.tolist() if asked else []):
            top_ids[row, : max(count, 0)] = [(token_ids[row] + rank) % self.spec.vocab_size for rank in range(count)]
        ranks = -1.0 - np.arange(width, dtype=np.float32)
        return StepResult(
            token_ids=np.array(token_ids, np.int32),
            status=np.array(status, np.uint8),
            logprobs=np.where(batch.num_logprobs >= 0, np.array(logprobs, np.float32), np.float32(np.nan))
            if asked
            else ranks[:0],
            top_ids=top_ids,
            top_logprobs=np.where(top_ids >= 0, ranks, np.float32(np.nan)),
        )

    def _draw(self, batch: Batch, row: int, context: int) -> int:
        seed, position = int(batch.seed[row]), int(batch.draw_position[row])
        if seed in self.script:
            return self.script[seed][position]
        random = (seed, position) if batch.temperature[row] > 0 else ()
        seen = _ragged(batch.seen_start, row, batch.seen_ids, batch.seen_output_count)
        bias = _ragged(batch.bias_start, row, batch.bias_ids, batch.bias)
        return hash((context, random, seen, bias)) % self.spec.vocab_size


def score(context: int, token_id: int) -> float:
    """What stands for the log-probability of a token of the prompt."""
    return -(hash((context, token_id)) % 1024) / 64


def context_hash(token_ids: Iterable[int]) -> int:
    """What stands for all of these tokens."""
    link = _ROOT
    for token_id in token_ids:
        link = _link(link, token_id)
    return link


def _ragged(start: np.ndarray, row: int, *columns: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """The row's part of ragged arrays; equal for an empty part and arrays that nobody uses."""
    if not len(start) or start[row] == start[row + 1]:
        return ()
    return tuple(tuple(column[start[row] : start[row + 1]].tolist()) for column in columns)


class ByteDecoder:
    """A token is the byte of its id; 0 and 1 are control tokens."""

    EOS = 0

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if 1 < token_id < 256 else b""

    def spellings(self, word: str) -> list[list[int]]:
        return [list(word.encode())]
