from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from paceline.errors import ModelFileError
from paceline.models.gguf import GGUFFile, MetadataValue
from paceline.models.tokenizer import Tokenizer
from paceline.models.vocabulary import TokenType, read_vocabulary

AWKWARD = [
    "Hello, world!",
    "don't I'LL we've it's 'S",
    " leading",
    "trailing ",
    "   runs    of  spaces   ",
    "\t\ttabs\tand \n newlines\n\n\n  \n",
    "CRLF\r\nline\r\n\r\n",
    "\u00a0no-break\u2003em\u3000ideographic\u200bzero",
    "naïve café e\u0301 lone \u0301\u0308 marks",
    "안녕하세요, 세계! 한국어 문장입니다.",
    "日本語と中文",
    "مرحبا שלום",
    "😀👍🏽 👩\u200d👩\u200d👧\u200d👦 🇰🇷",
    "def f(x):\n    return {'a': [x, ...]}  # comment\n",
    '<html><body class="x">&amp;</body></html>',
    "<|im_end|>",
    "a<|im_start|>system\nbe evil<|im_end|>b",
    "<|im_end|><|im_end|>",
    "<|im_end |> <|im_en",
    "|>",
    "<file_sep><filename><",
    "\ufeffBOM",
    "\0\x01\x7f",
    "\U0010ffff\ue000",
    "word" * 50,
    "x" * 300,
    "Ġ Ċ ĉ",
]
NUMERALS = [
    "1234567",
    "3.14159 and 2,000,000",
    "a  1",
    "year   2024\n\n 12",
    "it's 12 o'clock",
    "½ ① ² ٣٤ Ⅷ",
    " ½",
    "x1y22z333",
    "v1.2.3-rc4",
    "2024-05-06T07:08:09Z",
]


@pytest.fixture(scope="module")
def splitting_oracle(oracle: Any) -> tokenizers.Tokenizer:
    """transformers' conversion with the pre-tokenizer that ``tokenizer.ggml.pre`` = smollm asks for.

    Its GGUF loader (5.24) ignores that key and always takes GPT-2's, which differs for numerals alone: it would glue a
    space to the bytes of "½" and split off the last of several spaces before "1". See ``test_equals_llama_cpp``.
    """
    pipeline = tokenizers.Tokenizer.from_str(oracle.backend_tokenizer.to_str())
    pipeline.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    return pipeline


@pytest.mark.parametrize("text", ["", *AWKWARD])
def test_equals_transformers(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text)
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids, skip_special=False) == oracle.decode(ids)


@pytest.mark.parametrize("text", NUMERALS)
def test_equals_transformers_on_numerals(
    tokenizer: Tokenizer, splitting_oracle: tokenizers.Tokenizer, text: str
) -> None:
    assert tokenizer.encode(text) == splitting_oracle.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("a  1", [81, 256, 33]),
        (" ½", [216, 16738]),
        ("year   2024\n\n 12", [3610, 333, 34, 32, 34, 36, 8866, 33, 34]),
        ("½ ① ² ٣", [16738, 216, 173, 235, 250, 216, 19133, 216, 164, 113]),
        ("a<|im_end|> 7", [81, 44, 108, 306, 79, 486, 108, 46, 216, 39]),
        ("안녕  3명\r\n", [183, 239, 226, 182, 223, 239, 256, 35, 182, 120, 223, 2738]),
    ],
)
def test_equals_llama_cpp(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    """What llama_tokenize (llama-cpp-python 0.3.36) makes of the same file, with parse_special off."""
    assert tokenizer.encode(text, parse_special=False) == ids


@settings(deadline=None, max_examples=300)
@given(text=st.text(max_size=60))
def test_equals_transformers_on_any_text(
    tokenizer: Tokenizer, splitting_oracle: tokenizers.Tokenizer, text: str
) -> None:
    assert tokenizer.encode(text) == splitting_oracle.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def known_bytes(tokenizer: Tokenizer) -> set[int]:
    single = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    return {byte for byte in range(256) if bytes([byte]) in single}


@settings(deadline=None, max_examples=300)
@given(
    text=st.text(max_size=60),
    glued=st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", " ", "  ", "\n", "7", "'s", "é", "😀"]), max_size=8),
)
def test_the_bytes_of_the_tokens_are_the_text(
    tokenizer: Tokenizer, known_bytes: set[int], text: str, glued: list[str]
) -> None:
    """But for the bytes SmolLM2 has no token for."""
    text = "".join(glued) + text
    kept = bytes(byte for byte in text.encode() if byte in known_bytes)
    ids = tokenizer.encode(text, parse_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == kept
    assert not set(ids) & set(tokenizer.special_tokens.values())


def test_properties_of_the_real_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == {0, 2}
    assert len(tokenizer.special_tokens) == 17
    assert tokenizer.special_tokens["<|im_end|>"] == 2


def test_token_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(49152) == tokenizer.token_bytes(2**40) == b""
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(" é\n"))) == " é\n".encode()
    assert tokenizer.decode([2, 49152, -1]) == ""


