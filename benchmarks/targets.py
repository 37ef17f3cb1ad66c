"""What our engine is to reach, and whether it did."""

from dataclasses import dataclass
from enum import Enum, auto

from benchmarks.ceilings import MULTIPLYING, READING
from benchmarks.long_prompt import WITH_TARGET
from benchmarks.results import OURS, Results
from benchmarks.serving import CONCURRENCIES, LLAMA_SERVER


class Judged(Enum):
    """What is held against the goal."""

    RATIO = auto()
    """Our median ÷ the best peer's, at least."""
    SHARE = auto()
    """The same, told in percent."""
    OWN_SHARE = auto()
    """Our own value, a share, at least; peers stand beside it."""
    SECONDS = auto()
    MEGABYTES = auto()
    MILLISECONDS = auto()
    """Our own value, at most; peers stand beside it."""
    PART = auto()
    """Our median ÷ the best peer's, at most."""


_AT_MOST = (Judged.SECONDS, Judged.MEGABYTES, Judged.MILLISECONDS, Judged.PART)
COMPARED = (Judged.RATIO, Judged.SHARE, Judged.PART)
"""With the peer, not with a fixed value."""


@dataclass(frozen=True, slots=True)
class Target:
    what: str
    metric: str
    peers: tuple[str, ...]
    """Engines; the one with the best median counts."""
    goal: float
    stretch: float | None = None
    judged: Judged = Judged.RATIO
    engine: str = OURS
    """Ours, if not with its default options."""

    @property
    def at_most(self) -> bool:
        return self.judged in _AT_MOST


@dataclass(frozen=True, slots=True)
class Outcome:
    """A target and the medians; None is what was not measured."""

    target: Target
    ours: float | None
    peer: tuple[str, float] | None
    """Which peer, and its median."""
    missing: str
    """Why there is no figure, as far as known."""

    @property
    def figure(self) -> float | None:
        """What is held against the goal."""
        if self.ours is None or self.target.judged not in COMPARED:
            return self.ours
        return self.ours / self.peer[1] if self.peer else None

    @property
    def verdict(self) -> str:
        if self.figure is None:
            return f"not measured{': ' if self.missing else ''}{self.missing}"
        if self.target.stretch is not None and self._reaches(self.target.stretch):
            return "stretch met"
        return "met" if self._reaches(self.target.goal) else "missed"

    def _reaches(self, goal: float) -> bool:
        assert self.figure is not None
        return self.figure <= goal if self.target.at_most else self.figure >= goal


def outcome(target: Target, results: Results) -> Outcome:
    failures = results.failures.get(target.metric, {})
    missing = "; ".join(
        f"{engine}: {failures[engine]}" for engine in (target.engine, *target.peers) if engine in failures
    )
    peer = results.best(target.metric, target.peers, least=target.at_most)
    return Outcome(target, results.median(target.metric, target.engine), peer, missing)


_LLAMA = ("llama.cpp", "llama.cpp Q4_0")
_OPENVINO = ("OpenVINO",)
_SHARE = Judged.SHARE

TARGETS: dict[str, tuple[Target, ...]] = {
    "SmolLM2-135M-Instruct": (
        Target("decode, batch 1", "smollm2 decode 1", _LLAMA, 2.2, 2.8),
        Target("the same, of the roofline", "smollm2 decode 1", (READING,), 0.75, 0.9, _SHARE),
        Target("decode, batch 8", "smollm2 decode 8", _OPENVINO, 2.2, 2.8),
        Target("decode, batch 8", "smollm2 decode 8", _LLAMA, 1),
        Target("decode, batch 32", "smollm2 decode 32", _OPENVINO, 2.0, 2.6),
        Target("decode, batch 32", "smollm2 decode 32", _LLAMA, 1),
        Target("prefill, 512 tokens", "smollm2 prefill", _OPENVINO, 1.6, 2),
        Target("the same, of the int8 peak", "smollm2 prefill", (MULTIPLYING,), 0.45, 0.65, _SHARE),
        *(
            Target(f"through HTTP, concurrency {size}", f"smollm2 http {size}", (LLAMA_SERVER, "vLLM"), 2.5, 4)
            for size in CONCURRENCIES
        ),
        Target(
            "longest pause in 8 streams beside a prompt of 3 300 tokens, `--target-itl 50ms`",
            "smollm2 long-prompt itl-max",
            (LLAMA_SERVER, "vLLM"),
            100,
            judged=Judged.MILLISECONDS,
            engine=WITH_TARGET,
        ),
        Target(
            "that prompt's own first token",
            "smollm2 long-prompt ttft",
            (LLAMA_SERVER,),
            0.5,
            judged=Judged.PART,
            engine=WITH_TARGET,
        ),
        Target("start to first token", "smollm2 startup", (LLAMA_SERVER,), 1.2, 0.6, Judged.SECONDS),
        Target("memory above weights + KV", "smollm2 memory", (LLAMA_SERVER,), 200, 100, Judged.MEGABYTES),
        *(
            Target(
                f"decode, batch {size}, kept beside a busy loop on one core",
                f"smollm2 busy-share {size}",
                ("llama.cpp Q4_0",),
                0.4,
                judged=Judged.OWN_SHARE,
            )
            for size in (1, 8)
        ),
        *(
            Target(f"Python in a step, batch {size}", f"smollm2 python {size}", (), goal, judged=Judged.MILLISECONDS)
            for size, goal in ((1, 0.3), (32, 1.0))
        ),
    ),
    "SmolLM2-135M-Instruct, both with AVX2 alone": (
        Target("decode, batch 1", "smollm2 avx2 decode 1", _LLAMA, 1.3),
        Target("decode, batch 8", "smollm2 avx2 decode 8", _LLAMA, 1.5),
        Target("decode, batch 32", "smollm2 avx2 decode 32", _LLAMA, 1.5),
        Target("prefill, 512 tokens", "smollm2 avx2 prefill", _LLAMA, 1.5),
    ),
    "Qwen2.5-Coder-1.5B-Instruct": (
        Target("decode, batch 1", "qwen2.5-coder decode 1", _LLAMA, 1.3),
        Target("decode, batch 8", "qwen2.5-coder decode 8", _OPENVINO, 2),
        Target("prefill, 512 tokens", "qwen2.5-coder prefill", _LLAMA, 4),
        Target("prefill, 512 tokens", "qwen2.5-coder prefill", _OPENVINO, 2),
    ),
    "Gemma 3 270M": (
        Target("decode, batch 1", "gemma3 decode 1", _LLAMA, 1),
        Target("decode, batch 8", "gemma3 decode 8", _LLAMA, 1),
        Target("decode, batch 32", "gemma3 decode 32", _LLAMA, 1),
        Target("prefill, 512 tokens", "gemma3 prefill", _LLAMA, 1),
    ),
}
