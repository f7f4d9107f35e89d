"""`python -m porter.learner_server`: the transformers model behind the line protocol of child.py."""

from __future__ import annotations

import importlib
import re
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from porter.child_server import serve


class LearnerServer:
    """Methods a learner child answers."""

    def __init__(self) -> None:
        self.model, self.port, self.log_probability = None, None, None

    def load(
        self, progress, path: str, dtype: str, threads: int, port: str = "", allow_remote_code: bool = False
    ) -> dict[str, Any]:
        """Loads the model; with `port` (an import name on PYTHONPATH) aligns it. Returns versions, threads, and the configuration as read."""
        began = time.perf_counter()
        import torch
        import transformers

        from porter import transformers_adapter

        torch.set_num_threads(threads)
        self.model = transformers_adapter.load(path, dtype, allow_remote_code)
        if port:
            self.port = importlib.import_module(port)
            self.port.align(self.model)
            self.log_probability = self.port.log_probability
        else:
            from porter.kernels.log_probability import log_probability

            self.log_probability = log_probability
        return {
            "seconds": time.perf_counter() - began,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "threads": torch.get_num_threads(),
            "layers": self.model.config.get_text_config().num_hidden_layers,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "config": transformers_adapter.as_read(self.model.config),
        }

    def tree(self, progress) -> list[dict[str, Any]]:
        """The learner's leaves."""
        from porter.transformers_adapter import tree

        return tree(self.model)

    def score(
        self, progress, sequences: list[dict[str, Any]], temperature: float = 1.0, layout: str = "alone"
    ) -> dict[str, Any]:
        """Log-probabilities of each sequence's response tokens; see transformers_adapter.score."""
        began = time.perf_counter()
        from porter.transformers_adapter import score

        values = score(self.model, sequences, temperature, layout, self.log_probability, progress)
        return {"logprobs": values, "seconds": time.perf_counter() - began}

    def step(self, progress, ids: list[list[int]]) -> dict[str, Any]:
        """One REINFORCE-like step without its update: mean negative log-probability of the tokens, and its gradients."""
        import torch

        batch = torch.tensor(ids)
        self.model.requires_grad_(True).zero_grad(set_to_none=True)
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
        began = time.perf_counter()
        logits = self.model(input_ids=batch, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = -self.log_probability(logits, batch[:, 1:].flatten()).mean()
        loss.backward()
        seconds = time.perf_counter() - began
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        kilobytes = int(peak.group(1)) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.model.zero_grad(set_to_none=True)
        return {"seconds": seconds, "peak_bytes": kilobytes * 1024, "loss": float(loss.detach())}

    def float32_time(self, progress) -> list[float]:
        """How many times as long linear layers take in float32 as in the model's dtype; [] where it has none."""
        import torch

        from porter import race

        weights = [m.weight for m in self.model.modules() if isinstance(m, torch.nn.Linear)]
        return race.float32_time(weights) if weights else []

    def switch(self, progress, site: str, on: bool) -> bool:
        """Turns one of the port's learner bindings off and on; False where it has none there."""
        return self.port.switch(self.model, site, on)

    def calls(self, progress) -> dict[str, int]:
        """Calls of each bound site in this process."""
        return self.port.calls() if self.port else {}

    def diagnose(
        self,
        progress,
        trace: str,
        ids: list[int],
        rollout: dict[str, Any],
        probe: dict[str, dict[str, int]],
        skip: dict[str, list[dict]] | None = None,
    ) -> dict[str, Any]:
        """Replays a recorded rollout, finds every culprit in one pass, climbs the ladder of each class of sites."""
        from porter import meaning
        from porter import trace as traces
        from porter.ladder import Climb
        from porter.replay import Replay

        began = time.perf_counter()
        replay = Replay(self.model, ids, traces.read(trace), rollout)
        try:
            comparisons = replay.run()
        except (
            ValueError,
            RuntimeError,
            IndexError,
            TypeError,
            KeyError,
            AttributeError,
        ) as error:  # the two sides are built otherwise
            comparisons = replay.comparisons
            replay.unplaced.append(f"replay: {' '.join(str(error).split())[:200]}")
        replayed = time.perf_counter() - began
        bindings = Climb(comparisons, rollout, probe, self.model).run(skip)
        return {
            "bindings": bindings,
            "unplaced": replay.unplaced,
            "semantic": meaning.differences(comparisons, rollout, self.model, self.model.config.to_dict()),
            "sites": [
                {
                    "site": c.site,
                    "layer": c.layer,
                    "op": c.operation,
                    "part": c.part,
                    "unequal": c.unequal,
                    "elements": c.elements,
                }
                for c in comparisons
            ],
            "seconds": {"replay": replayed, "ladder": time.perf_counter() - began - replayed},
        }


def main() -> None:
    """Entry point of the child."""
    server = LearnerServer()
    methods = ("load", "tree", "score", "step", "float32_time", "switch", "calls", "diagnose")
    serve({name: getattr(server, name) for name in methods})


if __name__ == "__main__":
    main()
