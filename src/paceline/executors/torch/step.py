"""A batch as the forward pass needs it: index tensors on the device, worked out once for all layers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.executors.base import BLOCK_SIZE, Batch

_GROUP_LIMIT = 1 << 20
"""Scores per head that exist at a time, where a query counts as 32 at least, for the keys and values it gathers."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Stretches of queries that attend in one go: N stretches of Q tokens each, over K padded cache slots."""

    tokens: Tensor
    """[N, Q], indices into the batch's tokens."""
    positions: Tensor
    """[N, Q]"""
    blocks: Tensor
    """[N, K / 32], KV blocks of the sequence each stretch belongs to; any block beyond its context."""
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def visible(self, window: int | None) -> Tensor:
        """[N, Q, K], true where a query sees a key: not after it, and not further back than the window."""
        if window not in self._masks:
            keys = torch.arange(self.blocks.shape[1] * BLOCK_SIZE, device=self.blocks.device)
            distance = self.positions[:, :, None] - keys
            seen = distance >= 0
            self._masks[window] = seen if window is None else seen & (distance < window)
        return self._masks[window]


@dataclass(frozen=True, slots=True)
class Step:
    """One batch's tokens and where their keys and values go."""

    token_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    slots: Tensor
    """[T], place in the KV cache, counted in tokens."""
    copies: Tensor
    """[2, C], (sources, destinations): blocks to copy before anything is written."""
    logits_rows: Tensor
    """[R], indices into T."""
    groups: list[AttentionGroup]


def prepare(batch: Batch, device: torch.device) -> Step:
    """The step of a batch that has been validated."""
    sequence = np.repeat(np.arange(batch.num_sequences), np.diff(batch.query_start))
    block = batch.block_tables[sequence, batch.positions // BLOCK_SIZE]
    return Step(
        token_ids=_indices(batch.token_ids, device),
        positions=_indices(batch.positions, device),
        slots=_indices(block * np.int64(BLOCK_SIZE) + batch.positions % BLOCK_SIZE, device),
        copies=_indices(_copies_at_once(batch), device),
        logits_rows=_indices(batch.logits_rows, device),
        groups=[_group(batch, stretches, device) for stretches in _grouped(_stretches(batch))],
    )


@dataclass(frozen=True, slots=True, order=True)
class _Stretch:
    """Consecutive queries of one sequence; sorts by what may share a group."""

    count: int
    context: int
    """Keys they see, the last query's own included."""
    sequence: int
    first_token: int

    @property
    def cost(self) -> int:
        return self.context * max(self.count, 32)


def _stretches(batch: Batch) -> Iterator[_Stretch]:
    for sequence in range(batch.num_sequences):
        begin, end = int(batch.query_start[sequence]), int(batch.query_start[sequence + 1])
        context = int(batch.context_len[sequence])
        most = max(_GROUP_LIMIT // context, 1)
        for first in range(begin, end, most):
            last = min(first + most, end)
            yield _Stretch(last - first, context - (end - last), sequence, first)


def _grouped(stretches: Iterator[_Stretch]) -> Iterator[list[_Stretch]]:
    """Stretches of the same length together, those with contexts alike first: little is padded."""
    group: list[_Stretch] = []
    for stretch in sorted(stretches):
        # sorted by context, so the newest is the one that the others would be padded to
        if group and (group[0].count != stretch.count or (len(group) + 1) * stretch.cost > _GROUP_LIMIT):
            yield group
            group = []
        group.append(stretch)
    yield group


def _group(batch: Batch, stretches: list[_Stretch], device: torch.device) -> AttentionGroup:
    tokens = np.array([s.first_token for s in stretches])[:, None] + np.arange(stretches[0].count)
    contexts = np.array([s.context for s in stretches])
    first_position = np.arange(-(-contexts.max() // BLOCK_SIZE)) * BLOCK_SIZE
    blocks = batch.block_tables[[s.sequence for s in stretches], : len(first_position)]
    return AttentionGroup(
        tokens=_indices(tokens, device),
        positions=_indices(batch.positions[tokens], device),
        blocks=_indices(np.where(first_position < contexts[:, None], blocks, 0), device),
    )


def _copies_at_once(batch: Batch) -> NDArray[np.int64]:
    """The batch's copies, each from what its source holds before the first: a source may be an earlier destination."""
    origin: dict[int, int] = {}
    for source, destination in batch.block_copies.tolist():
        origin[destination] = origin.get(source, source)
    return np.array([list(origin.values()), list(origin)], np.int64)


def _indices(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)
