"""Where a model runs: the executor of a device, the memory it will take there, and the memory that is free."""

from typing import Literal

from paceline.executors.base import Executor
from paceline.executors.footprint import Footprint, native_footprint, torch_footprint
from paceline.executors.native import NativeExecutor
from paceline.machine import free_gpu_memory, free_memory
from paceline.models.spec import ModelWeights
from paceline.options import EngineOptions


def make_executor(weights: ModelWeights, options: EngineOptions, *, num_blocks: int, max_model_len: int) -> Executor:
    """
    Raises:
        InputError: PyTorch is not installed, or sees no such device.
        ModelFileError: the model's shape is one that the kernels do not cover.
        ExecutorError: the model does not fit the GPU's memory.
    """
    if options.native:
        return NativeExecutor(
            weights,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_batched_tokens=options.max_num_batched_tokens,
            kv_dtype=options.kv_dtype,
            threads=options.used_threads,
            quantize=options.quantize,
        )
    # Imported here: PyTorch is an extra, and takes a second.
    from paceline.executors.torch.executor import TorchExecutor, use_threads

    use_threads(options.used_threads)
    return TorchExecutor(
        weights,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_batched_tokens=options.max_num_batched_tokens,
        kv_dtype="f32" if options.kv_dtype == "f32" else "f16",
        device=_torch_device(options.device),
        dtype=_torch_dtype(options.device),
    )


def footprint(weights: ModelWeights, options: EngineOptions) -> Footprint:
    """The memory that ``make_executor``'s will take."""
    if options.native:
        return native_footprint(
            weights,
            kv_dtype=options.kv_dtype,
            max_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            threads=options.used_threads,
            quantize=options.quantize,
        )
    return torch_footprint(weights, dtype=_torch_dtype(options.device), half_kv=options.kv_dtype == "f16")


def free_memory_on(device: str) -> int:
    """Bytes that can still be taken there."""
    kind, _, number = _torch_device(device).partition(":")
    return free_gpu_memory(int(number or 0)) if kind == "cuda" else free_memory()


def _torch_device(device: str) -> str:
    return device.removeprefix("torch:")


def _torch_dtype(device: str) -> Literal["float32", "bfloat16"]:
    """Half the memory on a GPU; on the CPU, PyTorch is what other executors are compared with."""
    return "float32" if _torch_device(device) == "cpu" else "bfloat16"
