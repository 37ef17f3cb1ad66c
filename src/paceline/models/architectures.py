"""From a GGUF file's metadata and tensors to a ModelSpec: one function per architecture.

A hyperparameter or tensor that a function does not understand is refused by name: a model that is computed almost
right is worse than one that is not computed.
"""

from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path

from paceline.errors import ModelFileError
from paceline.models.gguf import GGUFFile, MetadataValue
from paceline.models.quants import Tensor
from paceline.models.rope import RopeSpec
from paceline.models.spec import LayerSpec, ModelSpec, ModelWeights, tensor_shapes


def model_weights(file: GGUFFile) -> ModelWeights:
    """The model in a GGUF file, with the shape of every tensor checked; its tensors outlive ``file.close()``.

    Raises:
        ModelFileError: an architecture, hyperparameter or tensor is missing, contradictory or not supported.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ModelFileError(f"{file.path}: architecture {architecture!r} is not supported; supported: {known}")
    hyperparameters = _Hyperparameters(file, architecture)
    spec = _ARCHITECTURES[architecture](hyperparameters, file)
    hyperparameters.refuse_unread()
    _check_vocabulary(file, spec)
    _check_tensors(file.path, file.tensors, spec)
    return ModelWeights(spec, dict(file.tensors))


class _Hyperparameters:
    """The metadata under ``<architecture>.``, which remembers what nobody asked for."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.path = file.path
        self.prefix = f"{architecture}."
        self.num_tensors = len(file.tensors)
        self.unread = {key: value for key, value in file.metadata.items() if key.startswith(self.prefix)}

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fault(f"{self.prefix}{name} is {_shown(value)}; a positive integer is needed")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._take(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
            raise self.fault(f"{self.prefix}{name} is {_shown(value)}; a positive number is needed")
        return float(value)

    def neutral(self, name: str, *allowed: MetadataValue) -> None:
        """A feature we do not have may be described, as long as it is switched off."""
        value = self.unread.pop(self.prefix + name, allowed[0])
        if not isinstance(value, type(allowed[0])) or value not in allowed:
            raise self.fault(f"{self.prefix}{name} = {_shown(value)} is not supported; only {allowed[0]!r} is")

    def layer_count(self) -> int:
        """``block_count``, bounded by the tensors there are: it becomes the length of a tuple."""
        count = self.integer("block_count")
        if count > self.num_tensors:
            raise self.fault(f"{self.prefix}block_count is {count}, but the file has only {self.num_tensors} tensors")
        return count

    def refuse_unread(self) -> None:
        for key, value in self.unread.items():
            raise self.fault(f"{key} = {_shown(value)} is not supported")

    def _take(self, name: str, default: MetadataValue | None) -> MetadataValue:
        value = self.unread.pop(self.prefix + name, default)
        if value is None:
            raise self.fault(f"the metadata has no {self.prefix}{name}")
        return value

    def fault(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {what}")


def _llama(read: _Hyperparameters, file: GGUFFile) -> ModelSpec:
    """Llama and what copies it (SmolLM2, Mistral 7B, TinyLlama). llama.cpp: src/models/llama.cpp."""
    hidden_size, num_heads = read.integer("embedding_length"), read.integer("attention.head_count")
    num_kv_heads = read.integer("attention.head_count_kv", num_heads)
    head_dim = read.integer("attention.key_length", max(hidden_size // num_heads, 1))
    rope_dim = read.integer("rope.dimension_count", head_dim)
    if num_heads % num_kv_heads:
        raise read.fault(f"{num_heads} attention heads cannot be shared out among {num_kv_heads} key/value heads")
    if rope_dim % 2 or rope_dim > head_dim:
        raise read.fault(f"llama.rope.dimension_count is {rope_dim}; it must be even and at most {head_dim}")
    read.neutral("attention.value_length", head_dim)
    read.neutral("rope.scaling.type", "none")
    read.neutral("rope.scaling.factor", 1.0, 0.0)
    read.neutral("rope.scaling.finetuned", False)
    read.neutral("rope.scale_linear", 1.0)
    read.neutral("attention.sliding_window", 0)
    read.neutral("attention.causal", True)
    read.neutral("expert_count", 0)
    read.neutral("expert_used_count", 0)
    read.neutral("tensor_data_layout", "Meta AI original pth")
    # convert_hf_to_gguf.py permutes the rows of q and k (LlamaModel.permute), so that partners are neighbours
    rope = RopeSpec(theta=read.number("rope.freq_base", 10000.0), dim=rope_dim, pairing="interleaved")
    return ModelSpec(
        architecture="llama",
        name=str(file.metadata.get("general.name", file.path.stem)),
        vocab_size=read.integer("vocab_size", _vocab_size(file)),
        layers=(LayerSpec(rope),) * read.layer_count(),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=read.integer("feed_forward_length"),
        context_length=read.integer("context_length"),
        attention_scale=head_dim**-0.5,
        norm_eps=read.number("attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in file.tensors,
    )


_ARCHITECTURES: dict[str, Callable[[_Hyperparameters, GGUFFile], ModelSpec]] = {"llama": _llama}


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(f"{file.path}: the tensor token_embd.weight is missing")
    return embedding.shape[0]


def _check_vocabulary(file: GGUFFile, spec: ModelSpec) -> None:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != spec.vocab_size:
        raise ModelFileError(
            f"{file.path}: the tokenizer has {len(tokens)} tokens, but the model a vocabulary of {spec.vocab_size}"
        )


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], spec: ModelSpec) -> None:
    """Every tensor the architecture has is there in the right shape, and no other.

    It stops at the first that is missing, so a layer count of billions ends as soon as any other.
    """
    unused = dict(tensors)
    for name, shape in tensor_shapes(spec):
        tensor = unused.pop(name, None)
        if tensor is None:
            raise ModelFileError(f"{path}: the tensor {name} is missing")
        if tensor.shape != shape:
            raise ModelFileError(f"{path}: the tensor {name} has shape {tensor.shape}; {shape} is needed")
    for name in unused:
        raise ModelFileError(
            f"{path}: the tensor {name} is not supported: the model uses a feature this version does not have"
        )


def _shown(value: MetadataValue) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
