"""The types of report.json: what one run did, measured and concluded.

All types are frozen and refuse unknown fields; sequences are tuples, so that a recorded fact cannot be
exchanged afterwards. No number may be NaN or infinite, because JSON has neither: a value that is not finite
is null beside a sentence. `Report.verdict` is computed (report_verdict.py); a report that states another one
is refused.

Units: seconds (`seconds`), bytes (`memory_bytes`).
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from porter.bits import Mismatch, PositionSeries
from porter.errors import PorterError
from porter.record import Record
from porter.report_speed import LearnerSpeed, Throughput
from porter.report_verdict import Evidence, Ruling, Verdict, speed_refusal, verdict_of

Side = Literal["rollout", "learner", "both", "none"]
Choice = Literal["keep", "adopt", "pin", "replace", "author"]


class ModelFacts(Record):
    """Which model was ported, and where its weights and its reference come from."""

    name: str
    architecture: str
    source: str
    revision: str | None = None
    weights: Literal["real", "random"]
    reference: Literal["transformers", "own"]
    layers: int = Field(ge=0)
    parameters: int = Field(ge=0)


class HardwareFacts(Record):
    """The target and the machine; `cpus` is the thread binding, for example "engine 0, learner 1"."""

    target: str
    device: str
    isa: str
    threads: int = Field(ge=0)
    cpus: str
    memory_bytes: int = Field(ge=0)


class Check(Record):
    """One comparison with a yes/no answer. `tokens` is what it compared; a pass without any is refused."""

    name: str = Field(min_length=1)
    status: Literal["pass", "fail", "not_run"]
    tokens: int = Field(default=0, ge=0)
    unequal: int = Field(default=0, ge=0)
    detail: str = ""
    required: bool = True
    seconds: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.status == "pass" and self.unequal:
            raise ValueError(f"check {self.name}: a pass with {self.unequal} unequal tokens")
        if self.status == "pass" and self.required and not self.tokens:
            raise ValueError(f"check {self.name}: a required check that compared nothing is no pass")
        if self.status == "not_run" and (self.tokens or self.unequal):
            raise ValueError(f"check {self.name}: not run, yet it counted tokens")
        if self.status != "pass" and not self.unequal and not self.detail:
            raise ValueError(f"check {self.name}: {self.status} needs a reason in detail")
        return self

    @classmethod
    def counted(
        cls,
        name: str,
        tokens: int,
        unequal: int,
        *,
        detail: str = "",
        required: bool = True,
        seconds: float = 0.0,
    ) -> Self:
        """The check that these counts make: a pass when something was compared and nothing was unequal."""
        passed = tokens > 0 and unequal == 0
        if not tokens:
            detail = "; ".join(filter(None, [detail, "no token was compared"]))
        return cls(
            name=name,
            status="pass" if passed else "fail",
            tokens=tokens,
            unequal=unequal,
            detail=detail,
            required=required,
            seconds=seconds,
        )


class Culprit(Record):
    """A site whose inputs were bit-equal on both sides and whose outputs were not."""

    site: str
    op: str
    layer: int | None = None
    why: str
    unequal: int = Field(default=0, ge=0)
    tokens: int = Field(default=0, ge=0)


class Iteration(Record):
    """One turn of the loop: what was unequal, which sites caused it, and the change that followed."""

    index: int = Field(ge=0)
    tokens: int = Field(ge=0)
    unequal: int = Field(ge=0)
    culprits: tuple[Culprit, ...] = ()
    change: str = ""


class Binding(Record):
    """How one site is computed. `needed`: the proof that dropping it breaks equality, or why it was kept."""

    site: str
    op: str
    choice: Choice
    side: Side
    seam: str
    kernel: str
    digest: str
    calls_rollout: int = Field(default=0, ge=0)
    calls_learner: int = Field(default=0, ge=0)
    needed: str = ""

    @model_validator(mode="after")
    def _installed_somewhere(self) -> Self:
        if self.choice != "keep" and self.side == "none":
            raise ValueError(f"binding {self.site}: {self.choice} is installed on a side, not on none")
        return self

    @property
    def idle_sides(self) -> tuple[str, ...]:
        """The sides that should have called the kernel and did not; a keep or a pin calls none."""
        if self.choice in ("keep", "pin"):
            return ()
        calls = {"rollout": self.calls_rollout, "learner": self.calls_learner}
        return tuple(side for side, count in calls.items() if self.side in (side, "both") and not count)


class Finding(Record):
    """Something the two sides do differently, and which of them follows the model's reference."""

    kind: Literal["numeric", "semantic", "state", "config"]
    site: str
    layer: int | None = None
    rollout_does: str
    learner_does: str
    decided_by: str
    reference: str


