"""Seeded synthetic traces: chats, agents, unique prompts, and the built-in example.

Every trace is a pure function of its parameters and its seed. A generator holds the
conversations in flight, never the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from replay.errors import ReplayError
from replay.trace import Request, TraceInfo

VOCABULARY = 50_000

Tokens: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Range:
    """An inclusive range of whole numbers, drawn from evenly.

    Args:
        low: Smallest value, at least 0.
        high: Largest value, at least `low`.

    Raises:
        ReplayError: If the bounds are negative or in the wrong order.

    >>> Range.parse("64-192")
    Range(low=64, high=192)
    >>> Range.parse("64")
    Range(low=64, high=64)
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ReplayError(f"range {self.low}-{self.high}: needs 0 <= low <= high")

    @classmethod
    def parse(cls, text: str) -> Range:
        """Read `n` or `low-high`.

        Raises:
            ReplayError: If the text is neither.
        """
        low, dash, high = text.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ReplayError(f"range {text!r}: give a number or low-high, such as 64 or 64-192")
        return cls(int(low), int(high or low))

    def draw(self, rng: np.random.Generator) -> int:
        """Return one value."""
        return int(rng.integers(self.low, self.high + 1))


@dataclass(frozen=True, slots=True)
class ChatSpec:
    """Chats in many turns under shared system prompts; chats in flight take turns at random.

    A request is the whole conversation so far and a new user turn. The answer joins the
    conversation after it. System prompt k is `1 / (k + 1)` as likely as the first one.

    Attributes:
        systems: Number of distinct system prompts; 1 gives one hot prompt.
        system_tokens: Length of a system prompt.
        turn_tokens: Length of a user turn.
        answer_tokens: Length of an answer; `0-0` lets a turn alone grow the conversation.
        turns: Turns of a chat.
        concurrent: Chats in flight.
    """

    systems: int = 4
    system_tokens: Range = Range(512, 2048)
    turn_tokens: Range = Range(16, 256)
    answer_tokens: Range = Range(32, 384)
    turns: Range = Range(1, 10)
    concurrent: int = 64

    def __post_init__(self) -> None:
        _need_positive("systems", self.systems)
        _need_positive("concurrent", self.concurrent)
        _need_positive("turns", self.turns.low)


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """Agents whose context grows by a tool call and its result at every step.

    Attributes:
        tools: Number of distinct tool sets; each agent has one as its first tokens.
        tool_tokens: Length of a tool set's description.
        task_tokens: Length of an agent's own task.
        step_tokens: What a step adds to the context.
        steps: Steps of an agent.
        concurrent: Agents in flight.
    """

    tools: int = 3
    tool_tokens: Range = Range(4096, 8192)
    task_tokens: Range = Range(64, 1024)
    step_tokens: Range = Range(64, 2048)
    steps: Range = Range(5, 40)
    concurrent: int = 16

    def __post_init__(self) -> None:
        _need_positive("tools", self.tools)
        _need_positive("concurrent", self.concurrent)
        _need_positive("steps", self.steps.low)


@dataclass(frozen=True, slots=True)
class UniqueSpec:
    """Prompts that share nothing: the floor of every cache.

    Attributes:
        prompt_tokens: Length of a prompt.
    """

    prompt_tokens: Range = Range(64, 2048)


Spec: TypeAlias = ChatSpec | AgentSpec | UniqueSpec


def _need_positive(name: str, value: int) -> None:
    if value < 1:
        raise ReplayError(f"{name}={value}: must be at least 1")


@dataclass(slots=True)
class _Conversation:
    """A chat or an agent in flight."""

    tokens: Tokens
    left: int


def generate(spec: Spec, *, seed: int, requests: int) -> Iterator[Tokens]:
    """Yield the prompts of a synthetic trace.

    Args:
        spec: What kind of traffic, with its parameters.
        seed: Any non-negative integer; equal seeds give equal traces.
        requests: Number of prompts.

    Yields:
        int64[prompt length] token ids below `VOCABULARY`.
    """
    rng = np.random.default_rng(seed)
    if isinstance(spec, UniqueSpec):
        return _unique(spec, rng, requests)
    return (
        _chats(spec, rng, requests) if isinstance(spec, ChatSpec) else _agents(spec, rng, requests)
    )


