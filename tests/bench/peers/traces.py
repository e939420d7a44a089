"""What is asked of every peer: the same requests, as token ids. Pure.

Lengths depend on the trace alone, so that repeats can be compared; tokens on the repeat too, so
that no cache of prefixes answers with what the repeat before it left.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

VOCAB_SIZE = 8192
FIRST_TEXT_ID = 259  # below: control tokens and bytes


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, how many tokens follow, and when it comes (seconds from the start)."""

    prompt: tuple[int, ...]
    output_tokens: int
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by their lengths. `cap`: sequences that each peer runs at once, at most.

    With `paced` a client keeps `cap` requests open and servers are started with `server_cap`, so
    that one server serves several traces; else all come at their time and the server's cap holds.
    """

    name: str
    about: str
    model: str
    num_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    cap: int
    server_cap: int
    paced: bool = False
    prefixes: int = 0
    prefix_tokens: int = 0
    wave_requests: int = 0
    wave_seconds: float = 0.0
    ttft_ms: int = 0
    """When first tokens are due."""

    @property
    def is_online(self) -> bool:
        """Whether requests come in waves, and latencies are what counts."""
        return self.wave_requests > 0

    def requests(self, repeat: int) -> tuple[Request, ...]:
        """The requests of one repeat, in order of their arrival."""
        lengths = random.Random(self.name)
        words = random.Random(f"{self.name} {repeat}")
        heads = [_tokens(words, self.prefix_tokens) for _ in range(self.prefixes)]
        made = []
        for number in range(self.num_requests):
            head = heads[number % len(heads)] if heads else ()
            prompt = head + _tokens(words, lengths.randint(*self.prompt_tokens))
            output_tokens = lengths.randint(*self.output_tokens)
            wave = number // self.wave_requests if self.wave_requests else 0
            made.append(Request(prompt, output_tokens, wave * self.wave_seconds))
        return tuple(made)

    def small(self, num_requests: int) -> "Trace":
        """The same trace with at most so many requests, for a trial."""
        return replace(self, num_requests=min(num_requests, self.num_requests))


def padded(requests: Sequence[Request], size: int) -> tuple[Request, ...]:
    """`requests` as batches of `size` see them where prompts are padded: as long as the longest.

    Filled up with a prompt's own tokens, since equal ones would be found in a prefix cache.
    """
    made = []
    for at in range(0, len(requests), size):
        batch = requests[at : at + size]
        longest = max(len(request.prompt) for request in batch)
        for request in batch:
            times = -(-longest // len(request.prompt))
            made.append(replace(request, prompt=(request.prompt * times)[-longest:]))
    return tuple(made)


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_TEXT_ID, VOCAB_SIZE) for _ in range(count))


def _batch(size: int) -> Trace:
    return Trace(
        f"batch-{size}",
        f"Mixed lengths, {size} at a time: continuous batching against static",
        "88M",
        num_requests=max(8, 2 * size),
        prompt_tokens=(32, 256),
        output_tokens=(8, 128),
        cap=size,
        server_cap=64,
        paced=True,
    )


BATCHES = (1, 4, 8, 16, 32, 64)
CHAT = replace(
    _batch(32),
    name="chat",
    about="Answers of very different lengths, 32 at a time",
    num_requests=128,
    output_tokens=(8, 384),
)
"""Of the batches' traces two thirds are prompts, on which a static batch loses nothing here: its
prompts are not padded, and on a CPU a prompt's token costs what a decoded one does."""
TRACES = {
    trace.name: trace
    for trace in (
        Trace(
            "offline",
            "64 requests at once",
            "88M",
            num_requests=64,
            prompt_tokens=(32, 512),
            output_tokens=(16, 128),
            cap=32,
            server_cap=32,
        ),
        Trace(
            "prefix",
            "48 requests at once that share 4 prefixes of 384 tokens",
            "88M",
            num_requests=48,
            prompt_tokens=(16, 96),
            output_tokens=(16, 64),
            cap=32,
            server_cap=32,
            prefixes=4,
            prefix_tokens=384,
        ),
        *(_batch(size) for size in BATCHES),
        CHAT,
        Trace(
            "bursty",
            "4 waves of 24 requests, 10 seconds apart",
            "88M",
            num_requests=96,
            prompt_tokens=(64, 384),
            output_tokens=(32, 96),
            cap=16,
            server_cap=16,
            wave_requests=24,
            wave_seconds=10.0,
            ttft_ms=1500,
        ),
        Trace(
            "offline-500M",
            "16 requests at once on the larger model",
            "500M",
            num_requests=16,
            prompt_tokens=(32, 512),
            output_tokens=(16, 128),
            cap=32,
            server_cap=32,
        ),
    )
}
