"""What clients ask: a set of requests that is the same for the same seed, and requests that must be refused."""

import random
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

_WORDS = [
    *("river", "engine", "paper", "seven", "green", "slowly", "under", "because", "Paris", "window", "never", "music"),
    *("42", "coffee", "(", ")", ",", ".", "!", "\n", "é", "안녕", "👋🏽"),
]
_STEMS = 3


@dataclass(frozen=True)
class Ask:
    """A request that has one right answer, as everything in it is given, its seed too."""

    path: str
    body: dict[str, Any]


def make_asks(seed: int, count: int) -> list[Ask]:
    rng = random.Random(seed)
    stems = [" ".join(rng.choices(_WORDS, k=rng.randint(40, 120))) for _ in range(_STEMS)]
    return [_ask(rng, stems) for _ in range(count)]


def _ask(rng: random.Random, stems: list[str]) -> Ask:
    text = " ".join(rng.choices(_WORDS, k=rng.choice([1, 5, 20, 60])))
    if rng.random() < 0.5:
        text = rng.choice(stems) + " " + text
    if rng.random() < 0.3:
        text = f"{text}\n{text}\n{text[: len(text) // 2]}"  # something for prompt lookup to find
    body: dict[str, Any] = {
        "max_tokens": rng.choice([1, 2, 8, 30, 70]),
        "temperature": rng.choice([0, 0, 0.7, 1.3]),
        "seed": rng.randrange(2**53),
        "n": rng.choice([1, 1, 1, 2, 4]),
    }
    extras: list[dict[str, Any]] = [
        {},
        {},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.2},
        {"stop": ["e", "\n\n"]},
        {"stop": ["the "], "include_stop_str_in_output": True},
        {"top_p": 0.9, "top_k": 40, "min_p": 0.02},
        {"ignore_eos": True},
        {"bad_words": ["the", "and"]},
        {"min_tokens": 1},
        {"logit_bias": {"28": -100, "30": 5}},
    ]
    body |= rng.choice(extras)
    if rng.random() < 0.4:
        return Ask(CHAT, body | {"messages": [{"role": "user", "content": text}]} | _chat_logprobs(rng))
    if rng.random() < 0.2:
        scoring = {"max_tokens": 0, "n": 1, "min_tokens": 0}
        return Ask(COMPLETIONS, body | scoring | {"prompt": text, "echo": True, "logprobs": 1})
    return Ask(COMPLETIONS, body | {"prompt": text, "echo": rng.random() < 0.2} | _completion_logprobs(rng))


def _chat_logprobs(rng: random.Random) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": 2} if rng.random() < 0.2 else {}


def _completion_logprobs(rng: random.Random) -> dict[str, Any]:
    return {"logprobs": 2} if rng.random() < 0.2 else {}


BAD: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": "x " * 5000}),
    (COMPLETIONS, {"prompt": [1, 2, 10**9]}),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}),
    (COMPLETIONS, {"prompt": "x", "n": 1000}),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 50}),
    (COMPLETIONS, {"prompt": "x", "best_of": 3}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}),
    (COMPLETIONS, {"prompt": "x", "timeout": -1}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "stop": [""]}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": 1000}}),
]
