"""The memory a model really takes: every context filled, and the peak read from the kernel."""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from numpy.random import default_rng

from paceline.engine.batch import BatchBuilder
from paceline.engine.chunk import Chunk
from paceline.engine.request import Request
from paceline.engine.sampling import SamplingParams
from paceline.loading import LoadedModel

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)
"""What makes the sampler use all its arrays."""
_RESET_PEAK = "5"  # https://docs.kernel.org/filesystems/proc.html


def resident_memory() -> int:
    """Bytes of this process that are in memory now, without what has been freed and would be used again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    return int(psutil.Process().memory_info().rss)


def measure_peak(loaded: LoadedModel, contexts: int, on_tokens: Callable[[int], None]) -> int:
    """The process's peak memory in bytes while ``contexts`` requests are held, each as long as the context allows.

    Steps are as large as they may be, and in the end all of them sample a token in one. The executor is driven without
    the scheduler, which would end the first request before the last has its blocks.

    Args:
        loaded: with a KV pool that holds all of them.
        contexts: how many.
        on_tokens: called with the number of tokens that are done, after each step.
    """
    _CLEAR_REFS.write_text(_RESET_PEAK)
    length, blocks = loaded.engine.config.max_model_len, 0
    rng = default_rng(0)
    requests = []
    for number in range(contexts):
        prompt = rng.integers(0, loaded.spec.vocab_size, length).tolist()
        request = Request(str(number), prompt, _SAMPLING, 0, max_output_tokens=1, arrival=number)
        table = range(blocks, blocks + -(-length // loaded.executor.kv_geometry.block_size))
        request.block_table = array("i", table)
        blocks = table.stop
        requests.append(request)
    while chunks := _next_step(requests, loaded.engine.config.max_num_batched_tokens):
        _execute(loaded, chunks)
        for chunk in chunks:
            chunk.request.num_computed_tokens += chunk.num_tokens
        on_tokens(sum(request.num_computed_tokens for request in requests))
    for request in requests:
        request.num_computed_tokens -= 1
    _execute(loaded, [Chunk(request, 1, samples=True) for request in requests])
    return _peak()


def _next_step(requests: Sequence[Request], room: int) -> list[Chunk]:
    """``room`` tokens of the first requests that are not all computed; none when all are."""
    chunks = []
    for request in requests:
        pending = request.num_pending_tokens
        count = min(pending, room)
        if count:
            chunks.append(Chunk(request, count, samples=count == pending))
        room -= count
    return chunks


def _execute(loaded: LoadedModel, chunks: list[Chunk]) -> None:
    loaded.executor.execute(BatchBuilder(loaded.executor.kv_geometry.block_size).build(chunks))


def _peak() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
