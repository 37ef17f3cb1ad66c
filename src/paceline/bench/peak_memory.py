"""The memory a model really takes: every context filled, and the peak read from the kernel."""

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil

from paceline.engine.batch import build_batch
from paceline.engine.request import Request, SamplingParams
from paceline.engine.scheduler import Chunk
from paceline.loading import LoadedModel

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # https://docs.kernel.org/filesystems/proc.html


def resident_memory() -> int:
    """Bytes of this process that are in memory now."""
    return int(psutil.Process().memory_info().rss)


def measure_peak(loaded: LoadedModel, contexts: int, on_tokens: Callable[[int], None]) -> int:
    """The process's peak memory in bytes while ``contexts`` requests are held, each as long as the context allows.

    The executor is driven without the scheduler, which would end the first request before the last has its blocks.

    Args:
        loaded: with a KV pool that holds all of them.
        contexts: how many.
        on_tokens: called with the number of tokens that are done, after each step.
    """
    _CLEAR_REFS.write_text(_RESET_PEAK)
    length, blocks = loaded.engine.config.max_model_len, 0
    rng = np.random.default_rng(0)
    for number in range(contexts):
        prompt = rng.integers(0, loaded.spec.vocab_size, length).tolist()
        request = Request(str(number), prompt, SamplingParams(temperature=0.0), 0, max_output_tokens=1, arrival=number)
        table = range(blocks, blocks + -(-length // loaded.executor.kv_geometry.block_size))
        request.block_table = array("i", table)
        blocks = table.stop
        for done in _compute(loaded, request):
            on_tokens(number * length + done)
    return _peak()


def _compute(loaded: LoadedModel, request: Request) -> Iterator[int]:
    """Compute a request's prompt in steps of the largest size; the tokens done after each."""
    while pending := request.num_pending_tokens:
        count = min(pending, loaded.engine.config.max_num_batched_tokens)
        chunk = Chunk(request, count, samples=count == pending)
        loaded.executor.execute(build_batch([chunk], loaded.executor.kv_geometry.block_size))
        request.num_computed_tokens += count
        yield request.num_computed_tokens


def _peak() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
