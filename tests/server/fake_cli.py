"""``python -m tests.server.fake_cli serve MODEL …``: the real command line over the tiny model.

MODEL is ``tiny``, ``base`` (without a chat template), ``owned`` (whose owner set a stop string and a system prompt),
``endless`` (slow, with a context that never ends), ``greedy`` (whose KV cache is more than the machine has), ``stuck``
(whose first step never returns) or ``loading`` (which is never loaded).
"""

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from paceline import loading
from paceline.cli.main import main
from paceline.errors import ExecutorError
from tests.server.fakes import ScriptedExecutor, tiny_model


def load_tiny_model(model: str, **_options: object) -> Any:
    sys.stderr.write("loading\n")
    if model == "loading":
        threading.Event().wait(60)
    if model == "base":
        return tiny_model(template=None)
    if model == "owned":
        owned = tiny_model()
        owned.source = replace(owned.source, sampling={"stop": ["안"]}, system="Be brief")
        return owned
    if model == "endless":
        return tiny_model(executor=ScriptedExecutor(num_blocks=8000, seconds_per_step=0.005), max_model_len=200_000)
    loaded = tiny_model()
    if model == "greedy":
        loaded.executor.touch_kv = out_of_memory
    if model == "stuck":
        loaded.executor.open.clear()
    return loaded


def out_of_memory() -> Iterator[None]:
    yield
    raise ExecutorError("the machine has 2 MiB of memory for the KV cache, not 4000")


if __name__ == "__main__":
    loading.load_model = load_tiny_model
    main()
