"""``python -m tests.soak``: see the package.

Each episode starts a server with other limits (a pool of a few blocks, few seats, a short queue, speculation, a target
for pauses, no prefix cache) and sends it a crowd of clients for a while. At its end every block must be free and the
books of the pool in order; every answer that came must be the one that the same request gives alone; and from episode
to episode the process may not grow.
"""

import argparse
import asyncio
import functools
import gc
import logging
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil

from paceline.loading import LoadedModel, load_model
from paceline.options import EngineOptions
from paceline.server.address import bind
from paceline.server.app import create_app
from paceline.server.listen import HttpServer
from tests.soak.asks import Ask, make_asks
from tests.soak.client import Answer, Crowd, read_body

_MODEL = "smollm2-135m"
_MAX_MODEL_LEN = 640
_SETTLING = 4
"""Episodes until every part of the program and of the allocator has been used once."""
_MOST_GROWTH = 24 << 20
"""Bytes between the first and the last episodes. The allocator's own ups and downs are some megabytes."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--episode", type=float, default=45.0, help="seconds of each server's life")
    parser.add_argument("--requests", type=int, default=120, help="different requests")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    asks = make_asks(options.seed, options.requests)
    print(f"seed {options.seed}: asking {len(asks)} requests alone", flush=True)
    answers = answers_alone(asks)
    rng = random.Random(options.seed)
    counts: Counter[str] = Counter()
    sizes: list[int] = []
    end = time.monotonic() + options.minutes * 60
    number = 0
    while time.monotonic() < end:
        number += 1
        limits = draw_limits(rng)
        print(f"episode {number}: {limits}", flush=True)
        seconds = min(options.episode, max(end - time.monotonic(), 1.0))
        crowd = episode(limits, asks, answers, seed=rng.randrange(2**32), seconds=seconds)
        if crowd.wrong:
            print(*crowd.wrong, sep="\n", file=sys.stderr)
            return 1
        counts += crowd.counts
        forget_apps()
        sizes.append(psutil.Process().memory_info().rss)
        print(f"  {sum(crowd.counts.values())} done, resident {sizes[-1] / 2**20:.0f} MiB", flush=True)
    print(", ".join(f"{what} {count}" for what, count in sorted(counts.items())))
    settled = sizes[_SETTLING:]
    third = len(settled) // 3
    if third:
        growth = min(settled[-third:]) - min(settled[:third])
        print(f"grown by {growth / 2**20:.1f} MiB from the first third of the episodes to the last")
        if growth > _MOST_GROWTH:
            print("memory grows", file=sys.stderr)
            return 1
    print("every block free, every answer right")
    return 0


def forget_apps() -> None:
    """FastAPI's caches keep the routes of the last apps, and those their models; who serves one app does not notice."""
    for each in gc.get_objects():
        if isinstance(each, functools._lru_cache_wrapper) and each.__module__.startswith("fastapi."):
            each.cache_clear()
    gc.collect()


def draw_limits(rng: random.Random) -> dict[str, object]:
    """A server's options: each scarce in some episodes."""
    max_num_seqs = rng.choice([2, 6, 12, 32])
    return {
        # From the least that one request of full length needs.
        "kv_memory": rng.choice([15, 17, 22, 64]) << 20,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": rng.choice([max(max_num_seqs, 16), 64, 512]),
        "max_waiting": rng.choice([None, None, 4]),
        "prompt_lookup_tokens": rng.choice([0, 0, 4, 12]),
        "target_itl": rng.choice([None, None, 20.0]),
        "enable_prefix_caching": rng.random() < 0.8,
    }


def answers_alone(asks: list[Ask]) -> dict[int, Answer]:
    """Each request's answer from a server that has nothing else to do, and forgets the one before."""
    with served(enable_prefix_caching=False) as (_, url), httpx.Client(base_url=url, timeout=120) as http:
        return {
            index: read_body(http.post(ask.path, json=ask.body).raise_for_status().json())
            for index, ask in enumerate(asks)
        }


def episode(
    limits: dict[str, object], asks: list[Ask], answers: dict[int, Answer], *, seed: int, seconds: float
) -> Crowd:
    with served(**limits) as (model, url):
        crowd = Crowd(url, asks, answers, seed)
        asyncio.run(crowd.run(random.Random(seed).choice([1, 4, 12, 24]), seconds))
        check_idle(model, crowd)
    return crowd


def check_idle(model: LoadedModel, crowd: Crowd) -> None:
    deadline = time.monotonic() + 30
    while model.engine.has_work and time.monotonic() < deadline:
        time.sleep(0.01)
    stats = model.engine.stats()
    if model.engine.has_work or stats.kv_blocks_used:
        crowd.wrong.append(f"when all clients were gone: {stats}")
    model.engine._pool.check_integrity()
    crowd.counts["preemptions"] += stats.preemptions
    crowd.counts["tokens of accepted drafts"] += stats.accepted_tokens


@contextmanager
def served(**limits: object) -> Iterator[tuple[LoadedModel, str]]:
    model = load_model(_MODEL, options=EngineOptions(max_model_len=_MAX_MODEL_LEN, **limits))  # type: ignore[arg-type]
    ready = threading.Event()
    with bind("127.0.0.1", 0) as listener:
        server = HttpServer(create_app(model, served_names=["soak"]), on_ready=ready.set)
        thread = threading.Thread(target=server.run_on, args=(listener,))
        thread.start()
        ready.wait(timeout=60)
        try:
            yield model, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            model.close()


if __name__ == "__main__":
    sys.exit(main())
