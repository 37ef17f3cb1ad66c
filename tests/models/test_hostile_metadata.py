"""Whatever a file says, reading it gives a model or a ModelFileError, never another exception."""

import dataclasses
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import InputError, ModelFileError
from paceline.executors.native import NativeExecutor
from paceline.models.architectures import model_weights
from paceline.models.chat import ChatTemplate
from paceline.models.gguf import GGUFFile
from paceline.models.ollama_gguf import in_terms_of_llama_cpp
from paceline.models.tokenizer import Tokenizer
from tests.models.tiny_gguf import GEMMA3_NORMS, VOCAB, tiny

TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "<|end|>", *(f"t{number}" for number in range(VOCAB - 5))],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 3] + [1] * (VOCAB - 5),
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.scores": [0.5] * VOCAB,
    "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.ggml.eos_token_id": 4,
    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
}
KEYS = [
    *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding")),
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "token_type", "merges", "scores")),
    *(f"tokenizer.ggml.add_{name}" for name in ("bos_token", "eos_token", "space_prefix")),
    *("general.architecture", "general.name", "tokenizer.chat_template", "tokenizer.chat_template.tool_use"),
    *("{}.block_count", "{}.context_length", "{}.embedding_length", "{}.feed_forward_length", "{}.vocab_size"),
    *("{}.attention.head_count", "{}.attention.head_count_kv", "{}.attention.key_length", "{}.attention.causal"),
    *("{}.attention.layer_norm_rms_epsilon", "{}.attention.sliding_window", "{}.attention.sliding_window_pattern"),
    *("{}.rope.dimension_count", "{}.rope.freq_base", "{}.rope.freq_base_swa", "{}.rope.scale_linear"),
    *("{}.rope.scaling.type", "{}.rope.scaling.factor", "{}.rope.scaling.original_context_length"),
    *("{}.rope.scaling.yarn_beta_fast", "{}.rope.scaling.yarn_beta_slow", "{}.rope.scaling.yarn_log_multiplier"),
    *("{}.final_logit_softcapping", "{}.rope.global.freq_base", "{}.vision.block_count"),
]
NUMBERS = [0, 1, 2, 16, VOCAB, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**64 - 1, 0.5, 1.0, 5e-324, 1e300, np.nan, np.inf]
WORDS = ["", "gpt2", "llama", "default", "yarn", "linear", "gemma3", "{% if %}", "x" * 300]
ARRAYS = [
    np.array([], np.uint32), np.ones(2), np.ones(VOCAB, np.int32), np.full(VOCAB, 6, np.int8), np.zeros(2, np.bool_),
    np.full(VOCAB, np.nan, np.float32), np.full(VOCAB, 2**63, np.uint64), [], ["a b"], [""] * VOCAB, ["a"] * VOCAB,
]  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.sampled_from([True, False, *NUMBERS, *WORDS, *ARRAYS])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GGUFFile]:
    folder = tmp_path_factory.mktemp("hostile")
    norms = {name: shape for name, shape in GEMMA3_NORMS.items() if int(name.split(".")[1]) < 2}
    return {kind: tiny(folder, TOKENIZER, norms if kind == "gemma3" else {}, kind) for kind in ("llama", "gemma3")}


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    kind=st.sampled_from(["llama", "gemma3"]),
    tokenizer=st.sampled_from(["gpt2", "llama"]),
    scaling=st.sampled_from(["yarn", "none"]),
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3),
)
def test_any_metadata(
    files: dict[str, GGUFFile], kind: str, tokenizer: str, scaling: str, changes: dict[str, Any]
) -> None:
    told = {"tokenizer.ggml.model": tokenizer, f"{kind}.rope.scaling.type": scaling, f"{kind}.rope.scaling.factor": 4.0}
    metadata = {**files[kind].metadata, **told, **{key.format(kind): value for key, value in changes.items()}}
    file = in_terms_of_llama_cpp(dataclasses.replace(files[kind], metadata=metadata, tensors=dict(files[kind].tensors)))
    with suppress(ModelFileError):
        NativeExecutor(model_weights(file), num_blocks=2, max_model_len=64).close()
    with suppress(ModelFileError, InputError):
        vocabulary = Tokenizer.from_gguf(file.metadata)
        vocabulary.decode(vocabulary.encode("a b <s> é"))
        template = ChatTemplate.from_gguf(file.metadata, vocabulary)
        if template is not None:
            template.encode([{"role": "user", "content": "ab"}])
