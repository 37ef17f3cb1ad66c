"""The PyTorch executor: any model on any device, from dequantized weights. It needs the extra ``paceline[torch]``."""

from collections.abc import Iterator
from threading import Lock
from typing import Literal

from paceline.errors import ExecutorError, InputError

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    raise InputError("running models with PyTorch needs PyTorch: pip install 'paceline[torch]'") from error

from paceline.executors.base import BLOCK_SIZE, Batch, Float32, KVGeometry, StepResult
from paceline.executors.torch.model import KVCache, TorchModel
from paceline.executors.torch.sampling import RowSampler, collect
from paceline.executors.torch.step import prepare
from paceline.executors.torch.validate import BatchLimits, validate
from paceline.models.spec import ModelSpec, ModelWeights

TorchKVDType = Literal["f32", "f16", "bf16"]
TorchDType = Literal["float32", "bfloat16"]

_KV_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ROWS_AT_A_TIME = 64
"""Rows whose logits exist together: a vocabulary of 262 144 takes 64 MiB then, and sampling a few times that."""


_Loaded = tuple[TorchModel, KVCache]


def use_threads(number: int) -> None:
    """How many CPU threads PyTorch computes with, in this whole process."""
    torch.set_num_threads(number)


def torch_kv_bytes_per_block(spec: ModelSpec, kv_dtype: TorchKVDType) -> int:
    """Bytes of one KV block: K and V of 32 tokens in every layer."""
    return 2 * BLOCK_SIZE * spec.num_layers * spec.kv_size * _KV_TYPES[kv_dtype].itemsize


class TorchExecutor:
    """Runs a model with PyTorch on a CPU or a GPU.

    A request's tokens depend on its prompt, parameters and seed, but also, in the last bits of the logits, on the shape
    of the batch: libraries of matrix products choose their order of summation by it. Where two tokens are all but
    equally likely, company or chunking may therefore decide between them. ``NativeExecutor`` promises more.

    How many CPU threads PyTorch uses is the caller's choice (``use_threads``), as it holds for the process.

    Args:
        num_blocks: size of the KV pool in blocks of 32 tokens.
        max_model_len: longest sequence, in tokens.
        max_batched_tokens: most tokens in one batch.
        kv_dtype: type in which K and V are kept.
        device: ``cpu``, ``cuda``, ``cuda:1``, or another one that PyTorch knows and that has float64.
        dtype: type of the weight matrices and of the products with them; all else is computed in float32.

    Raises:
        InputError: there is no such device, or the model has no positions for sequences that long.
        ExecutorError: weights and KV pool do not fit the device's memory.
    """

    def __init__(
        self,
        weights: ModelWeights,
        *,
        num_blocks: int,
        max_model_len: int,
        max_batched_tokens: int = 512,
        kv_dtype: TorchKVDType = "f16",
        device: str = "cpu",
        dtype: TorchDType = "float32",
    ) -> None:
        self.spec = weights.spec
        self.kv_dtype: TorchKVDType = kv_dtype
        self.max_batched_tokens = max_batched_tokens
        self.kv_geometry = KVGeometry(BLOCK_SIZE, num_blocks, torch_kv_bytes_per_block(self.spec, kv_dtype))
        self._limits = BatchLimits(self.spec.vocab_size, num_blocks, max_batched_tokens, max_model_len)
        self._turn = Lock()
        if self.spec.learned_positions and max_model_len > self.spec.context_length:
            raise InputError(
                f"max_model_len is {max_model_len}, but {self.spec.name} has embeddings for "
                f"{self.spec.context_length} positions",
                param="max_model_len",
            )
        self._device = _open_device(device)
        try:
            model = TorchModel(weights, _TYPES[dtype], self._device)
            self._loaded: _Loaded | None = model, KVCache(self.spec, num_blocks, _KV_TYPES[kv_dtype], self._device)
        except RuntimeError as error:
            size = num_blocks * self.kv_geometry.bytes_per_block / 2**20
            raise ExecutorError(
                f"{self.spec.name} and a KV pool of {size:.0f} MiB do not fit {self._device}: {error}"
            ) from error

    @property
    def device(self) -> str:
        """Such as ``PyTorch on cpu`` or ``PyTorch on cuda:0 (NVIDIA H200)``."""
        if self._device.type != "cuda":
            return f"PyTorch on {self._device}"
        return f"PyTorch on {self._device} ({torch.cuda.get_device_name(self._device)})"

    @property
    def weight_bytes(self) -> int:
        """Memory of the dequantized weights."""
        with self._turn:
            model, _ = self._opened()
            return model.weight_bytes

    def execute(self, batch: Batch) -> StepResult:
        """See ``Executor.execute``."""
        with self._turn, torch.inference_mode():
            try:
                return collect([sampler.sample(logits) for sampler, logits in self._run(batch)])
            except RuntimeError as error:
                raise ExecutorError(str(error)) from error

    def logits(self, batch: Batch) -> Float32:
        """Run the batch and return its rows' raw logits, [R, vocab_size], drawing nothing: for tests and scoring.

        Raises:
            ExecutorError: as ``execute`` does.
        """
        with self._turn, torch.inference_mode():
            try:
                return torch.cat([logits.cpu() for _, logits in self._run(batch)]).numpy()
            except RuntimeError as error:
                raise ExecutorError(str(error)) from error

    def touch_kv(self) -> Iterator[None]:
        """See ``Executor.touch_kv``: PyTorch takes a GPU's memory when the pool is made."""
        return iter(())

    def close(self) -> None:
        """See ``Executor.close``."""
        with self._turn:
            self._loaded = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _run(self, batch: Batch) -> Iterator[tuple[RowSampler, Tensor]]:
        """Write the step's keys and values, then give the raw logits of some rows at a time."""
        model, cache = self._opened()
        validate(batch, self._limits)
        step = prepare(batch, self._device)
        cache.copy_blocks(*step.copies)
        hidden = model.hidden(step, cache)[step.logits_rows]
        for begin in range(0, max(batch.num_rows, 1), _ROWS_AT_A_TIME):  # once at least: a batch may have no rows
            end = min(begin + _ROWS_AT_A_TIME, batch.num_rows)
            yield RowSampler(batch, begin, end, self._device), model.logits(hidden[begin:end])

    def _opened(self) -> _Loaded:
        if self._loaded is None:
            raise ExecutorError("the executor is closed")
        return self._loaded


def _open_device(name: str) -> torch.device:
    try:
        return torch.zeros(1, dtype=torch.float64, device=name).device
    except (RuntimeError, AssertionError, TypeError) as error:  # no such device, a build without it, no float64 on it
        raise InputError(f"PyTorch cannot compute on the device {name!r}: {error}", param="device") from error
