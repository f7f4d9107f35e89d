"""What can end a command, and the exit code each ending has.

Every fault a user can meet is a `PorterError`: one line that says what is wrong, one that says what to do.
A traceback on bad input is a defect of zm-port.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """How a command ended."""

    zero = 0
    mismatch = 1
    usage = 2
    escalate = 3
    budget = 4
    not_measured = 5
    error = 6
    zero_slow = 7
    interrupted = 130


class PorterError(Exception):
    """Base of every fault with a known cause.

    Args:
        what: what is wrong, with the file, field or value; put on one line.
        hint: what to do about it; may be empty.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.error

    def __init__(self, what: str, hint: str = "") -> None:
        self.what = " ".join(what.split())
        self.hint = " ".join(hint.split())
        super().__init__(self.what, self.hint)

    def __str__(self) -> str:
        return self.what


class MismatchFault(PorterError):
    """Both sides were measured and at least one token is unequal."""

    exit_code = ExitCode.mismatch


class UsageFault(PorterError):
    """Arguments, a checkpoint or a configuration that cannot be used."""

    exit_code = ExitCode.usage


class Escalation(PorterError):
    """An operation needs an author, or a person has to decide."""

    exit_code = ExitCode.escalate


class BudgetSpent(PorterError):
    """Iterations, time, tokens or money ran out."""

    exit_code = ExitCode.budget


class NotMeasured(PorterError):
    """Everything provable here was proved; the device is not here."""

    exit_code = ExitCode.not_measured


class EngineFault(PorterError):
    """The environment, an engine or zm-port itself failed."""

    exit_code = ExitCode.error
