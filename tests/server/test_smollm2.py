"""The whole way with the real model: file, tokenizer, engine, native executor, HTTP, OpenAI's client."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.server.serve_process import ROOT, ServeProcess

QUESTION = [{"role": "user", "content": "Write one sentence about the sea, in Korean too: 바다."}]


@pytest.fixture(scope="module")
def smollm2_server(smollm2_path: Path) -> Iterator[ServeProcess]:
    ours, theirs = os.pipe()
    limits = ["--max-model-len=2048", "--kv-memory=512MiB", "--served-model-name=smollm2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli.main", "serve", str(smollm2_path), "--port=0", *limits],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    server = ServeProcess(process, ours)
    yield server
    assert server.end(signal.SIGTERM) == 0
    os.close(ours)


@pytest.fixture(scope="module")
def client(smollm2_server: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_streamed_chat_gives_the_text_of_the_unstreamed_one(client: openai.OpenAI, temperature: float) -> None:
    asked = {"model": "smollm2", "messages": QUESTION, "temperature": temperature, "seed": 7, "max_tokens": 48}
    whole = client.chat.completions.create(**asked)
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)
    )
    assert whole.choices[0].message.content
    assert streamed == whole.choices[0].message.content


def test_a_completion_continues_the_prompt(client: openai.OpenAI) -> None:
    asked = {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
    assert client.completions.create(**asked).choices[0].text.startswith(" Paris")


def test_company_does_not_change_an_answer(client: openai.OpenAI) -> None:
    """The promise of determinism, through HTTP: eight at once draw what each draws alone."""

    def ask(seed: int) -> str:
        asked = {"model": "smollm2", "prompt": f"Chapter {seed}:", "seed": seed, "max_tokens": 24}
        return client.completions.create(**asked).choices[0].text

    with ThreadPoolExecutor(8) as together:
        assert list(together.map(ask, range(8))) == [ask(seed) for seed in range(8)]


def test_the_start_screen_names_what_runs(smollm2_server: ServeProcess) -> None:
    smollm2_server.read_until("ready")
    assert "(instruct), llama, Q4_1 + Q8_0" in smollm2_server.text
    assert "context: 2048 tokens" in smollm2_server.text
