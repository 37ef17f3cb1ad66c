"""Clients without patience: they stream or not, leave in the middle, and set timeouts."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from tests.soak.asks import BAD, Ask

Answer = list[tuple[str, str, list[float | None]]]
"""Of each choice: text, finish reason, log-probabilities of its tokens."""


def read_body(body: Mapping[str, Any]) -> Answer:
    return [
        (
            choice["text"] if "text" in choice else choice["message"]["content"],
            choice["finish_reason"],
            _logprobs(choice),
        )
        for choice in body["choices"]
    ]


def _logprobs(choice: Mapping[str, Any]) -> list[float | None]:
    report = choice.get("logprobs")
    if not report:
        return []
    if "token_logprobs" in report:
        return list(report["token_logprobs"])
    return [token["logprob"] for token in report["content"]]


class Crowd:
    """So many clients at once, each asking one thing after another until the time is over."""

    def __init__(self, url: str, asks: Sequence[Ask], answers: Mapping[int, Answer], seed: int) -> None:
        self._url = url
        self._asks = asks
        self._answers = answers
        self._rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, num_clients: int, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_clients)
        async with httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as http:

            async def client() -> None:
                while asyncio.get_running_loop().time() < deadline and not self.wrong:
                    await self._ask_something(http)

            await asyncio.gather(*(client() for _ in range(num_clients)))

    async def _ask_something(self, http: httpx.AsyncClient) -> None:
        kind = self._rng.choices(["whole", "stream", "leave", "timeout", "bad", "reset"], [30, 30, 20, 8, 10, 2])[0]
        self.counts[kind] += 1
        index = self._rng.randrange(len(self._asks))
        ask = self._asks[index]
        body = ask.body | {"priority": self._rng.choice([0, 0, 0, -1, 1])}
        match kind:
            case "bad":
                path, bad = self._rng.choice(BAD)
                response = await http.post(path, json=bad)
                self._check(response.status_code == 400, f"{bad} got {response.status_code}: {response.text}")
            case "reset":
                await http.post("/reset_prefix_cache")
            case "leave":
                await self._leave(http, ask.path, body | {"stream": self._rng.random() < 0.7})
            case "stream":
                await self._stream(http, index, body | {"stream": True})
            case _:
                if kind == "timeout":
                    body["timeout"] = self._rng.choice([0.001, 0.05, 0.3, 2])
                await self._whole(http, index, body)

    async def _whole(self, http: httpx.AsyncClient, index: int, body: dict[str, Any]) -> None:
        response = await http.post(self._asks[index].path, json=body)
        if self._refused(response) or (response.status_code == 504 and "timeout" in body):
            return
        self._check(response.status_code == 200, f"request {index} got {response.status_code}: {response.text}")
        if response.status_code == 200:
            self._compare(index, read_body(response.json()))

    async def _stream(self, http: httpx.AsyncClient, index: int, body: dict[str, Any]) -> None:
        choices = body["n"]
        texts, reasons = [""] * choices, [""] * choices
        logprobs: list[list[float | None]] = [[] for _ in range(choices)]
        async with http.stream("POST", self._asks[index].path, json=body) as response:
            if self._refused(response):
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self._check(False, f"request {index} ended in {event}")
                    return
                for choice in event["choices"]:
                    number = choice["index"]
                    texts[number] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
                    logprobs[number] += _logprobs(choice)
                    reasons[number] = choice["finish_reason"] or reasons[number]
        self._compare(index, list(zip(texts, reasons, logprobs, strict=True)))

    async def _leave(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        async def read() -> None:
            async with http.stream("POST", path, json=body) as response:
                async for _ in response.aiter_raw():
                    pass

        try:
            await asyncio.wait_for(read(), self._rng.choice([0, 0.002, 0.02, 0.1, 0.5]))
        except TimeoutError:
            self.counts["left in the middle"] += 1

    def _refused(self, response: httpx.Response) -> bool:
        if response.status_code == 503:
            self._check("retry-after" in response.headers, "503 without Retry-After")
            self.counts["refused: queue full"] += 1
            return True
        return False

    def _compare(self, index: int, answer: Answer) -> None:
        self.counts["compared"] += 1
        expected = self._answers[index]
        self._check(answer == expected, f"request {index}: {self._asks[index]}\nalone: {expected}\nhere:  {answer}")

    def _check(self, right: bool, what: str) -> None:
        if not right:
            self.wrong.append(what)
