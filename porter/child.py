"""Child processes: the engine and the learner each live in one, and a crash of theirs is a result, not our end.

Protocol: one JSON object a line. Request {"id", "method", "arguments"}; answers {"id", "progress": [done, total]}
any number of times, then {"id", "result"} or {"id", "error": {"type", "text"}}.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from porter.errors import EngineFault


class ChildError(EngineFault):
    """The child answered with an error: `kind` is the exception's class name there."""

    def __init__(self, what: str, hint: str, kind: str = ""):
        super().__init__(what, hint)
        self.kind = kind


class Pending:
    """An answer that is still on its way."""

    def __init__(self, child: Child, number: int, method: str, timeout: float):
        self.child, self.number, self.method, self.timeout = child, number, method, timeout
        self.asked = time.monotonic()

    def wait(self, on_progress: Callable[[float, float | None], None] | None = None) -> Any:
        """The result. Raises ChildError when the child answered with an error, died, or was silent past the limit."""
        return self.child._wait(self, on_progress)

    def ready(self) -> bool:
        """True when wait() would return at once."""
        self.child._drain()
        return self.number in self.child._answers or not self.child.alive()


class Child:
    """One child process in a process group of its own, killed whole when it must go."""

    def __init__(self, name: str, module: str, log: Path, environment: dict[str, str | None] | None = None):
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
        self._log = log.open("ab")
        self._log_start = self._log.tell()
        self._heard = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={k: v for k, v in environment.items() if v is not None},
            start_new_session=True,
        )
        self._numbers, self._lines, self._answers, self._latest = 0, queue.Queue(), {}, {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def alive(self) -> bool:
        """False once the process has ended."""
        return self.process.poll() is None

    def request(self, method: str, timeout: float = 600, **arguments: Any) -> Pending:
        """Sends a request; `timeout` is how many seconds the child may be silent."""
        self._numbers += 1
        try:
            self.process.stdin.write(
                (json.dumps({"id": self._numbers, "method": method, "arguments": arguments}) + "\n").encode()
            )
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._died(method) from None
        return Pending(self, self._numbers, method, timeout)

    def ask(self, method: str, timeout: float = 600, on_progress=None, **arguments: Any) -> Any:
        """request() and wait()."""
        return self.request(method, timeout, **arguments).wait(on_progress)

    def _drain(self, wait: float = 0) -> None:
        try:
            while True:
                line = self._lines.get(timeout=wait) if wait else self._lines.get_nowait()
                wait = 0
                if line is None:
                    return
                try:
                    message = json.loads(line)
                except ValueError:
                    continue  # a library that wrote to our pipe before it was redirected
                if not isinstance(message, dict) or message.get("id") not in range(1, self._numbers + 1):
                    continue
                self._heard = time.monotonic()
                if "progress" in message:
                    self._latest[message["id"]] = message["progress"]
                elif "result" in message or "error" in message:
                    self._answers[message["id"]] = message
        except queue.Empty:
            return

    def _wait(self, pending: Pending, on_progress) -> Any:
        while pending.number not in self._answers:
            self._drain(0.1)
            if pending.number in self._latest:
                done = self._latest.pop(pending.number)
                if on_progress:
                    on_progress(*done)
            if pending.number in self._answers:
                break
            if not self.alive():
                self._drain(0.5)
                if pending.number not in self._answers:
                    raise self._died(pending.method)
            if time.monotonic() - max(self._heard, pending.asked) > pending.timeout:
                self.stop()
                raise ChildError(
                    f"{self.name}: silent for {pending.timeout:.0f} s in '{pending.method}', it was stopped",
                    f"see {self.log}",
                )
        answer = self._answers.pop(pending.number)
        if "error" in answer:
            error = answer["error"]
            kind, text = self._root_cause() or (error["type"], error["text"])
            raise ChildError(f"{self.name}: {kind}: {text}", f"see {self.log}", kind)
        return answer["result"]

    def _root_cause(self) -> tuple[str, str] | None:
        """The first exception that a process of the child's own logged: an engine's main process only says that one failed."""
        raised = re.compile(r"\b(?:Worker|EngineCore)[^)]*\).*?\b([A-Z]\w*(?:Error|Exception|Compiler)): (.+)")
        for line in self._log_tail():
            found = raised.search(line)
            if found and "cancelled" not in found.group(2) and "initialization failed" not in found.group(2):
                return found.group(1), " ".join(found.group(2).split())[:300]
        return None

    def _log_tail(self) -> list[str]:
        try:
            return self.log.read_bytes()[self._log_start :].decode(errors="replace").splitlines()[-400:]
        except OSError:
            return []

    def _died(self, method: str) -> ChildError:
        code = self.process.wait()
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        cause = self._root_cause()
        return ChildError(
            f"{self.name}: {ended} during '{method}'{': ' + ': '.join(cause) if cause else ''}",
            f"see {self.log}",
        )

    def stop(self) -> None:
        """Ends the child and everything it started."""
        try:
            self.process.stdin.close()
            self.process.wait(timeout=0.2)
        except (subprocess.TimeoutExpired, OSError):
            pass
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except (ProcessLookupError, PermissionError):
                break
            try:
                self.process.wait(timeout=3)
            except subprocess.TimeoutExpired:
                continue
        self._log.close()
