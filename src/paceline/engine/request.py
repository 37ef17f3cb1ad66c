"""A request as the engine sees it: token ids, parameters, and how far it has come."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.engine.bans import Bans
from paceline.engine.draft import PromptLookup
from paceline.engine.history import TokenHistory
from paceline.engine.sampling import SamplingParams

BlockKey = tuple[bytes, bytes]
"""What names a full KV block: digest of the chain that leads to it, and its own token ids as packed int32."""


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. The submitter reads it; only the engine's thread writes it."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    """0 to 2**64 - 1; with the index of the generated token the counter of its random number."""
    max_output_tokens: int
    """``params.max_tokens`` clamped to the room there is; 0: only the prompt is computed."""
    arrival: int = 0
    """Position in the order of arrival over all requests of the engine."""
    priority: int = 0
    """Lower goes first, as in vLLM."""
    cache_salt: str = ""
    """Only requests with equal salts share prefix cache blocks."""
    adapter: int = 0
    bans: Bans | None = None
    """Tokens that may not come next, where that changes from step to step."""
    all_forks: "tuple[Request, ...]" = ()
    """Further choices of the same prompt (``n``)."""
    forks: "list[Request]" = field(default_factory=list)
    """Those of them that wait for this one: they start with its first token, on its blocks."""
    forked_from: "Request | None" = None
    """The request whose ``forks`` this one is among, until it starts."""
    is_fork: bool = False
    drafter: PromptLookup | None = None
    output_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Tokens whose KV is in the blocks."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had when the request was first scheduled."""
    num_preemptions: int = 0
    block_table: "array[int]" = field(default_factory=lambda: array("i"))
    """KV blocks as int32, in the order of positions; empty unless the request is running."""
    copy_from: int | None = None
    """Block whose content the last one of ``block_table`` gets before the next step."""
    block_keys: list[BlockKey] = field(default_factory=list)
    """Names of the full blocks, as far as anybody needed them; they outlive a preemption."""
    deadline_ns: int | None = None
    """When it is given up, if it has a timeout. ``perf_counter_ns``, as are the next four."""
    arrived_ns: int = 0
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    finished_ns: int | None = None
    history: TokenHistory | None = field(init=False)
    """Which tokens were seen, where a penalty needs it."""
    next_scored: int = field(init=False)
    """First position of the prompt whose log-probability is still to be reported; the prompt's length if none is."""

    def __post_init__(self) -> None:
        params = self.params
        self.history = TokenHistory(self.prompt_ids) if params.has_penalties else None
        first = len(self.prompt_ids) if params.prompt_logprobs is None else params.prompt_logprobs_from
        self.next_scored = min(first, len(self.prompt_ids))

    def fork(self, forks: "Iterable[Request]") -> None:
        """Let other choices of the same prompt wait for this one."""
        self.all_forks = tuple(forks)
        self.forks = list(self.all_forks)
        for fork in self.forks:
            fork.forked_from, fork.is_fork = self, True

    @property
    def choices(self) -> "tuple[Request, ...]":
        """The ``n`` answers to the prompt, of which this is the first."""
        return (self, *self.all_forks)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_shareable_tokens(self) -> int:
        """How many of its first tokens it may take from the prefix cache: not the last known one, nor one whose logits
        score a token of the prompt."""
        return (self.next_scored if self.next_scored < len(self.prompt_ids) else self.num_tokens) - 1

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are known but not computed; 1 while decoding."""
        return len(self.prompt_ids) + len(self.output_ids) - self.num_computed_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions [start, end), prompt and output alike."""
        split = len(self.prompt_ids)
        if start >= split:
            return self.output_ids[start - split : end - split]
        if end <= split:
            return self.prompt_ids[start:end]
        return self.prompt_ids[start:] + self.output_ids[: end - split]

    def propose(self, limit: int) -> list[int]:
        """At most ``limit`` tokens that may come next.

        None where the next draw depends on the output by more than the context (penalties, bans): the draws at the
        proposed places would have to know the tokens before them. Nor where forks start with the next token.
        """
        limit = min(limit, self.max_output_tokens - len(self.output_ids) - 1)
        if self.drafter is None or self.history is not None or self.is_banning or self.forks or limit <= 0:
            return []
        return self.drafter.propose(self, limit)

    @property
    def is_banning(self) -> bool:
        """Some tokens may be banned from coming next."""
        return self.bans is not None and self.bans.active(len(self.output_ids))

    def append_output(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        if self.history is not None:
            self.history.add_output(token_id)
