"""A model small enough to serve in a test: the real tokenizer, template and engine over an executor with a script."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from paceline.engine.engine import Engine, EngineConfig
from paceline.errors import ExecutorError
from paceline.executors.base import Batch, KVGeometry, StepResult
from paceline.models.chat import ChatTemplate
from paceline.models.source import ModelSource
from paceline.models.spec import LayerSpec, ModelSpec
from paceline.models.tokenizer import Tokenizer

IM_START, IM_END, TH = 256, 257, 258
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCRIPT = "Grüße, 안녕 👋🏽! ".encode()
"""What the executor says, a byte per token, so that most characters take several tokens."""
POISON = 0
"""A prompt with this byte makes the executor fail."""


def tiny_tokenizer() -> Tokenizer:
    """Token id = byte, then two control tokens and the one merge that GGUF insists on."""
    # GPT-2's visible stand-in for each byte (https://github.com/openai/gpt-2/blob/master/src/encoder.py).
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + rank) for rank, byte in enumerate(hidden)}
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*(letters[byte] for byte in range(256)), "<|im_start|>", "<|im_end|>", "th"],
            "tokenizer.ggml.token_type": np.array([1] * 256 + [3, 3, 1], dtype=np.int32),
            "tokenizer.ggml.merges": ["t h"],
            "tokenizer.ggml.eos_token_id": IM_END,
        }
    )


class ScriptedExecutor:
    """Says SCRIPT over and over, whatever it is asked; keeps a record of its steps."""

    def __init__(self, *, num_blocks: int = 4096, end_after: int | None = None, seconds_per_step: float = 0.0) -> None:
        self.spec = ModelSpec(
            architecture="llama",
            name="tiny",
            vocab_size=259,
            hidden_size=32,
            layers=(LayerSpec(None),),
            num_heads=1,
            num_kv_heads=1,
            head_dim=32,
            intermediate_size=32,
            context_length=8192,
            norm_eps=1e-5,
            attention_scale=1.0,
            tied_embeddings=True,
        )
        self.kv_geometry = KVGeometry(block_size=32, num_blocks=num_blocks, bytes_per_block=4096)
        self.max_batched_tokens = 512
        self.sequences_per_step: list[int] = []
        self.token_ids: list[int] = []
        """Every token that was fed, in order."""
        self.open = threading.Event()
        """Cleared: the next step waits."""
        self.open.set()
        self._end_after = end_after
        self._seconds_per_step = seconds_per_step

    def execute(self, batch: Batch) -> StepResult:
        if not self.open.wait(timeout=30):
            raise ExecutorError("nobody opened the gate")
        time.sleep(self._seconds_per_step)
        if POISON in batch.token_ids:
            raise ExecutorError("poisoned prompt")
        self.sequences_per_step.append(batch.num_sequences)
        self.token_ids += batch.token_ids.tolist()
        said = [self._token(int(position)) for position in batch.draw_position]
        tokens = np.where(batch.target_ids < 0, said, batch.target_ids).astype(np.int32)
        rows, k = batch.num_rows, max(batch.num_logprobs.tolist(), default=-1)
        asked = k >= 0
        return StepResult(
            token_ids=tokens,
            status=np.zeros(rows, dtype=np.uint8),
            logprobs=np.where(tokens == IM_END, -np.inf, -0.5).astype(np.float32) if asked else np.empty(0, np.float32),
            top_ids=np.tile(np.arange(k, dtype=np.int32), (rows, 1)) if asked else np.empty((0, 0), np.int32),
            top_logprobs=np.full((rows, k), -1.5, np.float32) if asked else np.empty((0, 0), np.float32),
        )

    def _token(self, draw_position: int) -> int:
        return IM_END if draw_position == self._end_after else SCRIPT[draw_position % len(SCRIPT)]

    def touch_kv(self) -> Iterator[None]:
        return iter(())

    def close(self) -> None:
        pass


def tiny_model(
    *, executor: ScriptedExecutor | None = None, template: str | None = TEMPLATE, max_num_seqs: int = 64, **limits: int
) -> Any:
    """What ``paceline.loading.load_model`` returns, for ``create_app``."""
    executor = executor or ScriptedExecutor()
    tokenizer = tiny_tokenizer()
    limits = {"max_model_len": 4096} | limits
    config = EngineConfig(max_num_seqs=max_num_seqs, eos_ids=tokenizer.eos_ids, **limits)
    engine = Engine(executor, tokenizer, config)

    def close() -> None:
        engine.stop()
        executor.close()

    return SimpleNamespace(
        name="tiny",
        source=ModelSource("tiny", Path("tiny.gguf")),
        spec=executor.spec,
        tokenizer=tokenizer,
        chat_template=None if template is None else ChatTemplate(template, tokenizer),
        executor=executor,
        engine=engine,
        describe=lambda: {"model": "tiny (instruct)", "device": "CPU, 1 thread", "context": "4096 tokens"},
        close=close,
    )


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll; the time only bounds a failing test."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds} s still not: {what}")
        time.sleep(0.005)
