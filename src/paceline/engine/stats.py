"""What the engine counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the engine was made; they only grow."""

    prompt_tokens: int = 0
    """Prompt tokens of requests that reached their first token."""
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache, once per request."""
    prefix_hits: int = 0
    """Those of them that it had."""
    draft_tokens: int = 0
    """Tokens that prompt lookup proposed."""
    accepted_tokens: int = 0
    """Those of them that came true."""
    steps: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A look at the engine at one moment."""

    running: int
    waiting: int
    """Submitted or preempted, and not running."""
    kv_blocks_total: int
    kv_blocks_used: int
    """Held by running requests."""
    kv_blocks_cached: int
    """Free, but holding a prefix that a later request may reuse."""
    kv_slots_wasted: int
    """Room behind the last tokens of running requests, in the blocks they hold, in tokens."""
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    draft_tokens: int
    accepted_tokens: int
    steps: int
