"""Operands that do not fit: a kernel must refuse them. It reads raw memory, so what it accepts may be anything.

Each case runs in a process forked for it alone, because the wrong answer may be a segmentation fault.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, signal
import torch
from porter.kernels import attention, linear, rms_norm, rotary

def t(*shape, dtype=torch.bfloat16):
    return torch.ones(*shape, dtype=torch.float32).to(dtype)

half, wide = torch.float16, torch.float32
ints = lambda *n: torch.tensor(n, dtype=torch.int32)
attend = lambda q, k, v, a=ints(0, 8), b=ints(0, 8): attention.packed(q, k, v, a, b, 0.2, 0, 0.0, None, None, "t")
turn = lambda positions, table=t(20, 32): rotary.rotary(positions, t(9, 64), t(9, 32), table, 32, True, "once", "t")
packed = lambda: linear.pack(t(8, 16))  # in the forked process: threads do not survive a fork

CASES = {
    "linear: x wider than w": lambda: linear.linear(t(2, 32), t(8, 16)),
    "linear: x narrower than w": lambda: linear.linear(t(2, 16), t(8, 32)),
    "linear: w of another dtype": lambda: linear.linear(t(2, 16), t(8, 16, dtype=wide)),
    "linear: x of another dtype": lambda: linear.linear(t(2, 16, dtype=half), t(8, 16)),
    "linear: bias too short": lambda: linear.linear(t(2, 16), t(8, 16), t(7)),
    "linear: bias of another dtype": lambda: linear.linear(t(2, 16), t(8, 16), t(8, dtype=wide)),
    "linear: packed of fewer columns": lambda: linear.linear(t(2, 16), None, packed=packed(), n=800),
    "linear: packed of another width": lambda: linear.linear(t(2, 1600), None, packed=packed(), n=8),
    "linear: packed for another dtype": lambda: linear.linear(t(2, 16, dtype=wide), None, packed=packed(), n=8),
    "attention: keys of another dtype": lambda: attend(t(8, 4, 32), t(8, 2, 32, dtype=wide), t(8, 2, 32, dtype=wide)),
    "attention: values of another dtype": lambda: attend(t(8, 4, 32), t(8, 2, 32), t(8, 2, 32, dtype=wide)),
    "attention: fewer values than keys": lambda: attend(t(8, 4, 32), t(8, 2, 32), t(4, 2, 32)),
    "attention: keys of another size": lambda: attend(t(8, 4, 64), t(8, 2, 32), t(8, 2, 32)),
    "attention: starts beyond the queries": lambda: attend(t(8, 4, 32), t(8, 2, 32), t(8, 2, 32), ints(0, 8000)),
    "attention: starts beyond the keys": lambda: attend(t(8, 4, 32), t(8, 2, 32), t(8, 2, 32), ints(0, 8), ints(0, 9000)),
    "attention: more queries than keys": lambda: attend(t(8, 4, 32), t(4, 2, 32), t(4, 2, 32), ints(0, 8), ints(0, 4)),
    "attention: query heads over key heads": lambda: attend(t(8, 4, 32), t(8, 3, 32), t(8, 3, 32)),
    "attention: head size": lambda: attend(t(8, 4, 24), t(8, 2, 24), t(8, 2, 24)),
    "rotary: int32 positions": lambda: turn(torch.arange(9, dtype=torch.int32)),
    "rotary: positions beyond the table": lambda: turn(torch.full((9,), 1 << 40)),
    "rotary: fewer positions than tokens": lambda: turn(torch.arange(3)),
    "norm: weight too short": lambda: rms_norm.add_rms_norm(t(4, 64), None, t(8), 1e-5, "before_weight", "t"),
    "norm: unknown rounding": lambda: rms_norm.add_rms_norm(t(4, 64), None, t(64), 1e-5, "sometimes", "t"),
}

ended = {}
for name, case in CASES.items():
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            case()
            os._exit(1)
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError):
            os._exit(0)
    status = os.waitpid(pid, 0)[1]
    ended[name] = os.waitstatus_to_exitcode(status)
print(json.dumps(ended))
"""
NAMES = [line.split('"')[1] for line in PROGRAM.splitlines() if line.startswith('    "')]


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, int]:
    """How each case ended: 0 refused, 1 accepted, negative the signal that killed it."""
    program = tmp_path_factory.mktemp("operands") / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_an_operand_that_does_not_fit_is_refused(ended, name):
    assert ended[name] == 0, {1: "it was accepted"}.get(ended[name], f"killed by signal {-ended[name]}")
