"""Through HTTP: speed under vLLM's load generator, a server's memory after it, and the time to its first token."""

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.command import BenchmarkError, json_lines
from benchmarks.model import Model
from benchmarks.peers_home import Peers
from benchmarks.results import OURS, Values
from benchmarks.server import SERVED_NAME, Server, free_port
from benchmarks.turn import Turn
from paceline.executors.native import kv_bytes_per_block

CONCURRENCIES = (1, 8, 32)

LLAMA_SERVER = "llama-server Q4_0"
_LLAMA_SLOTS, _LLAMA_CONTEXT = max(CONCURRENCIES), 2048
_OUR_KV_BYTES = 256 << 20
"""Room for 60 requests of this load, and less than its 85 requests fill, so that all of it has been written."""

Start = Callable[[], Server]


def http_turns(model: Model, peers: Peers) -> list[Turn]:
    """Output tok/s at each concurrency; of us and llama-server also the memory above weights and KV cache."""

    def our_extra() -> int:
        needs = model.footprint(peers.threads)
        return needs.weights + _OUR_KV_BYTES // needs.kv_block * needs.kv_block

    def llama_extra() -> int:
        kv_token = kv_bytes_per_block(model.weights.spec, "f16") // 32
        return model.stored_bytes(peers.requantized(model.path)) + _LLAMA_SLOTS * _LLAMA_CONTEXT * kv_token

    def start_ours() -> Server:
        return our_server(model, peers.threads, "--kv-memory", f"{_OUR_KV_BYTES >> 20}MiB")

    def start_llama() -> Server:
        # By default it also keeps the prompts of past requests in memory: not its KV cache, and of no use to this load.
        return llama_server(model, peers, "-np", _LLAMA_SLOTS, "-c", _LLAMA_SLOTS * _LLAMA_CONTEXT, "--cache-ram", 0)

    return [
        _load_turn(OURS, model, peers, start_ours, our_extra),
        _load_turn(LLAMA_SERVER, model, peers, start_llama, llama_extra),
        _load_turn("vLLM", model, peers, lambda: vllm_server(model, peers), None),
    ]


def startup_turns(model: Model, peers: Peers) -> list[Turn]:
    """Seconds from the start of the process to the first token, both servers with their defaults."""
    metric = f"{model.name} startup"

    def turn(engine: str, start: Start, file: Callable[[], Path]) -> Turn:
        def run() -> Values:
            file().read_bytes()  # into the page cache
            with start() as server:
                return {metric: server.seconds_to_first_token()}

        return Turn(engine, (metric,), run, ("llama",) if engine == LLAMA_SERVER else ())

    return [
        turn(OURS, lambda: our_server(model, peers.threads), lambda: model.path),
        turn(LLAMA_SERVER, lambda: llama_server(model, peers), lambda: peers.requantized(model.path)),
    ]


def our_server(model: Model, threads: int, *options: str) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "paceline.cli.main", "serve", str(model.path), "--port", str(port)]
    command += ["--served-model-name", SERVED_NAME, "--threads", str(threads), *options]
    return Server(command, port, {})


def llama_server(model: Model, peers: Peers, *options: str | int) -> Server:
    port = free_port()
    return Server(
        peers.command("serve", "llama", peers.requantized(model.path), port, *options), port, peers.environment()
    )


def vllm_server(model: Model, peers: Peers) -> Server:
    port = free_port()
    return Server(peers.command("serve", "vllm", peers.hf_folder(model.path), port), port, peers.environment())


def _load_turn(engine: str, model: Model, peers: Peers, start: Start, known_bytes: Callable[[], int] | None) -> Turn:
    """``known_bytes``: what weights and the KV cache that was written take of the server's memory."""
    names = {concurrency: f"{model.name} http {concurrency}" for concurrency in CONCURRENCIES}
    memory = f"{model.name} memory"

    def run() -> Values:
        folder = peers.hf_folder(model.path)
        with start() as server:
            server.seconds_to_first_token()
            values = _output_speeds(server, names, folder, peers)
            if known_bytes is not None:
                values[memory] = (server.resident_bytes() - known_bytes()) / 1e6
        return values

    needed = ("vllm", "llama") if engine == LLAMA_SERVER else ("vllm",)
    return Turn(engine, (*names.values(), *([memory] if known_bytes else [])), run, needed)


def _output_speeds(server: Server, names: dict[int, str], folder: Path, peers: Peers) -> dict[str, float]:
    concurrency = ",".join(map(str, names))
    cells = json_lines(
        peers.command("client", server.url, SERVED_NAME, folder), peers.environment(concurrency=concurrency)
    )
    failed = sum(cell["failed"] for cell in cells)
    if failed:
        reasons = dict.fromkeys(reason for cell in cells for reason in cell["reasons"])
        raise BenchmarkError(f"{failed} requests failed: {'; '.join(reasons) or 'no reason given'}")
    return {names[cell["concurrency"]]: cell["output_throughput"] for cell in cells}
