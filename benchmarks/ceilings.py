"""What the machine can do at most, as the speed of engines that do nothing else: see ceilings.cpp."""

import os
from pathlib import Path
from typing import Any

from benchmarks.command import json_lines, output
from benchmarks.model import PREFILL_TOKENS, Model
from benchmarks.results import Values
from benchmarks.turn import Turn

READING, MULTIPLYING = "read bandwidth", "int8 peak"
"""The ceilings' names among the engines."""

_SOURCE = Path(__file__).with_suffix(".cpp")
_PROGRAM = _SOURCE.parents[1] / "build/benchmarks/ceilings"


def ceiling_turns(model: Model, threads: int) -> list[Turn]:
    """Decode, batch 1, if a step only read its weights once; prefill if it only did the layers' multiply-adds."""
    decode, prefill = f"{model.name} decode 1", f"{model.name} prefill"

    def read() -> Values:
        size = model.decode_bytes()
        rate = _measure(threads, "read", size)["read_bytes_per_s"]
        return {decode: rate / size, f"{model.name} bandwidth": rate / 1e9, f"{model.name} step-bytes": size / 1e6}

    def multiply() -> Values:
        rate = _measure(threads, "multiply")["multiply_adds_per_s"]
        linear, attention = model.linear_multiply_adds(), model.attention_multiply_adds(PREFILL_TOKENS) / PREFILL_TOKENS
        return {
            prefill: rate / linear,
            f"{model.name} multiply-add-speed": rate / 1e9,
            f"{model.name} linear-multiply-adds": linear / 1e6,
            f"{model.name} attention-multiply-adds": attention / 1e6,
        }

    return [Turn(READING, (decode,), read), Turn(MULTIPLYING, (prefill,), multiply)]


def _measure(threads: int, *what: str | int) -> dict[str, Any]:
    if not _PROGRAM.exists() or _PROGRAM.stat().st_mtime < _SOURCE.stat().st_mtime:
        _PROGRAM.parent.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CXX", "c++")
        output([compiler, "-O3", "-march=native", "-std=c++20", "-pthread", str(_SOURCE), "-o", str(_PROGRAM)])
    (figures,) = json_lines([str(_PROGRAM), str(threads), *map(str, what)])
    return figures
