"""One report with everything in it, and a table of changes to it with the verdict that each must give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from porter import errors
from porter.report import (
    Binding,
    Check,
    Culprit,
    Evidence,
    FigureData,
    Finding,
    HardwareFacts,
    Iteration,
    LearnerSpeed,
    Mismatch,
    ModelFacts,
    PositionSeries,
    Report,
    Stage,
    Stopped,
    Throughput,
    Verdict,
    Workload,
)


def pairs(unequal: int = 0, tokens: int = 3456) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rollout = -np.random.default_rng(0).exponential(1.0, tokens).astype(np.float32) - np.float32(0.01)
    learner = rollout.copy()
    learner[:unequal] *= np.float32(1.01)
    return np.arange(tokens) % 96, rollout, learner


def mismatch(unequal: int = 0, tokens: int = 3456) -> Mismatch:
    return Mismatch.from_pairs(*pairs(unequal, tokens)[1:])


def throughput(ratio: float = 0.97, target: float = 0.9) -> Throughput:
    works = [
        Workload.from_pairs(name, [80.0 * ratio * f * w for w in (0.99, 1, 1.01, 1, 0.995, 1.004)], [80.0] * 6)
        for name, f in (
            ("32 prompts x 24 tokens", 1.02),
            ("one stream x 32", 1.0),
            ("8 prompts of 512", 1.01),
        )
    ]
    return Throughput.of(works, target_ratio=target, baseline_configuration={"split_kv": True, "threads": 1})


GREEN = (
    Check.counted("batch 44", 3000, 0, seconds=3.5),
    Check.counted("padded left", 456, 0, detail="learner alone"),
    Check(name="stock repeatable", status="fail", tokens=10, unequal=4, required=False),
)
BINDING = Binding(
    site="layers.*.mlp.down_proj",
    op="linear",
    choice="replace",
    side="both",
    seam="oot linear",
    kernel="kernels/linear.cpp",
    digest="8d" * 32,
    calls_rollout=1200,
    calls_learner=90,
    needed="dropped: 812 of 3,456 tokens unequal",
)


def facts(**changes: Any) -> dict[str, Any]:
    """The fields of the sample report, with these changes."""
    before, after = pairs(3400), pairs(0)
    made = {
        "model": ModelFacts(
            name="smollm2-135m",
            architecture="LlamaForCausalLM",
            source="hub: example/smollm2",
            revision="12fd25f7",
            weights="real",
            reference="transformers",
            layers=30,
            parameters=134_515_008,
        ),
        "hw": HardwareFacts(
            target="cpu",
            device="a CPU",
            isa="avx512_bf16",
            threads=1,
            cpus="engine 0, learner 1",
            memory_bytes=16 << 30,
        ),
        "versions": {"torch": "2.13.0", "vllm": "0.32.0"},
        "evidence": Evidence.MEASURED,
        "seconds": 412.4,
        "baseline": mismatch(3400),
        "mismatch": mismatch(),
        "throughput": throughput(),
        "learner": LearnerSpeed.from_pairs(512, [1.0, 1.1, 1.2], [1.0, 1.0, 1.0], 11, 10),
        "iterations": (
            Iteration(
                index=0,
                tokens=3456,
                unequal=3400,
                culprits=(
                    Culprit(
                        site="layers.*.mlp.down_proj",
                        op="linear",
                        why="one row is computed by another kernel",
                        unequal=812,
                        tokens=3456,
                    ),
                ),
                change="replace linear",
            ),
            Iteration(index=1, tokens=3456, unequal=12, change="pin attention"),
            Iteration(index=2, tokens=3456, unequal=0),
        ),
        "bindings": (
            BINDING,
            Binding(
                site="layers.*.input_layernorm",
                op="rms_norm",
                choice="keep",
                side="none",
                seam="",
                kernel="",
                digest="",
                needed="both stock kernels agree",
            ),
        ),
        "checks": GREEN,
        "findings": (
            Finding(
                kind="numeric",
                site="layers.*.mlp",
                layer=3,
                rollout_does="rounds once",
                learner_does="rounds twice",
                decided_by="modelling code",
                reference="transformers 5.19",
            ),
        ),
        "stages": (Stage(name="inspect", seconds=1.5), Stage(name="check", seconds=88.0)),
        "limits": ("one tensor-parallel rank",),
        "figures": FigureData(before=PositionSeries.from_pairs(*before), after=PositionSeries.from_pairs(*after)),
    }
    return made | changes


NO_SPEED = {"throughput": None, "learner": None}
CASES = {
    "zero": ({}, Verdict.ZERO, 0),
    "slow": ({"throughput": throughput(0.8)}, Verdict.ZERO_SLOW, 7),
    "unequal": (NO_SPEED | {"mismatch": mismatch(1)}, Verdict.MISMATCH, 1),
    "red check": (NO_SPEED | {"checks": (*GREEN, Check.counted("batch 1", 9, 2))}, Verdict.MISMATCH, 1),
    "compared nothing": (NO_SPEED | {"checks": (*GREEN, Check.counted("packed", 0, 0))}, Verdict.MISMATCH, 1),
    "not run": (
        NO_SPEED | {"checks": (*GREEN, Check(name="packed", status="not_run", detail="no memory"))},
        Verdict.ERROR,
        6,
    ),
    "not run beside unequal": (
        NO_SPEED | {"mismatch": mismatch(2), "checks": (Check(name="packed", status="not_run", detail="no memory"),)},
        Verdict.MISMATCH,
        1,
    ),
    "no check": (NO_SPEED | {"checks": ()}, Verdict.ERROR, 6),
    "only an optional check": (NO_SPEED | {"checks": GREEN[2:]}, Verdict.ERROR, 6),
    "no mismatch": (NO_SPEED | {"mismatch": None}, Verdict.ERROR, 6),
    "idle binding": (
        NO_SPEED | {"bindings": (BINDING.model_copy(update={"calls_rollout": 0}),)},
        Verdict.ERROR,
        6,
    ),
    "no throughput": (NO_SPEED, Verdict.NOT_MEASURED, 5),
    "emulated": (NO_SPEED | {"evidence": Evidence.EMULATED}, Verdict.NOT_MEASURED, 5),
    "emulated nothing": (NO_SPEED | {"evidence": Evidence.EMULATED, "mismatch": None}, Verdict.ERROR, 6),
    "emulated unequal": (
        NO_SPEED | {"evidence": Evidence.EMULATED, "mismatch": mismatch(3)},
        Verdict.MISMATCH,
        1,
    ),
    "compiled": (
        NO_SPEED | {"evidence": Evidence.COMPILED, "mismatch": None, "baseline": None, "checks": ()},
        Verdict.NOT_MEASURED,
        5,
    ),
}
STOPS = {
    errors.UsageFault("no such model", "smollm2-135m is known"): (Verdict.USAGE, 2),
    errors.Escalation("an operation has no kernel"): (Verdict.ESCALATE, 3),
    errors.BudgetSpent("12 iterations"): (Verdict.BUDGET, 4),
    errors.NotMeasured("no h200 here"): (Verdict.NOT_MEASURED, 5),
    errors.EngineFault("the engine died", "see log.txt"): (Verdict.ERROR, 6),
    RuntimeError("first\nsecond"): (Verdict.ERROR, 6),
    KeyboardInterrupt(): (Verdict.INTERRUPTED, 130),
}
for fault, (word, code) in STOPS.items():
    CASES[f"stopped by {type(fault).__name__}"] = ({"stopped": Stopped.of(fault)}, word, code)
EMPTY = {"baseline": None, "iterations": (), "bindings": (), "findings": (), "stages": (), "limits": ()}
CASES["stopped at once"] = (
    NO_SPEED
    | EMPTY
    | {"mismatch": None, "checks": (), "versions": {}, "figures": FigureData()}
    | {"stopped": Stopped.of(errors.EngineFault("it died"))},
    Verdict.ERROR,
    6,
)


class Case(NamedTuple):
    """Changes to the sample, and the verdict and exit code that they must give."""

    changes: dict[str, Any]
    verdict: Verdict
    exit_code: int

    @property
    def report(self) -> Report:
        return Report(**facts(**self.changes))


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Each case of the table in turn."""
    return Case(*CASES[request.param])


@pytest.fixture
def sample() -> SimpleNamespace:
    """The builders, for tests that make their own change."""
    return SimpleNamespace(
        binding=BINDING,
        case=lambda name: Case(*CASES[name]),
        facts=facts,
        green=GREEN,
        mismatch=mismatch,
        no_speed=NO_SPEED,
        report=lambda **changes: Report(**facts(**changes)),
        throughput=throughput,
    )
