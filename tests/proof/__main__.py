"""Writes docs/models.md: every architecture and type against its oracle, and the real models against other engines.

make models-table        (about ten minutes; `benchmarks/peers install llama` first for llama.cpp's column)
"""

import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from paceline.models import catalog
from paceline.models.quants import QuantType
from tests.executors.both_executors import EXECUTORS, all_logits
from tests.executors.float64_model import reference_logits
from tests.executors.tiny_models import LENGTH, VARIANTS, TinyModel, make_tiny_models
from tests.oracles import llama_cpp_source
from tests.proof.quality import llama_cpp_perplexity, measure
from tests.proof.quantized import quantized_error

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
CHUNKS = 8

HEAD = """# Models: what is proven, and how

Written by `make models-table`; the same checks are tests (`make test`, `make test-slow`).

A model is any GGUF file of an architecture and of tensor types below, split or whole. Others are refused by name.
"""

ARCHITECTURES = """
## Architectures

A tiny random model is made by transformers, converted by llama.cpp's `convert_hf_to_gguf.py` and read by us. The number
is the largest difference from transformers' logits over {length} positions, relative to the largest logit, with F32
weights and KV cache; 1e-3 is allowed. A RoPE that is paired the wrong way round or not scaled gives 0.1 and more.

| architecture | variant | float64 reference | native | PyTorch |
|---|---|---:|---:|---:|
"""

TYPES = """
## Tensor types

Every architecture with random weights of every type, on the native executor: root mean square of the difference from
the float64 reference on the same dequantized weights, relative to the logits' own. What differs is the rounding of
activations to 8 bits. (K-quants: where 256 does not divide a row, Q8_0 stands in, as in llama.cpp's files.)

| variant | {types} |
|---|{rules}
"""

REAL = """
## Real models

On the first {chunks} chunks of 512 tokens of llama.cpp's documentation, each chunk scored in its second half
(llama-perplexity's protocol). *transformers* has the same weights, dequantized to float32; *KL* and *same choice*
compare every token's distribution with its.

| model | KV cache | perplexity | transformers | llama.cpp | KL, nat | same choice |
|---|---|---:|---:|---:|---:|---:|
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, DOCUMENT.open("w") as document:
        models = make_tiny_models(VARIANTS, Path(folder) / "tiny", llama_cpp_source())
        for text in chain([HEAD], _architectures(models), _types(models), _real_models(Path(folder))):
            document.write(text)
            document.flush()
    print(f"wrote {DOCUMENT}", file=sys.stderr)


def _architectures(models: dict[str, TinyModel]) -> Iterator[str]:
    yield ARCHITECTURES.format(length=LENGTH)
    for name, model in models.items():
        columns = [model.difference(reference_logits(model.weights, model.token_ids))]
        columns += [model.difference(all_logits(make(model.weights), model.token_ids)) for make in EXECUTORS.values()]
        yield f"| {model.weights.spec.architecture} | {name} | {' | '.join(f'{value:.0e}' for value in columns)} |\n"
        _progress(name)


def _types(models: dict[str, TinyModel]) -> Iterator[str]:
    yield TYPES.format(types=" | ".join(kind.name for kind in QuantType), rules="---:|" * len(QuantType))
    for name, model in models.items():
        errors = [quantized_error(model.weights.spec, kind) for kind in QuantType]
        yield f"| {name} | {' | '.join(f'{error:.2%}' for error in errors)} |\n"
        _progress(name)


def _real_models(folder: Path) -> Iterator[str]:
    yield REAL.format(chunks=CHUNKS)
    for name in catalog.CATALOG:
        path = catalog.pull(name)
        llama_cpp = llama_cpp_perplexity(path, CHUNKS, folder)
        for kv_dtype, quality in measure(path, ["f16", "int8"], CHUNKS).items():
            beside = "–" if llama_cpp is None else f"{llama_cpp:.4f}"
            yield (
                f"| {name} | {kv_dtype} | {quality.perplexity:.4f} | {quality.reference_perplexity:.4f} | {beside} "
                f"| {quality.divergence:.4f} | {quality.top1:.1%} |\n"
            )
            _progress(f"{name}, {kv_dtype}")


def _progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
