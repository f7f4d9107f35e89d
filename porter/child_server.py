"""The child's end of the line protocol of child.py: one JSON request a line in, progress and one answer out.

Standard output carries the protocol alone: whatever libraries print goes to the log (standard error).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


def serve(methods: dict[str, Callable[..., Any]]) -> None:
    """Answers requests until standard input ends. An exception becomes an error answer, not the end of the child."""
    cpus = [int(c) for c in os.environ.get("ZM_PORT_CPUS", "").split(",") if c]
    if cpus:
        os.sched_setaffinity(0, cpus)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    for line in sys.stdin:
        request = json.loads(line)
        number = request["id"]

        def progress(done: float, total: float | None = None, number: int = number) -> None:
            send({"id": number, "progress": [done, total]})

        try:
            send(
                {
                    "id": number,
                    "result": methods[request["method"]](progress=progress, **request["arguments"]),
                }
            )
        except Exception as error:
            traceback.print_exc()
            cause = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            text = " ".join(str(cause).split()) or type(cause).__name__
            send({"id": number, "error": {"type": type(cause).__name__, "text": text[:500]}})
