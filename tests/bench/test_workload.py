"""Prompts: exact lengths, and beginnings that differ."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from paceline.bench.reference_tokenizer import load_token_counter
from paceline.bench.workload import CalibratedPrompts, ExactPrompts, PromptSource, word_list
from paceline.errors import InputError


def per_word(text: str) -> int:
    return len(text.split())


def long_words_split(text: str) -> int:
    """A tokenizer that has no long words: one token for every three letters."""
    return sum((len(word) + 2) // 3 for word in text.split())


def test_the_words_are_plain_and_distinct() -> None:
    words = word_list()
    assert len(set(words)) == len(words) > 800
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)


@given(seed=st.integers(0, 2**32), number=st.integers(2, 60))
def test_no_two_prompts_of_a_run_begin_alike(seed: int, number: int) -> None:
    source = PromptSource(seed)
    openings = [tuple(islice(source.new_text(), 2)) for _ in range(number)]
    assert len({first for first, _ in openings}) == number


def test_beginnings_stay_distinct_when_the_first_words_are_used_up() -> None:
    source = PromptSource(0)
    openings = {tuple(islice(source.new_text(), 2)) for _ in range(len(word_list()) * 2 + 5)}
    assert len(openings) == len(word_list()) * 2 + 5


def test_the_same_seed_makes_the_same_prompts_and_another_does_not() -> None:
    first, same, other = (ExactPrompts(PromptSource(seed), per_word, "words") for seed in (1, 1, 2))
    texts = [first.make(20) for _ in range(5)]
    assert [same.make(20) for _ in range(5)] == texts
    assert [other.make(20) for _ in range(5)] != texts


@pytest.mark.parametrize("count", [per_word, long_words_split, lambda text: len(text.split()) + 3])
@pytest.mark.parametrize("tokens", [8, 9, 64, 1000])
def test_exact_prompts_have_the_length_in_any_tokenizer(count: Callable[[str], int], tokens: int) -> None:
    prompts = ExactPrompts(PromptSource(3), count, "some")
    for _ in range(20):
        assert count(prompts.make(tokens)) == tokens


def test_a_length_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(InputError, match="exactly 9 tokens"):
        ExactPrompts(PromptSource(0), lambda text: 2 * per_word(text), "even").make(9)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocabulary.json"])
def test_a_tokenizer_json(tmp_path: Path, name: str) -> None:
    words = {word: number for number, word in enumerate(["a", "b", "?"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / name))
    assert load_token_counter(str(tmp_path / name))("a b zzz a") == 4


def test_a_tokenizer_json_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_token_counter(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(InputError, match=r"not a tokenizer\.json"):
        load_token_counter(str(tmp_path / "tokenizer.json"))


def test_exact_prompts_with_a_real_tokenizer(smollm2_path: Path) -> None:
    count = load_token_counter(str(smollm2_path))
    prompts = ExactPrompts(PromptSource(0), count, "smollm2-135m")
    for tokens in (4, 17, 128, 2000):
        assert count(prompts.make(tokens)) == tokens
    # Each word is one token, so calibration on a server is exact as well.
    assert {count(word) for word in word_list()} == {count(f" {word}") for word in word_list()} == {1}


class CountingServer:
    def __init__(self, count: Callable[[str], int | None]) -> None:
        self.count = count
        self.asked: list[str] = []
        self.about: list[int] = []

    def __call__(self, text: str, about: int) -> int | None:
        self.asked.append(text)
        self.about.append(about)
        return self.count(text)


def test_calibrated_prompts_hit_the_servers_count_template_included() -> None:
    server = CountingServer(lambda text: per_word(text) + 31)
    prompts = CalibratedPrompts(PromptSource(0), server)
    made = [prompts.make(tokens) for tokens in (128, 128, 64, 128)]
    assert [per_word(text) + 31 for text in made] == [128, 128, 64, 128]
    # One question for the template, one for each length; and none of those prompts is ever measured.
    assert len(server.asked) == 3
    assert len({tuple(text.split()[:2]) for text in made + server.asked}) == 7


def test_calibration_finds_the_tokens_per_word() -> None:
    server = CountingServer(lambda text: long_words_split(text) + 10)
    prompts = CalibratedPrompts(PromptSource(0), server)
    lengths = [long_words_split(prompts.make(500)) + 10 for _ in range(10)]
    assert abs(sum(lengths) / 10 - 500) < 25


def test_a_template_longer_than_the_wanted_length_is_an_error_with_the_numbers() -> None:
    prompts = CalibratedPrompts(PromptSource(0), CountingServer(lambda text: per_word(text) + 31))
    with pytest.raises(InputError, match=r"--input-tokens 30 is too short: .* 39 tokens for 8 words.* at least 35"):
        prompts.make(30)


def test_a_server_that_does_not_count_needs_a_tokenizer() -> None:
    with pytest.raises(InputError, match="--tokenizer"):
        CalibratedPrompts(PromptSource(0), CountingServer(lambda text: None)).make(64)
    with pytest.raises(InputError, match="cannot be used"):
        CalibratedPrompts(PromptSource(0), CountingServer(lambda text: 5)).make(64)


def test_a_long_prompt_is_asked_for_once_and_never_much_longer() -> None:
    """Three tokens for two words, a context of hardly more than the wanted length."""
    server = CountingServer(lambda text: per_word(text) * 3 // 2 + 10)
    prompts = CalibratedPrompts(PromptSource(0), server)
    assert abs(per_word(prompts.make(8000)) * 3 // 2 + 10 - 8000) <= 1
    assert max(map(server.count, server.asked)) <= 8000 + 40
    assert server.about == [8, 128, 8000]
    # What was learnt serves other lengths too.
    assert abs(per_word(prompts.make(4000)) * 3 // 2 + 10 - 4000) <= 1
    assert server.about == [8, 128, 8000, 4000]


@pytest.mark.parametrize(
    ("added", "chat", "words"),
    [
        (31, True, "exact in the tokenizer words; the server's chat template adds 31 tokens to each"),
        (1, False, "exact in the tokenizer words; the server adds 1 tokens to each"),
        (0, False, "exact in the tokenizer words"),
        (-2, True, "exact in the tokenizer words, which is not the server's: it counts 6 tokens where this has 8"),
        (None, True, "exact in the tokenizer words, what the server's chat template adds not included"),
    ],
)
def test_exact_prompts_say_what_the_server_adds(added: int | None, chat: bool, words: str) -> None:
    prompts = ExactPrompts(PromptSource(0), per_word, "words")
    prompts.compare_with_server(lambda text, _: None if added is None else per_word(text) + added, chat=chat)
    assert prompts.description == words
    assert prompts.added_tokens == max(0, added or 0)
