"""The composition root: model file -> executor -> engine."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import get_args

from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.request import SamplingParams
from paceline.errors import InputError, ModelFileError
from paceline.executors.base import BLOCK_SIZE
from paceline.executors.native import KVDType, NativeExecutor, kv_bytes_per_block
from paceline.machine import free_memory, usable_cores
from paceline.models.architectures import model_weights
from paceline.models.chat import ChatTemplate
from paceline.models.gguf import read_gguf
from paceline.models.resolve import resolve
from paceline.models.source import ModelSource
from paceline.models.spec import ModelSpec, ModelWeights
from paceline.models.tokenizer import Tokenizer

PullProgress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in all, what is fetched)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a model is run. What is None is chosen by the machine and the model."""

    max_model_len: int | None = None
    """Longest sequence in tokens; None: the model's own context."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    kv_memory: int | None = None
    """Bytes of the KV cache; None: a quarter of the free memory, capped at what max_num_seqs full contexts need."""
    kv_dtype: KVDType = "f16"
    threads: int | None = None
    """None: one per usable core."""
    chat_template: Path | str | None = None
    """A jinja file instead of the model's own template."""
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        """Raises InputError: a value of the wrong type, or out of range."""
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_memory", "threads"):
            value = getattr(self, name)
            optional = self.__dataclass_fields__[name].default is None
            if not (value is None and optional) and (not isinstance(value, int) or value < 1):
                raise InputError(f"{name} is {value!r}; a positive integer is needed", param=name)
        if self.kv_dtype not in get_args(KVDType):
            raise InputError(
                f"kv_dtype is {self.kv_dtype!r}; there are {', '.join(get_args(KVDType))}", param="kv_dtype"
            )
        cores = usable_cores()
        if self.threads is not None and self.threads > cores:
            raise InputError(
                f"threads is {self.threads}, but this process may use {cores} core{'s' if cores > 1 else ''}: "
                "more threads than cores only wait for each other",
                param="threads",
            )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: whoever has it owns the executor's memory and threads until ``close``."""

    source: ModelSource
    spec: ModelSpec
    weight_types: str
    """Such as ``Q4_1 + Q8_0``, the type of most weights first."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    executor: NativeExecutor
    engine: Engine
    """Not started: step it, or start it on a thread of its own."""

    @property
    def name(self) -> str:
        return self.source.name

    def describe(self) -> dict[str, str]:
        """What an operator wants to know, as (label, text) in reading order."""
        kind = "instruct" if self.chat_template is not None else "base: no chat template"
        if self.chat_template is None and self.source.go_template is not None:
            kind = "its chat template is in Go's language, which cannot be run here; see --chat-template"
        kv = self.executor.kv_geometry
        threads = self.executor.threads
        return {
            "model": f"{self.name} ({kind}), {self.spec.architecture}, {self.weight_types}, "
            f"{self.executor.weight_bytes / 2**20:.0f} MiB of weights",
            "device": f"CPU, {self.executor.isa}, {threads} thread{'s' if threads > 1 else ''}",
            "context": f"{self.engine.config.max_model_len} tokens",
            "KV cache": f"up to {kv.num_blocks * kv.bytes_per_block / 2**30:.2f} GiB ({self.executor.kv_dtype}), "
            f"{kv.num_blocks * kv.block_size} tokens in {kv.num_blocks} blocks",
        }

    def close(self) -> None:
        self.engine.stop()
        self.executor.close()


def load_model(
    model: str, *, options: EngineOptions | None = None, progress: PullProgress | None = None
) -> LoadedModel:
    """Load a MODEL as ``resolve`` takes it; what is not here is downloaded first.

    Raises:
        InputError: the name is unknown, or the options ask for what the model or the memory does not have.
        ModelFileError: the file is damaged or of a kind that cannot be run.
    """
    options = options or EngineOptions()
    source = resolve(model, progress)
    _check_sampling(source)
    with read_gguf(source.path) as file:
        weights = model_weights(file)
        tokenizer = Tokenizer.from_gguf(file.metadata)
        if options.chat_template is None:
            chat_template = ChatTemplate.from_gguf(file.metadata, tokenizer)
        else:
            chat_template = ChatTemplate.from_file(Path(options.chat_template), tokenizer)
    max_model_len = _max_model_len(weights.spec, source, options)
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=options.enable_prefix_caching,
        eos_ids=tokenizer.eos_ids,
    )
    executor = NativeExecutor(
        weights,
        num_blocks=_num_blocks(weights.spec, options, max_model_len),
        max_model_len=max_model_len,
        max_batched_tokens=options.max_num_batched_tokens,
        kv_dtype=options.kv_dtype,
        threads=options.threads or usable_cores(),
    )
    return LoadedModel(
        source=source,
        spec=weights.spec,
        weight_types=_weight_types(weights),
        tokenizer=tokenizer,
        chat_template=chat_template,
        executor=executor,
        engine=Engine(executor, tokenizer, config),
    )


def _check_sampling(source: ModelSource) -> None:
    """Raises ModelFileError: the model's own sampling parameters are out of their ranges."""
    try:
        SamplingParams(**source.sampling)
    except (InputError, TypeError) as error:
        raise ModelFileError(f"{source.name}: the sampling parameters that it brings: {error}") from error


def _max_model_len(spec: ModelSpec, source: ModelSource, options: EngineOptions) -> int:
    if options.max_model_len is None:
        return min(spec.context_length, source.context_length or spec.context_length)
    if options.max_model_len > spec.context_length:
        raise InputError(
            f"max_model_len is {options.max_model_len}, but {spec.name} was trained for {spec.context_length} tokens",
            param="max_model_len",
        )
    return options.max_model_len


def _num_blocks(spec: ModelSpec, options: EngineOptions, max_model_len: int) -> int:
    per_block = kv_bytes_per_block(spec, options.kv_dtype)
    per_context = -(-max_model_len // BLOCK_SIZE)
    free = free_memory()
    memory = options.kv_memory
    if memory is None:
        memory = min(free // 4, options.max_num_seqs * per_context * per_block)
    if memory > free:
        raise InputError(
            f"a KV cache of {memory / 2**20:.0f} MiB does not fit the {free / 2**20:.0f} MiB of memory that are free",
            param="kv_memory",
        )
    blocks = memory // per_block
    if blocks < per_context:
        raise InputError(
            f"a context of {max_model_len} tokens needs {per_context * per_block / 2**20:.0f} MiB of KV cache, "
            f"there are {memory / 2**20:.0f}: give it more memory (kv_memory)"
            + (f", or set max_model_len to {blocks * BLOCK_SIZE} at most" if blocks else ""),
            param="kv_memory",
        )
    return blocks


def _weight_types(weights: ModelWeights) -> str:
    elements: Counter[str] = Counter()
    for tensor in weights.tensors.values():
        if len(tensor.shape) > 1:
            elements[tensor.type.name] += prod(tensor.shape)
    return " + ".join(name for name, _ in elements.most_common())