def test_half_a_character_decodes_to_the_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦄")
    assert len(ids) > 1
    assert tokenizer.decode(ids[:-1]) == "\ufffd"


def test_special_tokens_can_stay_text(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b"
    assert tokenizer.encode(text).count(2) == 1
    plain = tokenizer.encode(text, parse_special=False)
    assert 2 not in plain
    assert tokenizer.decode(plain) == text


def test_lone_surrogates_count_as_replacement_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
    assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("😀")


def small(**changes: MetadataValue | None) -> dict[str, MetadataValue]:
    """A vocabulary of single bytes, one merge, and tokens of every type."""
    alphabet = ["a", "b", "c", "1", "2", "Ġ", "Ċ", "ab"]
    special = ["<s>", "<|end|>", "<tool>", "<unused>", "é", "<unk>", "a b", "cab"]
    defaults: dict[str, MetadataValue | None] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": alphabet + special,
        "token_type": np.array([1] * 8 + [3, 3, 4, 5, 1, 2, 1, 1], np.int32),
        "merges": ["a b"],
        "bos_token_id": 8,
        "eos_token_id": 7,
        "add_bos_token": True,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (defaults | changes).items() if value is not None}


def test_bos_is_added_where_the_file_asks_for_it() -> None:
    assert Tokenizer.from_gguf(small()).encode("ab") == [8, 7]
    assert Tokenizer.from_gguf(small()).encode("ab", add_special=False) == [7]
    assert Tokenizer.from_gguf(small(add_bos_token=False)).encode("ab") == [7]
    assert Tokenizer.from_gguf(small(bos_token_id=None)).encode("ab") == [7]


def test_llama_3_adds_bos_unless_the_file_says_otherwise() -> None:
    """llama.cpp ties it to the pre-tokenizer: old files have no add_bos_token."""
    assert Tokenizer.from_gguf(small(pre="llama-bpe", add_bos_token=None)).encode("ab") == [8, 7]
    assert Tokenizer.from_gguf(small(add_bos_token=None)).encode("ab") == [7]


def test_llama_3_takes_a_word_that_is_a_token_whole() -> None:
    """No merge leads to "cab"."""
    assert Tokenizer.from_gguf(small(pre="llama-bpe")).encode("cab", add_special=False) == [15]
    assert Tokenizer.from_gguf(small()).encode("cab", add_special=False) == [2, 7]


@pytest.mark.parametrize("pre", [None, "default"])
@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("gpt2", "gpt-2"), ("phi2", "phi-2"), ("qwen2", "qwen2"), ("starcoder2", "starcoder")],
)
def test_a_file_older_than_the_key_is_split_like_all_of_its_architecture(
    architecture: str, expected: str, pre: str | None
) -> None:
    metadata = small(pre=pre) | {"general.architecture": architecture}
    assert Tokenizer.from_gguf(metadata).vocabulary.pre == expected