def _draw(rng: np.random.Generator, length: int) -> Tokens:
    return rng.integers(0, VOCABULARY, length, dtype=np.int64)


def _join(*parts: Tokens) -> Tokens:
    return np.concatenate(parts)


def _unique(spec: UniqueSpec, rng: np.random.Generator, requests: int) -> Iterator[Tokens]:
    for _ in range(requests):
        yield _draw(rng, spec.prompt_tokens.draw(rng))


def _chats(spec: ChatSpec, rng: np.random.Generator, requests: int) -> Iterator[Tokens]:
    systems = [_draw(rng, spec.system_tokens.draw(rng)) for _ in range(spec.systems)]
    weights = 1.0 / np.arange(1, spec.systems + 1)
    weights /= weights.sum()

    def start() -> _Conversation:
        system = systems[int(rng.choice(spec.systems, p=weights))]
        return _Conversation(system, spec.turns.draw(rng))

    def turn(chat: _Conversation) -> Tokens:
        prompt = _join(chat.tokens, _draw(rng, spec.turn_tokens.draw(rng)))
        chat.tokens = _join(prompt, _draw(rng, spec.answer_tokens.draw(rng)))
        return prompt

    return _interleave(start, turn, rng, concurrent=spec.concurrent, requests=requests)


def _agents(spec: AgentSpec, rng: np.random.Generator, requests: int) -> Iterator[Tokens]:
    tools = [_draw(rng, spec.tool_tokens.draw(rng)) for _ in range(spec.tools)]

    def start() -> _Conversation:
        task = _draw(rng, spec.task_tokens.draw(rng))
        context = _join(tools[int(rng.integers(spec.tools))], task)
        return _Conversation(context, spec.steps.draw(rng))

    def step(agent: _Conversation) -> Tokens:
        prompt = agent.tokens
        agent.tokens = _join(prompt, _draw(rng, spec.step_tokens.draw(rng)))
        return prompt

    return _interleave(start, step, rng, concurrent=spec.concurrent, requests=requests)


def _interleave(
    start: Callable[[], _Conversation],
    advance: Callable[[_Conversation], Tokens],
    rng: np.random.Generator,
    *,
    concurrent: int,
    requests: int,
) -> Iterator[Tokens]:
    """Advance a random conversation at a time; a new one follows each that ends."""
    flying = [start() for _ in range(concurrent)]
    for _ in range(requests):
        slot = int(rng.integers(concurrent))
        conversation = flying[slot]
        yield advance(conversation)
        conversation.left -= 1
        if not conversation.left:
            flying[slot] = start()


class GeneratedReader:
    """A generated trace of token ids that needs no file.

    Args:
        name: What reports call it.
        kind: What it is, in words.
        spec: Kind of traffic.
        seed: Seed of the trace.
        requests: Number of prompts.
    """

    def __init__(self, name: str, kind: str, spec: Spec, *, seed: int, requests: int) -> None:
        self._name = name
        self._kind = f"{kind}, seed {seed}"
        self._spec = spec
        self._seed = seed
        self._requests = requests
        self._read = 0

    @property
    def info(self) -> TraceInfo:
        """Facts about the trace."""
        return TraceInfo(self._name, self._kind, "plain", 1, "none", "global", "none")

    @property
    def rewindable(self) -> bool:
        """A generated trace can be read again."""
        return True

    def progress(self) -> float:
        """Return the share of the requests that has been read."""
        return self._read / self._requests

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests."""
        prompts = generate(self._spec, seed=self._seed, requests=self._requests)
        for self._read, prompt in enumerate(prompts, start=1):
            yield Request(len(prompt), prompt.tolist())


EXAMPLE_NAME = "example"


def example_reader() -> GeneratedReader:
    """Return the built-in example."""
    return GeneratedReader(EXAMPLE_NAME, "generated chats", ChatSpec(), seed=0, requests=2000)
