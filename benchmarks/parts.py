"""The parts of the benchmark, each of which can be run by itself."""

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.busy import busy_turn
from benchmarks.ceilings import ceiling_turns
from benchmarks.long_prompt import long_prompt_turns
from benchmarks.model import GEMMA, QWEN, SMOLLM2, Model
from benchmarks.offline import OurEngine, PeerEngine, llama_turns, offline_turn
from benchmarks.peers_home import Peers
from benchmarks.python_side import python_turn
from benchmarks.serving import http_turns, startup_turns
from benchmarks.turn import Turn


def _offline(model: Model, peers: Peers, *, requantized: bool = False, openvino: bool = False) -> list[Turn]:
    turns = [offline_turn(OurEngine(model, peers.threads), model), *ceiling_turns(model, peers.threads)]
    turns += llama_turns(model, peers, requantized=requantized)
    if openvino:
        turns.append(offline_turn(PeerEngine("OpenVINO", "openvino", lambda: model.path, peers), model))
    return turns


def _avx2(peers: Peers) -> list[Turn]:
    ours = offline_turn(OurEngine(SMOLLM2, peers.threads, isa="avx2"), SMOLLM2, "avx2")
    return [ours, *llama_turns(SMOLLM2, peers, requantized=True, peer="llama-avx2", label="avx2")]


def _busy(peers: Peers) -> list[Turn]:
    def q4_0() -> Path:
        return peers.requantized(SMOLLM2.path)

    contenders = (OurEngine(SMOLLM2, peers.threads), PeerEngine("llama.cpp Q4_0", "llama", q4_0, peers))
    return [busy_turn(contender, SMOLLM2) for contender in contenders]


PARTS: Mapping[str, Callable[[Peers], list[Turn]]] = {
    "smollm2": lambda peers: _offline(SMOLLM2, peers, requantized=True, openvino=True),
    "qwen": lambda peers: _offline(QWEN, peers, openvino=True),
    "gemma": lambda peers: _offline(GEMMA, peers),
    "http": lambda peers: http_turns(SMOLLM2, peers),
    "long-prompt": lambda peers: long_prompt_turns(SMOLLM2, peers),
    "startup": lambda peers: startup_turns(SMOLLM2, peers),
    "busy": _busy,
    "avx2": _avx2,
    "python": lambda peers: [python_turn(SMOLLM2, peers.threads)],
}
