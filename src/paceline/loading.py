"""The composition root: model file -> executor -> engine."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from math import prod
from pathlib import Path

from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.sampling import SamplingParams
from paceline.errors import InputError, ModelFileError
from paceline.executors.base import Executor
from paceline.executors.footprint import Footprint
from paceline.executors.quantize import Quantize, kept_type
from paceline.models.architectures import model_weights
from paceline.models.chat import ChatTemplate
from paceline.models.gguf import read_gguf
from paceline.models.ollama_gguf import in_terms_of_llama_cpp
from paceline.models.resolve import resolve
from paceline.models.source import ModelSource
from paceline.models.spec import ModelSpec, ModelWeights
from paceline.models.tokenizer import Tokenizer
from paceline.options import EngineOptions
from paceline.placement import footprint, free_memory_on, make_executor

PullProgress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in all, what is fetched)."""


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model file that has been read, but takes no memory for weights yet."""

    source: ModelSource
    weights: ModelWeights
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def spec(self) -> ModelSpec:
        return self.weights.spec

    @property
    def kind(self) -> str:
        """Instruct or base, as far as its chat template tells."""
        return _kind(self.source, self.chat_template)

    def weight_types(self, quantize: Quantize | None) -> str:
        """In what the matrices are kept: such as ``Q4_1 + Q8_0``, the type of most weights first."""
        elements: Counter[str] = Counter()
        for name, tensor in self.weights.tensors.items():
            if len(tensor.shape) > 1:
                elements[kept_type(name, tensor, quantize).name] += prod(tensor.shape)
        return " + ".join(name for name, _ in elements.most_common())

    def footprint(self, options: EngineOptions) -> Footprint:
        """The memory that running it takes."""
        return footprint(self.weights, options)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: whoever has it owns the executor's memory and threads until ``close``."""

    source: ModelSource
    spec: ModelSpec
    weight_types: str
    """In what they are kept: such as ``Q4_1 + Q8_0``, the type of most weights first."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    executor: Executor
    engine: Engine
    """Not started: step it, or start it on a thread of its own."""

    @property
    def name(self) -> str:
        return self.source.name

    def describe(self) -> dict[str, str]:
        """What an operator wants to know, as (label, text) in reading order."""
        kind = _kind(self.source, self.chat_template)
        kv = self.executor.kv_geometry
        kv_bytes = kv.num_blocks * kv.bytes_per_block
        size = f"{kv_bytes / 2**30:.2f} GiB" if kv_bytes >= 2**30 else f"{kv_bytes / 2**20:.0f} MiB"
        context = self.engine.config.max_model_len
        most = self.spec.context_length
        return {
            "model": f"{self.name} ({kind}), {self.spec.architecture}, {self.weight_types}, "
            f"{self.executor.weight_bytes / 2**20:.0f} MiB of weights",
            "device": self.executor.device,
            "context": f"{context} tokens" + (f" (the model's own is {most})" if context < most else ""),
            "KV cache": f"up to {size} ({self.executor.kv_dtype}), "
            f"{kv.num_blocks * kv.block_size} tokens in {kv.num_blocks} blocks",
        }

    def close(self) -> None:
        self.engine.stop()
        self.executor.close()


def open_model(
    model: str,
    *,
    chat_template: Path | str | None = None,
    template_date: date | None = None,
    progress: PullProgress | None = None,
) -> OpenModel:
    """Read a MODEL as ``resolve`` takes it; what is not here is downloaded first.

    Raises:
        InputError: the name is unknown, or the chat template's file cannot be read.
        ModelFileError: the file is damaged or of a kind that cannot be run.
    """
    source = resolve(model, progress)
    _check_sampling(source)
    with in_terms_of_llama_cpp(read_gguf(source.path)) as file:
        weights = model_weights(file)
        tokenizer = Tokenizer.from_gguf(file.metadata)
        if chat_template is None:
            template = ChatTemplate.from_gguf(file.metadata, tokenizer, today=template_date)
        else:
            template = ChatTemplate.from_file(Path(chat_template), tokenizer, today=template_date)
    return OpenModel(source, weights, tokenizer, template)


def load_model(
    model: str, *, options: EngineOptions | None = None, progress: PullProgress | None = None
) -> LoadedModel:
    """Load a model that ``open_model`` can read.

    Raises:
        InputError: as ``open_model`` does, or the options ask for what the model or the memory does not have.
        ModelFileError: as ``open_model`` does.
    """
    options = options or EngineOptions()
    opened = open_model(
        model, chat_template=options.chat_template, template_date=options.template_date, progress=progress
    )
    return run_model(opened, options)


def run_model(opened: OpenModel, options: EngineOptions) -> LoadedModel:
    """Repack the weights and take memory for the KV cache.

    Raises:
        InputError: the options ask for what the model or the memory does not have.
        ModelFileError: the model's shape is one that the kernels do not cover.
        ExecutorError: the model does not fit the GPU's memory.
    """
    max_model_len, num_blocks = _context_and_blocks(opened, options)
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=options.enable_prefix_caching,
        max_waiting=options.max_waiting,
        request_timeout=options.request_timeout,
        target_itl_ms=options.target_itl,
        prompt_lookup_tokens=options.prompt_lookup_tokens,
        eos_ids=opened.tokenizer.eos_ids,
    )
    executor = make_executor(opened.weights, options, num_blocks=num_blocks, max_model_len=max_model_len)
    return LoadedModel(
        source=opened.source,
        spec=opened.spec,
        weight_types=opened.weight_types(options.quantize),
        tokenizer=opened.tokenizer,
        chat_template=opened.chat_template,
        executor=executor,
        engine=Engine(executor, opened.tokenizer, config),
    )


def _kind(source: ModelSource, template: ChatTemplate | None) -> str:
    """Base or instruct, as far as its file tells."""
    if template is not None:
        return "instruct"
    if source.go_template is not None:
        return "its chat template is in Go's language, which cannot be run here; see --chat-template"
    return "base: no chat template"


def _check_sampling(source: ModelSource) -> None:
    """Raises ModelFileError: the model's own sampling parameters are out of their ranges."""
    try:
        SamplingParams(**source.sampling)
    except (InputError, TypeError) as error:
        raise ModelFileError(f"{source.name}: the sampling parameters that it brings: {error}") from error


