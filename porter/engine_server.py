"""`python -m porter.engine_server`: one vLLM engine behind the line protocol of child.py."""

from __future__ import annotations

import time
from typing import Any

from porter.child_server import serve


class EngineServer:
    """Methods an engine child answers. Tokens and log-probabilities travel as JSON: float32 survives it exactly."""

    def __init__(self) -> None:
        self.engine = None

    def start(self, progress, path: str, **settings: Any) -> dict[str, Any]:
        """Starts the engine; settings go to vllm.LLM. Returns seconds and what the worker says of itself."""
        began = time.perf_counter()
        from porter.vllm_adapter import Engine

        self.engine = Engine(path, **settings)
        return {"seconds": time.perf_counter() - began, "environment": self.engine.call("zm_environment")}

    def call(self, progress, rpc: str, arguments: list[Any] | None = None) -> Any:
        """A named method inside the worker."""
        return self.engine.call(rpc, *(arguments or []))

    def generate(self, progress, **arguments: Any) -> dict[str, Any]:
        """Samples; returns the outputs and the seconds from the first request added to the last token out."""
        began = time.perf_counter()
        outputs = self.engine.generate(**arguments, progress=progress)
        return {"outputs": outputs, "seconds": time.perf_counter() - began}

    def forget_prefixes(self, progress) -> None:
        """Empties the prefix cache."""
        self.engine.forget_prefixes()


def main() -> None:
    """Entry point of the child."""
    server = EngineServer()
    serve({name: getattr(server, name) for name in ("start", "call", "generate", "forget_prefixes")})


if __name__ == "__main__":
    main()
