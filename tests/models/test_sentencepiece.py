"""The ``llama`` kind on a vocabulary small enough to work out by hand; the real ones are in test_tokenizer_oracles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.detokenize import Detokenizer
from paceline.errors import ModelFileError
from paceline.models.gguf import MetadataValue
from paceline.models.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

TOKENS: list[tuple[str, float, int]] = [
    ("<unk>", 0, UNKNOWN),
    ("<s>", 0, CONTROL),
    ("</s>", 0, CONTROL),
    *((f"<0x{byte:02X}>", 0, BYTE) for byte in range(256)),
    *((char, -100, NORMAL) for char in "▁abc</s>"),
    ("ab", -3, NORMAL),
    ("bc", -2, NORMAL),
    ("abc", -9, NORMAL),
    ("▁a", -4, NORMAL),
    ("▁▁", -1, NORMAL),
    ("</", -5, NORMAL),
    ("s>", -6, NORMAL),
    ("<tool>", -1000, USER_DEFINED),
    ("[PAD1]", -1000, UNUSED),
]
ID = {token: i for i, (token, _, _) in enumerate(TOKENS)}


def tiny(**changes: MetadataValue | None) -> dict[str, MetadataValue]:
    defaults: dict[str, MetadataValue | None] = {
        "model": "llama",
        "pre": "default",
        "tokens": [token for token, _, _ in TOKENS],
        "scores": np.array([score for _, score, _ in TOKENS], np.float32),
        "token_type": np.array([kind for _, _, kind in TOKENS], np.int32),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (defaults | changes).items() if value is not None}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(tiny())


def pieces(tokenizer: Tokenizer, text: str, *, parse_special: bool = False) -> list[str]:
    ids = tokenizer.encode(text, parse_special=parse_special, add_special=False)
    return [tokenizer.vocabulary.tokens[i] for i in ids]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("abc", ["▁a", "bc"]),  # "bc" before "ab", whatever "abc" is worth
        ("cabc", ["▁", "c", "abc"]),
        ("b  a", ["▁", "b", "▁▁", "a"]),
        (" ab", ["▁▁", "ab"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ("\n", ["▁", "<0x0A>"]),
        ("a<tool>a", ["▁a", "<tool>", "▁a"]),
        ("</s>", ["▁", "</", "s>"]),  # not the control token, although its score is the highest
        ("<s>", ["▁", "<", "s>"]),
    ],
)
def test_pieces(tokenizer: Tokenizer, text: str, expected: list[str]) -> None:
    assert pieces(tokenizer, text) == expected


def test_control_tokens_in_the_text_where_asked(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, "a</s>a", parse_special=True) == ["▁a", "</s>", "▁a"]


def test_without_a_space_in_front() -> None:
    tokenizer = Tokenizer.from_gguf(tiny(add_space_prefix=False))
    assert pieces(tokenizer, "ab c") == ["ab", "▁", "c"]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_gemma_has_no_space_in_front_unless_the_file_says_so() -> None:
    gemma: dict[str, MetadataValue] = {"general.architecture": "gemma3"}
    assert pieces(Tokenizer.from_gguf(tiny() | gemma), "abc") == ["abc"]
    assert pieces(Tokenizer.from_gguf(tiny(add_space_prefix=True) | gemma), "abc") == ["▁a", "bc"]


def test_gemmas_turns_begin_with_a_control_token_whatever_its_type() -> None:
    tokens = [token for token, _, _ in TOKENS]
    tokenizer = Tokenizer.from_gguf(tiny(tokens=[*tokens[:-2], "<start_of_turn>", "x"]))
    assert tokenizer.special_tokens["<start_of_turn>"] == len(tokens) - 2


def test_a_user_defined_run_of_spaces_is_found_in_normalized_text() -> None:
    """As SentencePiece and transformers have it: there a literal U+2581 is a space (Gemma)."""
    changed: dict[str, MetadataValue | None] = {
        "tokens": ["  " if token == "▁▁" else token for token, _, _ in TOKENS],
        "token_type": np.array([USER_DEFINED if token == "▁▁" else kind for token, _, kind in TOKENS], np.int32),
        "add_space_prefix": False,
    }
    tokenizer = Tokenizer.from_gguf(tiny(**changed))
    assert pieces(tokenizer, "a  b") == pieces(tokenizer, "a▁ b") == ["a", "  ", "b"]
    assert tokenizer.decode(tokenizer.encode("a  b")) == "a  b"


def test_bos_and_eos() -> None:
    a = ID["▁a"]
    assert Tokenizer.from_gguf(tiny()).encode("a") == [1, a]  # llama.cpp's defaults for a file that says nothing
    assert Tokenizer.from_gguf(tiny(add_bos_token=False)).encode("a") == [a]
    assert Tokenizer.from_gguf(tiny(add_eos_token=True)).encode("a") == [1, a, 2]
    assert Tokenizer.from_gguf(tiny(bos_token_id=2, eos_token_id=1)).encode("a") == [2, a]
    assert Tokenizer.from_gguf(tiny()).eos_ids == {2}
    assert Tokenizer.from_gguf(tiny(eos_token_id=1)).eos_ids == {1, 2}


def test_token_bytes(tokenizer: Tokenizer) -> None:
    wanted = {"<s>": b"", "<unk>": b"", "[PAD1]": b"", "▁a": b" a", "<tool>": b"<tool>", "<0x0A>": b"\n"}
    assert {token: tokenizer.token_bytes(ID[token]) for token in wanted} == wanted


def test_the_space_in_front_belongs_to_a_text_and_not_to_its_continuation(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a a")) == "a a"
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"
    continuation = Detokenizer(tokenizer)
    assert continuation.add(ID["▁a"]) == " a"


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=40) | st.text("▁ab c</s>é\n", max_size=40), prefix=st.booleans())
def test_decoding_gives_the_text_back(text: str, prefix: bool) -> None:
    tokenizer = Tokenizer.from_gguf(tiny(add_space_prefix=prefix))
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text.replace("▁", " ")


def test_a_character_without_a_token_or_bytes_is_unknown() -> None:
    kept = [entry for entry in TOKENS if entry[2] != BYTE]
    few: dict[str, MetadataValue | None] = {
        "tokens": [token for token, _, _ in kept],
        "scores": np.array([score for _, score, _ in kept], np.float32),
        "token_type": np.array([kind for _, _, kind in kept], np.int32),
    }
    tokenizer = Tokenizer.from_gguf(tiny(**few))
    assert pieces(tokenizer, "aéüb") == ["▁a", "<unk>", "b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.scores is missing or not a number for each of the 276 tokens"),
        ({"scores": np.zeros(3, np.float32)}, "for each of the 276 tokens"),
        ({"token_type": np.full(len(TOKENS), BYTE, np.int32)}, "calls '<unk>' a byte; bytes are written <0x00> to"),
        ({"add_space_prefix": "yes"}, "add_space_prefix is 'yes'; it must be true or false"),
    ],
)
def test_damaged_metadata(changes: dict[str, MetadataValue | None], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_gguf(tiny(**changes))
