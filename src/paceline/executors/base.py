"""The contract between the engine and whatever runs the model: one message down, one message up."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.models.spec import ModelSpec

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
UInt32 = NDArray[np.uint32]
UInt8 = NDArray[np.uint8]
Float32 = NDArray[np.float32]

BLOCK_SIZE = 32
"""Tokens per KV block. Attention walks partitions of a whole number of blocks, so executors rely on it."""


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Size of the KV pool that an executor owns."""

    block_size: int
    num_blocks: int
    bytes_per_block: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. Arrays are C-contiguous and never written after construction.

    T tokens of S sequences are computed; R of them (rows) get logits and, where ``target_ids`` is -1, a sampled token.
    """

    token_ids: Int32
    """[T], the sequences' new tokens one after another."""
    positions: Int32
    """[T], position of each token in its own sequence, from 0."""
    query_start: Int32
    """[S+1], first token of each sequence in T; the last entry is T."""
    context_len: Int32
    """[S], KV length of each sequence including this step's tokens."""
    block_tables: Int32
    """[S, B], KV block of each 32 positions, padded with -1."""
    adapter: Int32
    """[S], LoRA adapter; 0 is none, and the only value that executors accept so far."""
    block_copies: Int32
    """[C, 2], (source, destination) blocks copied before the forward pass."""
    logits_rows: Int32
    """[R], indices into T."""
    target_ids: Int32
    """[R], -1 to sample, otherwise the token to score; scoring draws nothing and returns the target."""
    seed: UInt64
    """[R]"""
    draw_position: Int64
    """[R], with the seed the counter of the random number: equal pairs draw equal numbers."""
    temperature: Float32
    """[R], 0 takes the likeliest token."""
    top_p: Float32
    """[R], 1 keeps all."""
    min_p: Float32
    """[R], 0 keeps all."""
    top_k: Int32
    """[R], 0 keeps all."""
    repetition: Float32
    """[R], 1 is none."""
    presence: Float32
    """[R], 0 is none."""
    frequency: Float32
    """[R], 0 is none."""
    num_logprobs: Int32
    """[R], -1 for none, otherwise how many of the likeliest tokens to return beside the chosen one's."""
    seen_start: Int32
    """[R+1], or empty when no row has a penalty: each row's part of ``seen_ids``."""
    seen_ids: Int32
    """Distinct tokens of the row's history."""
    seen_output_count: Int32
    """How often each was generated; 0 is a token that only the prompt has."""
    bias_start: Int32
    """[R+1], or empty when no row has a bias: each row's part of ``bias_ids``."""
    bias_ids: Int32
    bias: Float32
    """Added to the logits; -inf bans."""
    mask_row: Int32
    """[R], or empty when no row has a mask: the row's line of ``masks``, -1 for none."""
    masks: UInt32
    """[M, ceil(V/32)], bit i of word w allows token 32 w + i."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.context_len)

    @property
    def num_rows(self) -> int:
        return len(self.logits_rows)


class RowStatus(IntEnum):
    """What became of a row."""

    OK = 0
    NON_FINITE = 1
    """The logits hold a NaN or an infinity."""
    NOTHING_ALLOWED = 2
    """Mask and bias banned every token."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, in the order of ``Batch.logits_rows``."""

    token_ids: Int32
    """[R], sampled or scored token; -1 where the status is not OK."""
    status: UInt8
    """[R], a RowStatus each."""
    logprobs: Float32
    """[R], log-probability of the row's token in the raw distribution where ``num_logprobs`` >= 0, else NaN; empty if
    no row asked."""
    top_ids: Int32
    """[R, K] likeliest tokens first, K the largest ``num_logprobs``, padded with -1; [0, 0] if no row asked."""
    top_logprobs: Float32
    """[R, K], padded with NaN."""


class Executor(Protocol):
    """Runs batches over a KV pool it owns; holds no other state between calls."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def kv_geometry(self) -> KVGeometry: ...

    @property
    def device(self) -> str:
        """What it computes on, for people: ``CPU, avx512, 2 threads``."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        ...

    @property
    def kv_dtype(self) -> str:
        """Type in which K and V are kept, such as ``f16``."""
        ...

    @property
    def max_batched_tokens(self) -> int:
        """Largest T that ``execute`` takes."""
        ...

    def execute(self, batch: Batch) -> StepResult:
        """Write this step's KV, then compute and sample the rows asked for; the GIL is released meanwhile.

        Running the same batch again gives the same result: KV writes are idempotent.

        Raises:
            ExecutorError: the batch contradicts itself or the pool's size, or the computation failed.
        """
        ...

    def touch_kv(self) -> Iterator[None]:
        """Take the memory of the KV cache now rather than as blocks get used, so that running out of it happens now: a
        small piece with each ``next``, from any thread, also beside ``execute``.

        Raises:
            ExecutorError: there is not enough.
        """
        ...

    def close(self) -> None:
        """Give the memory and the threads back; calling it twice is harmless."""
        ...
