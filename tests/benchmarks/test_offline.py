import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from benchmarks.busy import busy_core, busy_turn
from benchmarks.ceilings import MULTIPLYING, READING, ceiling_turns
from benchmarks.model import SMOLLM2, Model
from benchmarks.offline import OurEngine, PeerEngine, offline_turn
from benchmarks.parts import PARTS
from benchmarks.peers_home import Peers
from benchmarks.python_side import python_turn
from benchmarks.results import OURS
from benchmarks.targets import TARGETS


@dataclass
class _Contender:
    """Decodes 10 tok/s for each sequence, and half as much where another process wants the core."""

    engine: str = "a"
    needs: tuple[str, ...] = ("llama",)
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def decode(self, batches: Sequence[int], new_tokens: int) -> dict[int, float]:
        self.asked.append((*batches, new_tokens))
        busy = any("while True: pass" in each.cmdline() for each in psutil.Process().children())
        return {batch: 10.0 * batch / (2 if busy else 1) for batch in batches}

    def prefill(self, repeat: int) -> float:
        return 100.0 * repeat


_MODEL = Model("m", "m", (1, 8), new_tokens=16, repeat=3)


def test_an_offline_turn_measures_every_batch_and_prefill() -> None:
    contender = _Contender()
    turn = offline_turn(contender, _MODEL, "avx2")
    assert turn.run() == {"m avx2 decode 1": 10, "m avx2 decode 8": 80, "m avx2 prefill": 300}
    assert contender.asked == [(1, 1, 1, 8, 16)]
    assert set(turn.run()) == set(turn.metrics)
    assert (turn.engine, turn.peers) == ("a", ("llama",))


def test_a_busy_turn_compares_with_its_own_idle_speed() -> None:
    turn = busy_turn(_Contender(), _MODEL)
    values = turn.run()
    assert {name: value for name, value in values.items() if name.endswith(" 8")} == {
        "m busy-share 8": 0.5,
        "m busy-idle-speed 8": 80,
        "m busy-speed 8": 40,
    }
    assert set(values) == set(turn.metrics)


def test_the_busy_loop_keeps_to_the_last_core_and_ends() -> None:
    with busy_core():
        (loop,) = (each for each in psutil.Process().children() if "while True: pass" in each.cmdline())
        assert loop.cpu_affinity() == [max(os.sched_getaffinity(0))]
    assert not loop.is_running()


def _peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: object) -> PeerEngine:
    """An engine whose program prints these, and what it was asked for before."""
    script = tmp_path / "peers"
    echo = "".join(f"echo '{json.dumps(line)}'\n" for line in lines)
    script.write_text(f'#!/bin/sh\necho "$@ $PEERS_PROMPT $PEERS_BATCH $PEERS_THREADS" >{tmp_path}/asked\n{echo}')
    script.chmod(0o755)
    monkeypatch.setattr("benchmarks.peers_home.SCRIPT", script)
    return PeerEngine("llama.cpp", "llama", lambda: Path("m.gguf"), Peers(2, tmp_path))


def test_a_peers_decode_speed_is_the_median_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"pl": 1, "speed_tg": 9}, {"pl": 1, "speed_tg": 10}, {"pl": 1, "speed_tg": 30}, {"pl": 8, "speed_tg": 50}]
    assert _peer(tmp_path, monkeypatch, *lines).decode([1, 1, 1, 8], 64) == {1: 10, 8: 50}
    assert (tmp_path / "asked").read_text() == "decode llama m.gguf 128 1,1,1,8 2\n"


def test_a_peers_prefill_speed_is_the_median_of_its_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _peer(tmp_path, monkeypatch, {"samples_ts": [1, 5, 3]}).prefill(3) == 3
    assert (tmp_path / "asked").read_text() == "prefill llama m.gguf 512  2\n"


def test_our_engine_runs_in_the_instruction_set_that_is_asked_for(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, object] = {}

    def output(command: Sequence[str], environment: dict[str, str]) -> str:
        seen.update(command=command, environment=environment)
        cells = [{"batch": 1, "metrics": {"decode_tps": {"p50": speed}}} for speed in (7, 5, 6)]
        return json.dumps({"cells": cells})

    monkeypatch.setattr("benchmarks.offline.output", output)
    assert OurEngine(SMOLLM2, 2, isa="avx2").decode([1, 1, 1], 64) == {1: 6}
    assert seen["environment"] == {"PACELINE_ISA": "avx2"}
    assert seen["command"][:3] == [sys.executable, "-m", "paceline.cli.main"]  # type: ignore[index]
    assert seen["command"][-2:] == ["--batch", "1,1,1"]  # type: ignore[index]


def test_the_ceilings_are_speeds_of_the_models_own_work(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"read": {"read_bytes_per_s": 1e10}, "multiply": {"multiply_adds_per_s": 5e11}}
    monkeypatch.setattr("benchmarks.ceilings._measure", lambda _threads, what, *_size: rates[what])
    read, multiply = (turn.run() for turn in ceiling_turns(SMOLLM2, 2))
    assert read["smollm2 decode 1"] * read["smollm2 step-bytes"] * 1e6 == pytest.approx(1e10)
    assert multiply["smollm2 prefill"] * multiply["smollm2 linear-multiply-adds"] * 1e6 == pytest.approx(5e11)


def test_smollm2s_work_is_what_its_shape_says(smollm2_path: Path) -> None:
    # 30 layers: q and output 576 x 576, k and v 192 x 576, gate, up and down 1536 x 576.
    assert SMOLLM2.linear_multiply_adds() == 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)
    # Scores and values, 576 wide together in 9 heads, over 1 + 2 + 3 tokens.
    assert SMOLLM2.attention_multiply_adds(3) == 30 * 6 * 2 * 576
    assert SMOLLM2.decode_bytes() == SMOLLM2.footprint(2).weights


def test_the_python_side_of_a_step_is_told_in_milliseconds(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def figures(us: int) -> dict[str, dict[str, int]]:
        return {str(batch): {"python_us": us * batch, "native_us": 9} for batch in (1, 8, 32)}

    program = tmp_path / "step_overhead.py"
    program.write_text(f"import json; print(json.dumps({figures(100) | {'http': figures(200)}!r}))")
    monkeypatch.setattr("benchmarks.python_side._PROGRAM", program)
    turn = python_turn(SMOLLM2, 2)
    values = turn.run()
    assert (values["smollm2 python 32"], values["smollm2 python-http 8"]) == (3.2, 1.6)
    assert set(values) == set(turn.metrics)


def test_the_ceilings_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.ceilings import _measure

    monkeypatch.setattr("benchmarks.ceilings._PROGRAM", tmp_path / "built/ceilings")
    assert _measure(2, "read", 1 << 20)["read_bytes_per_s"] > 0
    assert _measure(1, "multiply")["multiply_adds_per_s"] > 0


def test_every_target_is_measured_by_a_part_and_its_peers_take_part(smollm2_path: Path) -> None:
    cells = {(metric, turn.engine) for part in PARTS.values() for turn in part(Peers(2)) for metric in turn.metrics}
    for target in (target for targets in TARGETS.values() for target in targets):
        assert (target.metric, OURS) in cells
        for peer in target.peers:
            assert (target.metric, peer) in cells or peer == "llama.cpp Q4_0", (target.metric, peer)
    assert {READING, MULTIPLYING} < {engine for _, engine in cells}
