"""Engines without HTTP: decode speed of batches after prompts of 128 tokens, and prefill speed of 512 tokens."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from benchmarks.command import json_lines, output
from benchmarks.model import PREFILL_TOKENS, PROMPT_TOKENS, Model
from benchmarks.peers_home import Peers
from benchmarks.results import OURS, Values
from benchmarks.turn import Turn


class Contender(Protocol):
    """An engine and a file of the model."""

    @property
    def engine(self) -> str: ...

    @property
    def needs(self) -> tuple[str, ...]:
        """See ``Turn.peers``."""

    def decode(self, batches: Sequence[int], new_tokens: int) -> dict[int, float]:
        """Batch -> tokens/s of all its sequences together, over ``new_tokens`` steps."""

    def prefill(self, repeat: int) -> float:
        """Tokens/s of one prompt of PREFILL_TOKENS, the median of so many."""


@dataclass(frozen=True, slots=True)
class OurEngine:
    """``paceline bench engine``."""

    model: Model
    threads: int
    isa: str = ""
    """Instruction set to force; empty: the best."""
    engine: str = OURS
    needs: tuple[str, ...] = ()

    def decode(self, batches: Sequence[int], new_tokens: int) -> dict[int, float]:
        # The first token of a request comes from its prefill.
        cells = self._measure(PROMPT_TOKENS, new_tokens + 1, batches)
        return _medians((cell["batch"], cell["metrics"]["decode_tps"]["p50"]) for cell in cells)

    def prefill(self, repeat: int) -> float:
        cells = self._measure(PREFILL_TOKENS, 1, [1] * repeat)
        return float(median(cell["metrics"]["prefill_tps"]["p50"] for cell in cells))

    def _measure(self, prompt: int, new: int, batches: Sequence[int]) -> list[dict[str, Any]]:
        sizes = {"--prompt-tokens": prompt, "--new-tokens": new, "--threads": self.threads, "--repeat": 1}
        command = [sys.executable, "-m", "paceline.cli.main", "bench", "engine", str(self.model.path), "--json"]
        command += [str(word) for option in sizes.items() for word in option]
        command += ["--batch", _listed(batches)]
        cells: list[dict[str, Any]] = json.loads(output(command, {"PACELINE_ISA": self.isa} if self.isa else {}))[
            "cells"
        ]
        return cells


@dataclass(frozen=True, slots=True)
class PeerEngine:
    """What ``peers decode`` and ``peers prefill`` run."""

    engine: str
    peer: str
    file: Callable[[], Path]
    peers: Peers

    @property
    def needs(self) -> tuple[str, ...]:
        # llama-quantize, for the file in Q4_0, comes with the first.
        return ("llama", self.peer) if self.peer == "llama-avx2" else (self.peer,)

    def decode(self, batches: Sequence[int], new_tokens: int) -> dict[int, float]:
        sizes = self.peers.environment(prompt=PROMPT_TOKENS, new=new_tokens, batch=_listed(batches))
        cells = json_lines(self.peers.command("decode", self.peer, self.file()), sizes)
        return _medians((cell["pl"], cell["speed_tg"]) for cell in cells)

    def prefill(self, repeat: int) -> float:
        sizes = self.peers.environment(prompt=PREFILL_TOKENS, repeat=repeat)
        (cell,) = json_lines(self.peers.command("prefill", self.peer, self.file()), sizes)
        return float(median(cell["samples_ts"]))


def offline_turn(contender: Contender, model: Model, label: str = "") -> Turn:
    """Decode of the model's batches, and prefill. ``label`` tells variants of the comparison apart in the metrics."""
    prefix = f"{model.name} {label}".strip()
    names = {batch: f"{prefix} decode {batch}" for batch in model.batches}

    def run() -> Values:
        speeds = contender.decode([1] * (model.repeat - 1) + list(model.batches), model.new_tokens)
        return {names[batch]: speeds[batch] for batch in names} | {f"{prefix} prefill": contender.prefill(model.repeat)}

    return Turn(contender.engine, (*names.values(), f"{prefix} prefill"), run, contender.needs)


def llama_turns(model: Model, peers: Peers, *, requantized: bool, peer: str = "llama", label: str = "") -> list[Turn]:
    """llama.cpp on the model's own file and, where asked for, requantized to Q4_0."""
    files: dict[str, Callable[[], Path]] = {"llama.cpp": lambda: model.path}
    if requantized:
        files["llama.cpp Q4_0"] = lambda: peers.requantized(model.path)
    return [offline_turn(PeerEngine(name, peer, file, peers), model, label) for name, file in files.items()]


def _medians(figures: Iterable[tuple[int, float]]) -> dict[int, float]:
    speeds: dict[int, list[float]] = {}
    for batch, speed in figures:
        speeds.setdefault(batch, []).append(speed)
    return {batch: median(each) for batch, each in speeds.items()}


def _listed(batches: Sequence[int]) -> str:
    return ",".join(map(str, batches))
