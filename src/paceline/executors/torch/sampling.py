"""Choosing tokens from logits on the device, in vLLM's order: mask, bias, penalties, temperature, min-p, top-k, top-p.

Means what csrc/sampler.cpp means, and draws the same random numbers, so that the same distribution gives the same
token up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.executors.base import Batch, Int32, Int64, RowStatus, StepResult, UInt64

Float64 = NDArray[np.float64]
Number = TypeVar("Number", np.int32, np.uint8, np.float32)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A ``StepResult`` for some of the rows, still on the device."""

    token_ids: Tensor
    status: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True, slots=True)
class RowSampler:
    """Samples the rows ``begin`` to ``end`` of a batch from their raw logits."""

    batch: Batch
    begin: int
    end: int
    device: torch.device

    def sample(self, logits: Tensor) -> Sampled:
        """Choose from raw logits, float32 [end - begin, vocab_size]."""
        batch, rows = self.batch, slice(self.begin, self.end)
        adjusted = self._adjusted(logits)
        highest, likeliest = adjusted.max(1).values, adjusted.argmax(1)  # argmax takes the first of equals
        targets = self._on_device(batch.target_ids[rows].astype(np.int64))
        token = likeliest
        if ((batch.target_ids[rows] < 0) & (batch.temperature[rows] > 0)).any():
            warm = self._on_device(batch.temperature[rows] > 0)
            token = torch.where(warm, self._draw(adjusted, highest, likeliest), likeliest)
        token = torch.where(targets >= 0, targets, token)
        status = torch.where((highest == -torch.inf) & (targets < 0), int(RowStatus.NOTHING_ALLOWED), int(RowStatus.OK))
        status = torch.where(logits.isfinite().all(1), status, int(RowStatus.NON_FINITE))
        ok = status == RowStatus.OK
        return Sampled(torch.where(ok, token, -1), status, *self._logprobs(logits, token, ok))

    def _adjusted(self, logits: Tensor) -> Tensor:
        """After mask, bias and penalties; ``logits`` stays as it is."""
        batch, adjusted = self.batch, logits.clone()
        if len(batch.mask_row) and (batch.mask_row[self.begin : self.end] >= 0).any():
            adjusted.masked_fill_(~self._allowed(logits.shape[1]), -torch.inf)
        row, part = self._ragged(batch.bias_start)
        if len(row):
            ids = self._on_device(batch.bias_ids[part].astype(np.int64))
            adjusted.index_put_((self._on_device(row), ids), self._on_device(batch.bias[part]), accumulate=True)
        row, part = self._ragged(batch.seen_start)
        if len(row):
            index = self._on_device(row), self._on_device(batch.seen_ids[part].astype(np.int64))
            adjusted[index] = self._penalized(adjusted[index], row, batch.seen_output_count[part])
        return adjusted

    def _allowed(self, vocab_size: int) -> Tensor:
        """[rows, vocab_size] of the masks' bits; rows without a mask may choose all."""
        mask_row = self.batch.mask_row[self.begin : self.end]
        words = self._on_device(self.batch.masks.view(np.int32)[np.maximum(mask_row, 0)])
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=self.device)) & 1
        return bits.flatten(1)[:, :vocab_size].bool() | self._on_device(mask_row < 0)[:, None]

    def _penalized(self, logits: Tensor, row: Int64, output_count: Int32) -> Tensor:
        """vLLM's formulas (apply_penalties in vllm/model_executor/layers/utils.py) for tokens of a row's history."""
        batch, at = self.batch, row + self.begin
        repetition = self._on_device(batch.repetition[at])
        subtracted = batch.frequency[at] * output_count.astype(np.float32) + batch.presence[at]
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        return logits - self._on_device(np.where(output_count > 0, subtracted, np.float32(0)))

    def _draw(self, adjusted: Tensor, highest: Tensor, likeliest: Tensor) -> Tensor:
        """One token per row, by its temperature and filters."""
        batch, rows = self.batch, slice(self.begin, self.end)
        # clamped, so that logits and weights stay finite however small the temperature
        inverse = self._on_device(np.float32(1) / np.maximum(batch.temperature[rows], np.float32(1e-6)))
        weights = torch.exp((adjusted - highest[:, None]) * inverse[:, None])
        order = self._order(adjusted)
        kept = self._kept(weights.gather(1, order))
        summed = kept.cumsum(1)
        left = self._on_device(uniform(batch.seed[rows], batch.draw_position[rows])) * summed[:, -1]
        hit = (summed > left[:, None]) & (kept > 0)
        drawn = order.gather(1, hit.int().argmax(1, keepdim=True))[:, 0]
        # no hit: top-p is 0, or the product was rounded up to the whole sum, or the logits are not finite
        return torch.where(hit.any(1), drawn, likeliest)

    def _order(self, adjusted: Tensor) -> Tensor:
        """[rows, vocab_size]: token ids, likeliest first where top-k or top-p needs it, equal ones by id."""
        rows = slice(self.begin, self.end)
        order = torch.arange(adjusted.shape[1], device=self.device).repeat(len(adjusted), 1)
        ranked = np.flatnonzero((self.batch.top_k[rows] > 0) | (self.batch.top_p[rows] < 1))
        if len(ranked):
            index = self._on_device(ranked)
            order[index] = adjusted[index].sort(dim=1, descending=True, stable=True).indices
        return order

    def _kept(self, weights: Tensor) -> Tensor:
        """Weights in drawing order, float64, 0 where min-p, top-k or top-p removes the token."""
        batch, rows = self.batch, slice(self.begin, self.end)
        min_p, top_p = self._on_device(batch.min_p[rows]), self._on_device(batch.top_p[rows])
        top_k = batch.top_k[rows]
        kept = weights.masked_fill(weights < min_p[:, None], 0).double()
        rank = torch.arange(weights.shape[1], device=self.device)
        most = self._on_device(np.where(top_k > 0, top_k, weights.shape[1]).astype(np.int64))
        kept = kept.masked_fill(rank >= most[:, None], 0)
        if (batch.top_p[rows] < 1).any():  # the smallest set of likeliest tokens that reaches top_p
            summed = kept.cumsum(1)
            reached = summed - kept >= (top_p.double() * summed[:, -1])[:, None]
            kept = kept.masked_fill(reached & (top_p < 1)[:, None], 0)
        return kept

    def _logprobs(self, logits: Tensor, token: Tensor, ok: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of the tokens, and the likeliest tokens with theirs, in the raw distribution."""
        asked, top = self._on_device(self.batch.num_logprobs[self.begin : self.end]), _most_logprobs(self.batch)
        if top < 0:
            return logits.new_empty(0), logits.new_empty((0, 0)), logits.new_empty((0, 0))
        log_probability = logits.double().log_softmax(1).float()
        chosen = log_probability.gather(1, token[:, None])[:, 0]
        # a stable sort, which topk is not: equal ones by id
        ids = logits.sort(dim=1, descending=True, stable=True).indices if top else token[:, None]
        ids = ids[:, :top]
        shown = (torch.arange(top, device=self.device) < asked[:, None]) & ok[:, None]
        return (
            chosen.masked_fill(~ok | (asked < 0), torch.nan),
            ids.masked_fill(~shown, -1),
            log_probability.gather(1, ids).masked_fill(~shown, torch.nan),
        )

    def _ragged(self, start: Int32) -> tuple[Int64, slice]:
        """The row, counted from ``begin``, of each entry of a ragged array, and which entries those are."""
        if not len(start):
            return np.zeros(0, np.int64), slice(0, 0)
        lengths = np.diff(start[self.begin : self.end + 1])
        return np.repeat(np.arange(len(lengths)), lengths), slice(int(start[self.begin]), int(start[self.end]))

    def _on_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)


def collect(parts: Sequence[Sampled]) -> StepResult:
    """The rows' results, in order, off the device: what waits for the computation."""
    return StepResult(
        token_ids=_joined([part.token_ids for part in parts], np.int32),
        status=_joined([part.status for part in parts], np.uint8),
        logprobs=_joined([part.logprobs for part in parts], np.float32),
        top_ids=_joined([part.top_ids for part in parts], np.int32),
        top_logprobs=_joined([part.top_logprobs for part in parts], np.float32),
    )


def _joined(parts: list[Tensor], dtype: type[Number]) -> NDArray[Number]:
    return torch.cat(parts).cpu().numpy().astype(dtype)


def _most_logprobs(batch: Batch) -> int:
    """How wide the result's table of likeliest tokens is; -1 if no row asks for log-probabilities."""
    return int(batch.num_logprobs.max(initial=-1))


def uniform(seed: UInt64, position: Int64) -> Float64:
    """Numbers in [0, 1) that depend on seed and draw position alone, each [R]; those of csrc/sampler.cpp.

    SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2714064.2660195) of the one, then of both.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    bits = _mix(_mix(seed + golden) + golden * (position.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: UInt64) -> UInt64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
