"""Log-probability of given tokens: float32 log-softmax over the rounded logits divided by the temperature.

Shape legend: T positions, V vocabulary; logits [T, V], tokens [T] -> [T] float32.
"""

from __future__ import annotations

import torch


def log_probability(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """The engine's `processed_logprobs`: temperature acts on the logits, in float32, before the softmax.

    A division by a tensor, not by a number: torch may turn the latter into a product with the reciprocal.
    """
    scaled = logits.float() / torch.full((logits.shape[0], 1), temperature, dtype=torch.float32)
    return scaled.log_softmax(-1, dtype=torch.float32).gather(-1, tokens[:, None]).squeeze(-1)