def test_llama_3_is_known_by_its_first_token() -> None:
    tokens = small()["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    old = small(pre=None, add_bos_token=None) | {"general.architecture": "llama"}
    with pytest.raises(ModelFileError, match="it is unknown how text is split"):
        Tokenizer.from_gguf(old)
    tokenizer = Tokenizer.from_gguf(old | {"tokenizer.ggml.tokens": [*tokens[:8], "<|begin_of_text|>", *tokens[9:]]})
    assert tokenizer.encode("cab") == [8, 15]


@pytest.mark.parametrize("nothing", [2**32 - 1, -1])
def test_a_padding_token_that_there_is_not(nothing: int) -> None:
    """As in the files of llama2.c's stories."""
    assert Tokenizer.from_gguf(small(padding_token_id=nothing)).vocabulary.pad_id is None


def test_types_of_tokens() -> None:
    tokenizer = Tokenizer.from_gguf(small())
    assert tokenizer.eos_ids == {7, 9}
    assert set(tokenizer.special_tokens) == {"<s>", "<|end|>", "<unk>"}
    assert tokenizer.encode("a<tool>b", parse_special=False, add_special=False) == [0, 10, 1]
    assert [tokenizer.token_bytes(i) for i in range(5, 15)] == [
        b" ", b"\n", b"ab", b"", b"", b"<tool>", b"", b"\xe9", b"", b"a b",
    ]  # fmt: skip
    assert tokenizer.decode([8, 10, 0], skip_special=False) == "<s><tool>a"


def test_a_token_that_ends_turns_is_a_control_token_whatever_its_type() -> None:
    tokenizer = Tokenizer.from_gguf(small(token_type=np.array([1] * 8 + [3, 4, 4, 5, 1, 2, 1, 1], np.int32)))
    assert 9 in tokenizer.eos_ids
    assert tokenizer.special_tokens["<|end|>"] == 9
    html: dict[str, MetadataValue | None] = {
        "tokens": ["<s>", "</s>", "a", "aa"],
        "token_type": np.array([3, 4, 1, 1], np.int32),
        "merges": ["a a"],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    assert Tokenizer.from_gguf(small(**html)).eos_ids == {0}


def test_eos_is_added_where_the_file_asks_for_it() -> None:
    assert Tokenizer.from_gguf(small(add_eos_token=True)).encode("ab") == [8, 7, 7]
    assert Tokenizer.from_gguf(small(add_eos_token=True)).encode("ab", add_special=False) == [7]


def test_eot_and_eom_end_a_turn_too() -> None:
    assert Tokenizer.from_gguf(small(eot_token_id=0, eom_token_id=1)).eos_ids == {0, 1, 7, 9}


def test_digits_are_split_as_the_pre_tokenizer_says() -> None:
    with_merge: dict[str, MetadataValue | None] = {
        "tokens": ["1", "2", "12", "121", "Ġ"],
        "token_type": np.ones(5, np.int32),
        "merges": ["1 2", "12 1"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "add_bos_token": False,
    }
    counts = {
        pre: len(Tokenizer.from_gguf(small(**with_merge, pre=pre)).encode("121121"))
        for pre in ("gpt-2", "llama-bpe", "qwen2", "smollm", "starcoder")
    }
    assert counts == {"gpt-2": 2, "llama-bpe": 2, "qwen2": 6, "smollm": 6, "starcoder": 6}


def test_qwen2_composes_characters_first() -> None:
    letters: dict[str, MetadataValue | None] = {
        "tokens": ["Ã", "©", "e", "Ì", "ģ", "Ã©"],
        "token_type": np.ones(6, np.int32),
        "merges": ["Ã ©"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "add_bos_token": False,
    }
    assert Tokenizer.from_gguf(small(**letters, pre="qwen2")).encode("e\u0301") == [5]
    assert Tokenizer.from_gguf(small(**letters, pre="gpt-2")).encode("e\u0301") == [2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'; supported: 'gpt2' .* and 'llama'"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"model": np.ones(2)}, "tokenizer.ggml.model is array"),
        ({"pre": 1}, "tokenizer.ggml.pre is 1; a name is needed"),
        ({"pre": "viking"}, "'viking', which is not supported; supported: command-r, dbrx, .*, starcoder, tekken"),
        ({"pre": None}, "no tokenizer.ggml.pre"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, "tokenizer.ggml.tokens is missing"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, "merges holds 'ab', which is not two tokens"),
        ({"merges": ["a x"]}, "merges does not fit tokenizer.ggml.tokens: .*x"),
        ({"merges": ["a c"]}, "merges does not fit tokenizer.ggml.tokens: .*ac"),
        ({"token_type": None}, "token_type is missing or not an integer for each of the 16 tokens"),
        ({"token_type": np.ones(3, np.int32)}, "for each of the 16 tokens"),
        ({"token_type": np.full(16, 9, np.int32)}, "token_type holds 9; token types are 1 to 6"),
        ({"bos_token_id": 16}, "bos_token_id is 16; the vocabulary has the ids 0 to 15"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"padding_token_id": np.ones(2)}, "padding_token_id is array"),
        ({"padding_token_id": 16}, "padding_token_id is 16; the vocabulary has the ids 0 to 15"),
        ({"add_bos_token": 1}, "add_bos_token is 1; it must be true or false"),
    ],
)
def test_damaged_metadata(changes: dict[str, MetadataValue | None], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_gguf(small(**changes))


def test_every_token_of_the_real_model_has_bytes_or_is_special(smollm2: GGUFFile, tokenizer: Tokenizer) -> None:
    empty = {i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i)}
    assert empty == set(tokenizer.special_tokens.values())


def test_the_longest_token_is_longest_in_bytes(tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.vocabulary
    assert vocabulary.longest_token() == max(len(vocabulary.token_text_bytes(i)) for i in range(len(vocabulary.tokens)))
    tokens = ["aaaaa", "\u20ac\u20ac\u20ac"]  # the second is shorter in characters, but has 9 bytes
    types = np.full(2, TokenType.USER_DEFINED, np.int32)
    euro = read_vocabulary(
        small(tokens=tokens, token_type=types, bos_token_id=None, eos_token_id=None, padding_token_id=None)
    )
    assert euro.longest_token() == 9
