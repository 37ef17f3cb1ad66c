"""Batches for executor tests, written as what they mean."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.executors.base import Batch, Float32


@dataclass
class Sequence:
    """Tokens to compute from position ``start`` on, in the KV blocks of ``table``."""

    tokens: list[int]
    table: list[int]
    start: int = 0


@dataclass
class Row:
    """A row of logits for token ``token`` of sequence ``sequence``, and how to sample it."""

    sequence: int
    token: int = -1
    target: int = -1
    seed: int = 0
    draw_position: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    num_logprobs: int = -1
    seen: dict[int, int] = field(default_factory=dict)
    bias: dict[int, float] = field(default_factory=dict)
    allowed: list[int] | None = None


def make_batch(
    sequences: list[Sequence],
    rows: list[Row] | None = None,
    *,
    vocab_size: int = 0,
    copies: list[tuple[int, int]] | None = None,
    **replaced: Any,
) -> Batch:
    """By default one greedy row for the last token of each sequence; ``replaced`` sets raw fields."""
    rows = [Row(s) for s in range(len(sequences))] if rows is None else rows
    starts = np.cumsum([0, *(len(s.tokens) for s in sequences)])
    width = max(len(s.table) for s in sequences)
    masked = [row for row in rows if row.allowed is not None]
    fields: dict[str, Any] = {
        "token_ids": _i32([t for s in sequences for t in s.tokens]),
        "positions": _i32([s.start + i for s in sequences for i in range(len(s.tokens))]),
        "query_start": _i32(starts),
        "context_len": _i32([s.start + len(s.tokens) for s in sequences]),
        "block_tables": _i32([s.table + [-1] * (width - len(s.table)) for s in sequences]),
        "adapter": _i32([0] * len(sequences)),
        "block_copies": _i32(copies or []).reshape(-1, 2),
        "logits_rows": _i32([starts[r.sequence] + r.token % len(sequences[r.sequence].tokens) for r in rows]),
        "target_ids": _i32([r.target for r in rows]),
        "seed": np.array([r.seed for r in rows], np.uint64),
        "draw_position": np.array([r.draw_position for r in rows], np.int64),
        "top_k": _i32([r.top_k for r in rows]),
        "num_logprobs": _i32([r.num_logprobs for r in rows]),
        "seen_start": _i32(np.cumsum([0, *(len(r.seen) for r in rows)])),
        "seen_ids": _i32([t for r in rows for t in r.seen]),
        "seen_output_count": _i32([n for r in rows for n in r.seen.values()]),
        "bias_start": _i32(np.cumsum([0, *(len(r.bias) for r in rows)])),
        "bias_ids": _i32([t for r in rows for t in r.bias]),
        "bias": np.array([b for r in rows for b in r.bias.values()], np.float32),
        "mask_row": _i32([-1 if r.allowed is None else masked.index(r) for r in rows]),
        "masks": np.array([_mask(r.allowed or [], vocab_size) for r in masked], np.uint32).reshape(
            len(masked), -(-vocab_size // 32)
        ),
    }
    for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency"):
        fields[name] = np.array([getattr(r, name) for r in rows], np.float32)
    return Batch(**(fields | replaced))


def _mask(allowed: list[int], vocab_size: int) -> list[int]:
    words = [0] * -(-vocab_size // 32)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return words


def _i32(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.ascontiguousarray(values, dtype=np.int32)


def logits_of_all(model: Any, ids: list[int], chunk: int, table: list[int]) -> Float32:
    """Logits of every position of a sequence, computed in chunks."""
    parts = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        parts.append(model.logits(make_batch([Sequence(part, table, start)], [Row(0, i) for i in range(len(part))])))
    return np.concatenate(parts)
