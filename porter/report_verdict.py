"""The verdict of a run, computed from what was recorded and from nothing else.

The first row that applies decides. Every row but the last is a reason not to say zero.

| what was recorded                                                        | verdict      | exit  |
|--------------------------------------------------------------------------|--------------|-------|
| an exception ended the run                                               | its outcome  | not 0 |
| an unequal token in the mismatch or in a required check; one that failed | mismatch     | 1     |
| evidence is emulated and no token was compared                           | error        | 6     |
| evidence is rendered, compiled or emulated                               | not_measured | 5     |
| no required check; one that did not run or compared no token             | error        | 6     |
| no mismatch recorded, or over zero tokens                                | error        | 6     |
| an installed binding (adopt, replace, author) that its side never called | error        | 6     |
| no throughput                                                            | not_measured | 5     |
| throughput.ratio is not at or above throughput.target_ratio              | zero_slow    | 7     |
| otherwise                                                                | zero         | 0     |

An outcome that an exception gives is never zero, zero_slow or mismatch. A check that is not required is shown
and decides nothing. A required check that answered no is a mismatch even where it counted no unequal token:
its answer was no, and there is no third state.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from porter.errors import ExitCode

if TYPE_CHECKING:
    from porter.bits import Mismatch
    from porter.report_schema import Binding, Check, Stopped, Throughput


class Verdict(StrEnum):
    """The one word that a run ends with; `exit_code` is what the command exits with."""

    ZERO = "zero"
    MISMATCH = "mismatch"
    USAGE = "usage"
    ESCALATE = "escalate"
    BUDGET = "budget"
    NOT_MEASURED = "not_measured"
    ERROR = "error"
    ZERO_SLOW = "zero_slow"
    INTERRUPTED = "interrupted"

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return int(ExitCode[self.value])


class Evidence(StrEnum):
    """How far the claim was proved, from the weakest level to the strongest."""

    RENDERED = "rendered"
    COMPILED = "compiled"
    EMULATED = "emulated"
    MEASURED = "measured"


class Ruling(NamedTuple):
    """A verdict, the exit code that goes with it, and the sentence that says why."""

    verdict: Verdict
    exit_code: int
    reason: str


def verdict_of(
    *,
    checks: Sequence[Check],
    mismatch: Mismatch | None,
    throughput: Throughput | None,
    evidence: Evidence,
    bindings: Sequence[Binding] = (),
    stopped: Stopped | None = None,
) -> Ruling:
    """Compute the verdict by the table at the top of this file."""
    if stopped is not None:
        return _ruling(Verdict(stopped.outcome), stopped.what)
    red = red_reason(checks, mismatch)
    if red:
        return _ruling(Verdict.MISMATCH, red)
    if evidence != Evidence.MEASURED:
        if evidence == Evidence.EMULATED and not (mismatch and mismatch.tokens):
            return _ruling(Verdict.ERROR, "the emulation compared no token")
        return _ruling(Verdict.NOT_MEASURED, f"the evidence is {evidence}: the device is not here")
    unproved = _unproved_reason(checks, mismatch, bindings)
    if unproved:
        return _ruling(Verdict.ERROR, unproved)
    assert mismatch is not None
    equal = f"all {mismatch.tokens:,} tokens have equal bits"
    if throughput is None:
        return _ruling(Verdict.NOT_MEASURED, f"{equal}; the throughput was not measured")
    speed = f"the rollout runs at {throughput.ratio:.3f} of stock, target {throughput.target_ratio:.2f}"
    if not throughput.ratio >= throughput.target_ratio:
        return _ruling(Verdict.ZERO_SLOW, f"{equal}, but {speed}")
    return _ruling(Verdict.ZERO, f"{equal}; {speed}")


def red_reason(checks: Sequence[Check], mismatch: Mismatch | None) -> str:
    """Say what is red: an unequal token, or a required check that failed. Empty when nothing is."""
    parts = []
    if mismatch is not None and mismatch.unequal:
        parts.append(f"{mismatch.unequal:,} of {mismatch.tokens:,} tokens are unequal")
    failed = [check.name for check in checks if check.required and (check.status == "fail" or check.unequal)]
    if failed:
        parts.append(f"failed: {_names(failed)}")
    return "; ".join(parts)


def speed_refusal(
    *, checks: Sequence[Check], mismatch: Mismatch | None, evidence: Evidence, bindings: Sequence[Binding]
) -> str:
    """Say beside what no speed may stand; empty when a measured speed may be given."""
    red = red_reason(checks, mismatch)
    if red:
        return f"beside a red check: {red}"
    if evidence != Evidence.MEASURED:
        return f"beside evidence that is only {evidence}"
    if mismatch is None or not mismatch.tokens:
        return "beside a comparison of no token"
    idle = _idle(bindings)
    return f"beside a binding that was never called: {idle}" if idle else ""


def _idle(bindings: Sequence[Binding]) -> str:
    return _names([binding.site for binding in bindings if binding.idle_sides])


def _unproved_reason(checks: Sequence[Check], mismatch: Mismatch | None, bindings: Sequence[Binding]) -> str:
    """Say why measured evidence without a red check is no proof yet; empty when it is one."""
    required = [check for check in checks if check.required]
    if not required:
        return "no required check was recorded"
    missing = [check.name for check in required if check.status != "pass"]
    if missing:
        return f"a required check did not run: {_names(missing)}"
    empty = [check.name for check in required if check.tokens <= 0]
    if empty:
        return f"a required check compared no token: {_names(empty)}"
    if mismatch is None or mismatch.tokens <= 0:
        return "no token of the rollout was compared with the learner"
    if mismatch.tokens > sum(check.tokens for check in required):
        return "the mismatch sums up more tokens than its rungs compared"
    idle = _idle(bindings)
    return f"a binding was installed and never called: {idle}" if idle else ""


def _names(names: Sequence[str], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _ruling(verdict: Verdict, reason: str) -> Ruling:
    return Ruling(verdict, verdict.exit_code, reason)
