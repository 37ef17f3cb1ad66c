"""The models that are measured, and what a step of each must read and compute."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paceline import _native
from paceline.executors.footprint import Footprint
from paceline.loading import open_model
from paceline.models.spec import ModelWeights
from paceline.options import EngineOptions

PREFILL_TOKENS = 512
PROMPT_TOKENS = 128


@dataclass(frozen=True)
class Model:
    """A model of the catalog; the file is fetched when it is first needed."""

    name: str
    """In metrics."""
    catalog: str
    batches: tuple[int, ...]
    """Prompts at once whose decoding is measured."""
    new_tokens: int = 64
    """Steps of decoding that are measured."""
    repeat: int = 3
    """Prefill, and decode at batch 1, are measured so often within a turn, and the median counts."""

    @cached_property
    def path(self) -> Path:
        return open_model(self.catalog).path

    @cached_property
    def weights(self) -> ModelWeights:
        return open_model(str(self.path)).weights

    @property
    def head(self) -> str:
        return "token_embd.weight" if self.weights.spec.tied_embeddings else "output.weight"

    def decode_bytes(self) -> int:
        """Bytes of weights that a decode step reads once: our packed form of all layers' matrices and of the head.

        Left out: norms and biases (below 1 %), the embedding's row, and the KV cache.
        """
        matrices = self._layer_matrices() | {self.head: self.weights.tensors[self.head].shape}
        return sum(
            _native.packed_bytes(int(self.weights.tensors[name].type), *shape) for name, shape in matrices.items()
        )

    def linear_multiply_adds(self) -> int:
        """Of one token in the matrices of the layers. The head is left out: prefill computes it for one row."""
        return sum(n * k for n, k in self._layer_matrices().values())

    def attention_multiply_adds(self, tokens: int) -> int:
        """Of a prompt of so many tokens: scores, and the sum of values, over the tokens that each may see."""
        spec = self.weights.spec
        total = 0
        for layer in spec.layers:
            window = layer.window or tokens
            total += sum(min(position + 1, window) for position in range(tokens)) * 2 * spec.query_size
        return total

    def stored_bytes(self, path: Path) -> int:
        """Bytes of the tensors in another file of the same model."""
        return sum(tensor.data.nbytes for tensor in open_model(str(path)).weights.tensors.values())

    def footprint(self, threads: int) -> Footprint:
        return open_model(str(self.path)).footprint(EngineOptions(threads=threads))

    def _layer_matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes, (outputs, inputs)."""
        tensors = self.weights.tensors
        return {name: t.shape for name, t in tensors.items() if name.startswith("blk.") and len(t.shape) == 2}


SMOLLM2 = Model("smollm2", "smollm2-135m", (1, 8, 32))
QWEN = Model("qwen2.5-coder", "qwen2.5-coder-1.5b", (1, 8), new_tokens=32, repeat=1)
GEMMA = Model("gemma3", "gemma3-270m", (1, 8, 32))
