"""The memory that is predicted before a model is loaded, beside what the native executor allocates."""

import pytest

from paceline.executors.footprint import native_footprint
from paceline.executors.native import NativeExecutor
from paceline.models.spec import ModelWeights
from tests.executors.tiny import tiny_spec, tiny_weights
from tests.executors.tiny_specs import TINY_SPECS

SPECS = {**TINY_SPECS, "groups-of-48": tiny_spec(heads=2, kv_heads=2, head_dim=48)}
SAMPLER = 4 * 150 * 2
"""What csrc/sampler.hpp writes at the start, which ``buffer_bytes`` does not count."""


@pytest.mark.parametrize("name", SPECS)
def test_larger_steps_and_more_threads_take_as_much_more_as_predicted(name: str) -> None:
    weights = tiny_weights(SPECS[name])
    allocated, predicted = buffers(weights, 64, 1)
    for tokens, threads in ((128, 1), (64, 2)):
        more_allocated, more_predicted = buffers(weights, tokens, threads)
        sampler = SAMPLER * (threads - 1)
        assert more_predicted - predicted == more_allocated - allocated + sampler


def buffers(weights: ModelWeights, tokens: int, threads: int) -> tuple[int, int]:
    """Bytes as allocated and as predicted."""
    needs = native_footprint(weights, kv_dtype="f16", max_batched_tokens=tokens, max_num_seqs=1, threads=threads)
    executor = NativeExecutor(
        weights, num_blocks=1, max_model_len=32, max_batched_tokens=tokens, kv_dtype="f16", threads=threads
    )
    allocated = executor.buffer_bytes
    executor.close()
    return allocated, needs.buffers
