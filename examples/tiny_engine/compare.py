"""Compares what the modes generated: tokens for equality, logits by their largest difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from examples.tiny_engine.engine import RunResult


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a run compares with a reference.

    Attributes:
        same_answers: every rank generated the reference's tokens.
        same_state: all ranks had the same cache, pages and rows after every step.
        logit_difference: largest difference of any logit on any rank; NaN if answers differ in
            length.
    """

    same_answers: bool
    same_state: bool
    logit_difference: float

    @property
    def holds(self) -> bool:
        """Whether the run did what the reference did."""
        return self.same_answers and self.same_state


def compare(results: Sequence[RunResult], reference: RunResult) -> Agreement:
    """Compare all ranks of a run with a reference."""
    return Agreement(
        all(result.answers == reference.answers for result in results),
        all(result.digests == results[0].digests for result in results),
        max(_logit_difference(result, reference) for result in results),
    )


def smallest_margin(result: RunResult) -> float:
    """Return the smallest gap between the chosen token's logit and the next best."""
    best = torch.cat(list(result.logits.values())).topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def _logit_difference(result: RunResult, reference: RunResult) -> float:
    shapes = {turn: logits.shape for turn, logits in result.logits.items()}
    if shapes != {turn: logits.shape for turn, logits in reference.logits.items()}:
        return float("nan")
    return max(
        float((logits - reference.logits[turn]).abs().max())
        for turn, logits in result.logits.items()
    )
