"""Every supported tokenizer against llama.cpp's expected ids or transformers' conversion; most against both."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.normalizers import NFC

from paceline.engine.detokenize import Detokenizer
from paceline.models import catalog
from paceline.models.gguf import MetadataValue, read_gguf
from paceline.models.pretokenizers import SUPPORTED
from paceline.models.tokenizer import Tokenizer
from tests.models.corpus import fuzzed_texts

EXPECTED_BY_LLAMA_CPP = [
    "command-r", "deepseek-coder", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "refact",
    "starcoder",
]  # fmt: skip
CONVERTED_BY_TRANSFORMERS = ["gpt-2", "llama-bpe", "qwen2", "llama-spm", "phi-3"]
"""Of the others it takes GPT-2's pre-tokenizer, whatever ``tokenizer.ggml.pre`` says."""
SPLITS_OF_TRANSFORMERS = ["dbrx", "deepseek-r1-qwen", "llama-v3", "llama3", "phi-2", "smaug-bpe", "tekken"]
PROVEN_BY_SMOLLM2 = "smollm"  # test_tokenizer.py

REAL_MODELS = ["gemma3-270m", pytest.param("qwen2.5-coder-1.5b", marks=pytest.mark.slow)]  # the latter is 1.1 GB


@cache
def metadata(path: Path) -> dict[str, MetadataValue]:
    with read_gguf(path) as file:
        return dict(file.metadata)


def vocabulary_file(llama_cpp: Path, name: str) -> Path:
    return llama_cpp / "models" / f"ggml-vocab-{name}.gguf"


def transformers_conversion(metadata: dict[str, MetadataValue]) -> tokenizers.Tokenizer:
    """What transformers makes of the metadata, with two things put right that a GGUF file does not tell it."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in metadata.items()}
    names = GGUF_TOKENIZER_MAPPING["tokenizer"].items()
    fields = {name: plain[f"tokenizer.{key}"] for key, name in names if f"tokenizer.{key}" in plain}
    architecture = metadata["general.architecture"]
    # LlamaTokenizer has no second space before a text that starts with one; Llama 2's own tokenizer.json has, as Phi 3
    converted, _ = convert_gguf_tokenizer("phi3" if architecture == "llama" else architecture, fields)
    assert isinstance(converted, tokenizers.Tokenizer)
    if fields.get("pre_tokenizer_type") == "qwen2":  # the normalizer of its Qwen2Tokenizer
        converted.normalizer = NFC()
    return converted


@pytest.fixture(scope="module")
def llama_2(llama_cpp: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    known = metadata(vocabulary_file(llama_cpp, "llama-spm"))
    return Tokenizer.from_gguf(known), transformers_conversion(known)


def assert_equal(ours: Tokenizer, theirs: tokenizers.Tokenizer, count: int) -> None:
    for parse_special in (True, False):
        theirs.encode_special_tokens = not parse_special
        for text in fuzzed_texts(count):
            ids = ours.encode(text, parse_special=parse_special, add_special=False)
            assert ids == theirs.encode(text, add_special_tokens=False).ids, text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


@pytest.mark.parametrize("name", EXPECTED_BY_LLAMA_CPP)
def test_ids_that_llama_cpp_expects(llama_cpp: Path, name: str) -> None:
    file = vocabulary_file(llama_cpp, name)
    tokenizer = Tokenizer.from_gguf(metadata(file))
    separator = "\n__ggml_vocab_test__\n"
    texts = file.with_suffix(".gguf.inp").read_bytes().decode().removesuffix(separator).split(separator)
    expected = file.with_suffix(".gguf.out").read_text().splitlines()
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, add_special=False) == [int(id_) for id_ in ids.split()], text


@pytest.mark.parametrize("name", CONVERTED_BY_TRANSFORMERS)
def test_equals_transformers(llama_cpp: Path, name: str) -> None:
    known = metadata(vocabulary_file(llama_cpp, name))
    assert_equal(Tokenizer.from_gguf(known), transformers_conversion(known), 300)


@pytest.mark.parametrize("pre", SPLITS_OF_TRANSFORMERS)
def test_splits_as_transformers_does(llama_cpp: Path, pre: str) -> None:
    known = metadata(vocabulary_file(llama_cpp, "gpt-2")) | {"tokenizer.ggml.pre": pre}
    assert_equal(Tokenizer.from_gguf(known), transformers_conversion(known), 300)


@pytest.mark.parametrize("name", REAL_MODELS)
def test_the_real_models_equal_transformers(name: str) -> None:
    known = metadata(catalog.pull(name))
    assert_equal(Tokenizer.from_gguf(known), transformers_conversion(known), 500)


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=60), cut=st.integers(0, 60))
def test_a_stream_is_what_it_adds_to_the_prompt(
    llama_2: tuple[Tokenizer, tokenizers.Tokenizer], text: str, cut: int
) -> None:
    """A continuation keeps the space that a text of its own would lose."""
    ours, theirs = llama_2
    ids = ours.encode("The" + text, parse_special=False)
    stream = Detokenizer(ours)
    shown = "".join(stream.add(token_id) for token_id in ids[2 + cut :]) + stream.finish()
    prompt = theirs.decode(ids[: 2 + cut])
    if not prompt.endswith("\ufffd"):  # else it ends within a character
        assert prompt + shown == theirs.decode(ids)


def test_every_supported_name_is_proven() -> None:
    assert sorted(SUPPORTED) == sorted(
        {*EXPECTED_BY_LLAMA_CPP, *SPLITS_OF_TRANSFORMERS, PROVEN_BY_SMOLLM2} - {"llama-spm", "phi-3"}
    )