class Stage(Record):
    """One stage of the flow and how long it took."""

    name: str
    seconds: float = Field(ge=0)


class FigureData(Record):
    """The small arrays behind the pictures that no other field holds."""

    before: PositionSeries | None = None
    after: PositionSeries | None = None


class Stopped(Record):
    """The exception that ended a run before its verdict could be computed from checks."""

    outcome: Literal["usage", "escalate", "budget", "not_measured", "error", "interrupted"]
    what: str = Field(min_length=1)
    hint: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """What this exception means for the verdict; one that zm-port does not know is an error."""
        if isinstance(error, KeyboardInterrupt):
            return cls(outcome="interrupted", what="interrupted", hint="--resume goes on from here")
        if isinstance(error, PorterError):
            return cls(outcome=error.exit_code.name, what=error.what or type(error).__name__, hint=error.hint)
        first_line = (str(error).strip() or "no message").splitlines()[0]
        return cls(outcome="error", what=f"{type(error).__name__}: {first_line}", hint="log.txt has the traceback")


def _computed_verdict(fields: dict[str, Any]) -> Verdict:
    names = ("checks", "mismatch", "throughput", "evidence", "bindings", "stopped")
    return verdict_of(**{name: fields[name] for name in names}).verdict


class Report(Record):
    """Everything that one run concluded; report.json holds exactly this.

    Leave `verdict` out: it is computed. Throughput and learner speed are refused beside anything red or
    unproved; `concluded` leaves them out instead.
    """

    schema_version: Literal[1] = 1
    model: ModelFacts
    hw: HardwareFacts
    versions: dict[str, str]
    evidence: Evidence
    seconds: float = Field(ge=0)
    stopped: Stopped | None = None
    baseline: Mismatch | None = None
    mismatch: Mismatch | None = None
    throughput: Throughput | None = None
    learner: LearnerSpeed | None = None
    iterations: tuple[Iteration, ...] = ()
    bindings: tuple[Binding, ...] = ()
    checks: tuple[Check, ...] = ()
    findings: tuple[Finding, ...] = ()
    stages: tuple[Stage, ...] = ()
    limits: tuple[str, ...] = ()
    figures: FigureData = FigureData()
    verdict: Verdict = Field(default_factory=_computed_verdict)

    @classmethod
    def concluded(cls, **fields: Any) -> Self:
        """The report of these fields, without the speeds where none may be given.

        A check that fails after the benchmark makes its numbers void; the report then says why in words.
        """
        report = cls(**fields | {"throughput": None, "learner": None})
        return report if report.speed_refusal else cls(**fields)

    @property
    def speed_refusal(self) -> str:
        """Beside what no speed may stand in this report; empty when one may."""
        return speed_refusal(checks=self.checks, mismatch=self.mismatch, evidence=self.evidence, bindings=self.bindings)

    @model_validator(mode="after")
    def _no_number_beside_red(self) -> Self:
        for name in ("throughput", "learner"):
            if getattr(self, name) is not None and self.speed_refusal:
                raise ValueError(f"{name} {self.speed_refusal}")
        return self

    @model_validator(mode="after")
    def _verdict_is_computed(self) -> Self:
        if self.verdict != self.ruling.verdict:
            raise ValueError(f"verdict {self.verdict} is not what the record gives: {self.ruling.verdict}")
        return self

    @property
    def ruling(self) -> Ruling:
        """The verdict, its exit code and the reason, computed now from the record."""
        return verdict_of(
            checks=self.checks,
            mismatch=self.mismatch,
            throughput=self.throughput,
            evidence=self.evidence,
            bindings=self.bindings,
            stopped=self.stopped,
        )
