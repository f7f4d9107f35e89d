"""Prompts for the checks and the benchmark: short plain text where the checkpoint has a tokenizer, else drawn ids."""

from __future__ import annotations

import random
from pathlib import Path

TOPICS = (
    "the sea", "a bicycle", "winter", "the moon", "bread", "a library", "the city at night", "a river", "music", "tea",
    "the desert", "a garden", "trains", "a lost dog", "the first day of school", "stars", "mountains", "rain",
)  # fmt: skip
OPENINGS = (
    "Write one sentence about",
    "Explain to a child",
    "A short poem about",
    "Three facts about",
    "My grandmother told me about",
)


def _texts(count: int, draw: random.Random):
    for i in range(count):
        if i % 2:
            yield f"{draw.choice(OPENINGS)} {draw.choice(TOPICS)}:"
        else:
            yield f"What is {draw.randint(2, 99)} + {draw.randint(2, 99)}? The answer is"


class Prompts:
    """Draws prompts as token ids, always the same for one seed."""

    def __init__(self, checkpoint: Path, vocabulary: int, seed: int):
        self.draw = random.Random(seed)
        self.vocabulary = vocabulary
        file = checkpoint / "tokenizer.json"
        self.tokenizer = None
        if file.is_file():
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(str(file))

    def short(self, count: int) -> list[list[int]]:
        """`count` prompts of a few tokens each."""
        if self.tokenizer is None:
            return [self._drawn(self.draw.randint(4, 12)) for _ in range(count)]
        found = [self.tokenizer.encode(t, add_special_tokens=False).ids for t in _texts(count, self.draw)]
        return [[i for i in ids if i < self.vocabulary] or self._drawn(4) for ids in found]

    def long(self, count: int, length: int) -> list[list[int]]:
        """`count` prompts of exactly `length` tokens."""
        found = []
        for _ in range(count):
            ids: list[int] = []
            while len(ids) < length:
                ids += self.short(1)[0]
            found.append(ids[:length])
        return found

    def _drawn(self, length: int) -> list[int]:
        return [self.draw.randrange(3, self.vocabulary) for _ in range(length)]