def _context_and_blocks(opened: OpenModel, options: EngineOptions) -> tuple[int, int]:
    """The longest sequence, in tokens, and the size of the KV pool, in blocks."""
    needs, own, wanted = opened.footprint(options), opened.spec.context_length, options.max_model_len
    if isinstance(wanted, int) and wanted > own:
        raise InputError(
            f"max_model_len is {wanted}, but {opened.name} was trained for {own} tokens", param="max_model_len"
        )
    context = wanted if isinstance(wanted, int) else min(own, opened.source.context_length or own)
    free = max(free_memory_on(options.device) - needs.without_kv, 0)
    memory = options.kv_memory
    if memory is None:
        memory = min(free // 4, needs.kv(context, options.max_num_seqs))
    if memory > free:
        raise InputError(
            f"a KV cache of {memory / 2**20:.0f} MiB does not fit the {free / 2**20:.0f} MiB of memory that are free "
            "beside the model's weights",
            param="kv_memory",
        )
    longest = needs.longest_request(memory)
    if longest and wanted == "auto":
        context = min(context, longest)
    if longest < context:
        raise InputError(
            f"a context of {context} tokens needs {needs.kv(context) / 2**20:.0f} MiB of KV cache, "
            f"there are {memory / 2**20:.0f}: give it more memory (kv_memory)"
            + (f", or set max_model_len to {longest} at most, or to auto" if longest else ""),
            param="kv_memory",
        )
    return context, memory // needs.kv_block
