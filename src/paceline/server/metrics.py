"""``/metrics`` under vLLM's names, labels and buckets, so that dashboards made for vLLM work.

Names: https://docs.vllm.ai/en/latest/design/metrics.html
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.engine.engine import Engine
from paceline.engine.outputs import RequestOutput

# A `_created` series beside every histogram doubles the page and no vLLM board reads them.
disable_created_metrics()  # type: ignore[no-untyped-call]

_LABELS = ["model_name", "engine"]
_TTFT_BUCKETS = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
]
_TOKEN_BUCKETS = [
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
]
_REQUEST_BUCKETS = [
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
]


class RequestClock:
    """When a request came and when its last tokens came, in ``perf_counter`` seconds."""

    __slots__ = ("arrived", "first_token", "last_token")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.first_token: float | None = None
        self.last_token = arrived


class _EngineCollector(Collector):
    """Reads the engine's own counters when somebody scrapes, so that a step costs nothing."""

    def __init__(self, engine: Engine, labels: list[str]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats, cost = self._engine.stats(), self._engine.cost
        gauges = {
            "num_requests_running": ("Requests in the running batch", stats.running),
            "num_requests_waiting": ("Requests waiting to be scheduled", stats.waiting),
            "kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1", stats.kv_blocks_used / stats.kv_blocks_total),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens computed", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated", stats.generation_tokens),
            "num_preemptions": ("Requests preempted", stats.preemptions),
            "prefix_cache_queries": ("Tokens looked up in the prefix cache", stats.prefix_queries),
            "prefix_cache_hits": ("Tokens found in the prefix cache", stats.prefix_hits),
            "spec_decode_num_draft_tokens": ("Tokens proposed by prompt lookup", stats.draft_tokens),
            "spec_decode_num_accepted_tokens": ("Proposed tokens that came true", stats.accepted_tokens),
        }
        ours = {
            "kv_blocks_used": ("KV blocks that running requests hold", stats.kv_blocks_used),
            "kv_blocks_cached": ("Free KV blocks that hold a prefix for later requests", stats.kv_blocks_cached),
            "kv_blocks_blank": (
                "Free KV blocks that hold nothing of use",
                stats.kv_blocks_total - stats.kv_blocks_used - stats.kv_blocks_cached,
            ),
            "kv_slots_wasted": ("Room in the last blocks of running requests, in tokens", stats.kv_slots_wasted),
            "prefix_reuse_ratio": (
                "Share of all prompt tokens that the prefix cache had",
                stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0,
            ),
            "stalled_seconds": (
                "Since the engine's last sign of life, if it has work",
                self._engine.stalled_seconds(),
            ),
        }
        if self._engine.config.target_itl_ms is not None:  # else nothing is learned
            ours |= {
                "step_fixed_seconds": ("Expected cost of a step, whatever it computes", cost.fixed_ms / 1e3),
                "step_decoding_request_seconds": ("Expected cost of a decoding request in it", cost.decoding_ms / 1e3),
                "step_prompt_token_seconds": ("Expected cost of a prompt's token in it", cost.token_ms / 1e3),
                "step_slowdown_ratio": ("Times as long as expected that the last steps took", cost.slowdown),
            }
        named = {f"vllm:{name}": gauge for name, gauge in gauges.items()}
        named |= {f"paceline:{name}": gauge for name, gauge in ours.items()}
        for name, (documentation, value) in named.items():
            gauge = GaugeMetricFamily(name, documentation, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, (documentation, value) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", documentation, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter


class ServerMetrics:
    """The metrics of one app, in a registry of its own."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._labels = [model_name, "0"]
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, self._labels))
        self._finished = Counter(
            "vllm:request_success", "Requests finished", [*_LABELS, "finished_reason"], registry=self._registry
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", _TTFT_BUCKETS)
        self._itl = self._histogram("inter_token_latency_seconds", "Between tokens of a request", _TOKEN_BUCKETS)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean of a request's inter-token times", _TOKEN_BUCKETS
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token", _REQUEST_BUCKETS)
        self._queue = self._histogram("request_queue_time_seconds", "Waiting to be scheduled", _REQUEST_BUCKETS)
        self._prefill = self._histogram("request_prefill_time_seconds", "Scheduled to first token", _REQUEST_BUCKETS)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token", _REQUEST_BUCKETS)

    def _histogram(self, name: str, documentation: str, buckets: list[float]) -> Histogram:
        family = Histogram(f"vllm:{name}", documentation, _LABELS, registry=self._registry, buckets=buckets)
        return family.labels(*self._labels)

    def observe(self, clock: RequestClock, output: RequestOutput, now: float) -> None:
        """Account for one output of a request; ``now`` is when the engine handed it out."""
        if output.token_ids:
            if clock.first_token is None:
                clock.first_token = now
                self._ttft.observe(now - clock.arrived)
            else:
                self._itl.observe((now - clock.last_token) / len(output.token_ids))
            clock.last_token = now
        if output.finish_reason is not None:
            self._observe_finish(clock, output, now)

    def _observe_finish(self, clock: RequestClock, output: RequestOutput, now: float) -> None:
        self._finished.labels(*self._labels, output.finish_reason).inc()
        self._e2e.observe(now - clock.arrived)
        if output.timings is not None:
            self._queue.observe(output.timings.queue_ms / 1e3)
            self._prefill.observe(output.timings.prefill_ms / 1e3)
            self._decode.observe(output.timings.decode_ms / 1e3)
        if clock.first_token is not None and output.usage is not None and output.usage.completion_tokens > 1:
            self._tpot.observe((clock.last_token - clock.first_token) / (output.usage.completion_tokens - 1))

    def page(self) -> bytes:
        """Everything in Prometheus's text format 0.0.4."""
        return generate_latest(self._registry)
