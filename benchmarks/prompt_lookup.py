"""What prompt lookup gains: the same requests with and without it, in turn, one at a time and four at once.

    .venv/bin/python -m benchmarks.prompt_lookup [MODEL] [--lookup 8] [--rounds 3]

Prompts: files of this repository, with a change to make (code editing) and pages of its documentation, to be summed up
(summarization). Greedy, up to 160 tokens. Prints a Markdown table; the texts with and without must be the same.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams
from paceline.errors import PacelineError
from paceline.loading import LoadedModel, load_model
from paceline.options import EngineOptions

_ROOT = Path(__file__).parents[1]
_EDITS = {
    "src/paceline/engine/pace.py": "Rename the class Pace to Tempo. Answer with the whole file.",
    "src/paceline/engine/history.py": "Rename output_count to counts. Answer with the whole file.",
    "src/paceline/engine/bans.py": "Add a method __len__ to the class. Answer with the whole file.",
    "src/paceline/errors.py": "Remove the comments. Answer with the whole file.",
}
_PAGES = ("docs/getting-models.md", "docs/adding-a-model.md", "benchmarks/README.md", "README.md")
_LONGEST_PAGE = 3000
"""Characters."""
_SUMMARIZE = "Sum up this page in a few sentences, quoting its most important commands."
_PARAMS = SamplingParams(temperature=0, max_tokens=160)


class Turn(NamedTuple):
    tokens: list[tuple[int, ...]]
    """Of each request."""
    seconds: float
    """Without the prompts: they are cached."""
    draft_tokens: int
    accepted_tokens: int

    @property
    def speed(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b")
    parser.add_argument("--lookup", type=int, default=8, help="longest proposal, in tokens")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    # Two of them: what one engine keeps in the KV blocks is not the other's.
    models = [
        load_model(
            options.model, options=EngineOptions(max_model_len=4096, kv_memory=1 << 30, prompt_lookup_tokens=lookup)
        )
        for lookup in (0, options.lookup)
    ]
    print("| task | at once | without, tok/s | with, tok/s | gain | proposed tokens that came true |")
    print("|---|--:|--:|--:|--:|--:|")
    for task, prompts in tasks(models[0]).items():
        for at_once in (1, 4):
            pairs = _compare([model.engine for model in models], prompts, at_once, options.rounds)
            print(_row(task, at_once, pairs), flush=True)
    for model in models:
        model.close()


def tasks(model: LoadedModel) -> dict[str, list[list[int]]]:
    """Token ids of each task's prompts."""
    if model.chat_template is None:
        raise PacelineError(f"{model.name} has no chat template; the tasks are instructions")
    encode = model.chat_template.encode

    def ask(path: str, instruction: str) -> list[int]:
        text = (_ROOT / path).read_text()[:_LONGEST_PAGE]
        return encode([{"role": "user", "content": f"{instruction}\n\n{text}"}])

    return {
        "code editing": [ask(path, change) for path, change in _EDITS.items()],
        "summarization": [ask(path, _SUMMARIZE) for path in _PAGES],
    }


def _compare(
    engines: Sequence[Engine], prompts: Sequence[list[int]], at_once: int, rounds: int
) -> list[tuple[Turn, Turn]]:
    pairs = []
    for number in range(rounds + 1):
        without, speculating = (_turn(engine, prompts, at_once) for engine in engines)
        if without.tokens != speculating.tokens:
            raise PacelineError("the texts with and without prompt lookup differ")
        if number:  # the first one fills the prefix cache
            pairs.append((without, speculating))
    return pairs


def _turn(engine: Engine, prompts: Sequence[list[int]], at_once: int) -> Turn:
    before = engine.stats()
    began = perf_counter()
    tokens: list[tuple[int, ...]] = []
    for first in range(0, len(prompts), at_once):
        tokens += _run(engine, prompts[first : first + at_once])
    seconds = perf_counter() - began
    after = engine.stats()
    return Turn(
        tokens,
        seconds,
        after.draft_tokens - before.draft_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )


def _run(engine: Engine, prompts: Iterable[list[int]]) -> list[tuple[int, ...]]:
    tokens: dict[str, list[int]] = {engine.submit(prompt, _PARAMS).request_id: [] for prompt in prompts}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return [tuple(each) for each in tokens.values()]


def _row(task: str, at_once: int, pairs: Sequence[tuple[Turn, Turn]]) -> str:
    without, speculating = ([pair[side].speed for pair in pairs] for side in (0, 1))
    gain = median(b / a for a, b in zip(without, speculating, strict=True))
    accepted = pairs[0][1].accepted_tokens / max(pairs[0][1].draft_tokens, 1)
    return f"| {task} | {at_once} | {median(without):.1f} | {median(speculating):.1f} | {gain:.2f}× | {accepted:.0%} |"


if __name__ == "__main__":
    main()
