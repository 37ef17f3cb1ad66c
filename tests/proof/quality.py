"""A real model on a fixed text: ours beside transformers on the dequantized weights, and llama.cpp's llama-perplexity.

The protocol is llama-perplexity's (llama.cpp, tools/perplexity): the text is cut into chunks of 512 tokens, each is
read afresh and scored in its second half. The text is llama.cpp's own documentation, pinned with the package.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.executors.native import KVDType, NativeExecutor
from paceline.models.architectures import model_weights
from paceline.models.gguf import read_gguf
from paceline.models.tokenizer import Tokenizer
from tests.executors.batches import Row, Sequence, make_batch
from tests.oracles import llama_cpp_source

CHUNK = 512
SCORED = slice(CHUNK // 2, CHUNK - 1)
"""Positions whose next token is scored."""
TEXTS = ("README.md", "docs/function-calling.md", "docs/build.md", "docs/multimodal.md", "docs/docker.md")

Float64 = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Quality:
    """One model and KV type beside transformers."""

    tokens: int
    perplexity: float
    reference_perplexity: float
    divergence: float
    """Mean Kullback-Leibler divergence from the reference, nats per token."""
    top1: float
    """How often the likeliest token is the reference's."""


def text() -> str:
    return "\n".join((llama_cpp_source() / name).read_text() for name in TEXTS)


def token_chunks(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """The first chunks of the text; where the model wants a BOS token, each begins with it."""
    ids = tokenizer.encode(text())
    begins_with_bos = ids[0] == tokenizer.bos_id
    assert len(ids) >= count * CHUNK
    chunks = [ids[start : start + CHUNK] for start in range(0, count * CHUNK, CHUNK)]
    if begins_with_bos:
        for chunk in chunks:
            chunk[0] = ids[0]
    return chunks


def measure(path: Path, kv_dtypes: list[KVDType], chunks: int) -> dict[KVDType, Quality]:
    """Every KV type against one pass of transformers, in float32."""
    with read_gguf(path) as file:
        ids = token_chunks(Tokenizer.from_gguf(file.metadata), chunks)
    totals = {kv_dtype: np.zeros(4) for kv_dtype in kv_dtypes}
    executors = {kv_dtype: _executor(path, kv_dtype) for kv_dtype in kv_dtypes}
    for chunk, expected in zip(ids, _transformers(path, ids), strict=True):
        targets = np.array(chunk[SCORED.start + 1 : SCORED.stop + 1])
        rows = np.arange(len(targets))
        for kv_dtype, executor in executors.items():
            got = _ours(executor, chunk)
            totals[kv_dtype] += (
                -got[rows, targets].sum(),
                -expected[rows, targets].sum(),
                (np.exp(expected) * (expected - got)).sum(),
                (got.argmax(-1) == expected.argmax(-1)).sum(),
            )
    scored = chunks * (SCORED.stop - SCORED.start)
    return {kv: _quality(total / scored, scored) for kv, total in totals.items()}


def _quality(means: Float64, tokens: int) -> Quality:
    nll, reference_nll, divergence, top1 = means.tolist()
    return Quality(tokens, float(np.exp(nll)), float(np.exp(reference_nll)), divergence, top1)


def _executor(path: Path, kv_dtype: KVDType) -> NativeExecutor:
    with read_gguf(path) as file:
        return NativeExecutor(
            model_weights(file), num_blocks=CHUNK // 32, max_model_len=CHUNK, kv_dtype=kv_dtype, threads=2
        )


def _ours(executor: NativeExecutor, chunk: list[int]) -> Float64:
    rows = [Row(0, token) for token in range(SCORED.start, SCORED.stop)]
    return log_softmax(executor.logits(make_batch([Sequence(chunk, list(range(CHUNK // 32)))], rows)))


def _transformers(path: Path, chunks: list[list[int]]) -> Iterator[Float64]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    for chunk in chunks:
        with torch.no_grad():
            yield log_softmax(model(torch.tensor([chunk])).logits[0, SCORED].numpy())


def log_softmax(logits: Any) -> Float64:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))


def llama_cpp_perplexity(path: Path, chunks: int, folder: Path) -> float | None:
    """Of llama-perplexity on the same chunks; None where ``benchmarks/peers install llama`` was not run."""
    home = Path(os.environ.get("PEERS_HOME") or "~/.cache/paceline-peers").expanduser() / "llama/bin"
    if not (home / "llama-perplexity").exists():
        return None
    file = folder / "text.txt"
    file.write_text(text())
    command = [home / "llama-perplexity", "-m", path, "-f", file, "-c", CHUNK, "-b", CHUNK, "--chunks", chunks, "-t", 2]
    environment = os.environ | {"LD_LIBRARY_PATH": str(home)}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=1200)
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
    assert found, done.stderr[-2000:]
    return float(found[1])
