"""Seeded chats: a few system prompts, many chats under each, several turns a chat.

A turn's prompt is everything said so far and a new message, so it shares the system prompt with
other chats and all but its end with the turn before.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """How many chats, and how long they are, in tokens."""

    seed: int = 0
    vocab: int = 256
    num_systems: int = 3
    num_chats: int = 16
    num_turns: int = 3
    system_tokens: tuple[int, int] = (50, 90)
    message_tokens: tuple[int, int] = (8, 40)
    answer_tokens: tuple[int, int] = (4, 10)


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message, and how many tokens answer it."""

    message: list[int]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Chat:
    """A system prompt and the turns that follow it."""

    system: list[int]
    turns: list[Turn]

    def max_tokens(self) -> int:
        """Return the tokens of the whole chat, answers included."""
        return len(self.system) + sum(len(t.message) + t.answer_tokens for t in self.turns)


def make_chats(config: WorkloadConfig) -> list[Chat]:
    """Return the chats of a seed; neighbours have different system prompts."""
    random = Random(config.seed)

    def tokens(bounds: tuple[int, int]) -> list[int]:
        return [random.randrange(config.vocab) for _ in range(random.randint(*bounds))]

    def turn() -> Turn:
        return Turn(tokens(config.message_tokens), random.randint(*config.answer_tokens))

    systems = [tokens(config.system_tokens) for _ in range(config.num_systems)]
    return [
        Chat(systems[i % config.num_systems], [turn() for _ in range(config.num_turns)])
        for i in range(config.num_chats)
    ]
