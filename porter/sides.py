"""Starts the two sides as child processes: same environment, same explicit thread binding, one difference at a time.

The baseline loads no plugin at all; the port under test is on PYTHONPATH for its engine and its learner alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from porter.child import Child, Pending
from porter.errors import UsageFault
from porter.hardware import usable_cpus

KV_BYTES = 1 << 28
MAX_LENGTH = 1024
BATCHED_TOKENS = 512
SEQUENCES = 64
NOT_TAKEN_OVER = (
    "VLLM_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "TORCHDYNAMO_",
    "ATEN_",
    "ONEDNN_",
    "DNNL_",
    "OMP_",
    "KMP_",
    "MKL_",
    "GOMP_",
)


@dataclass(frozen=True)
class Threads:
    """Which CPUs the engine's worker and the learner are bound to, `count` each."""

    count: int
    engine: tuple[int, ...]
    learner: tuple[int, ...]

    @classmethod
    def on_this_machine(cls, count: int) -> Threads:
        """The engine on the first CPUs, the learner on the next, or on the same where there are no more."""
        cpus = usable_cpus()
        if count > len(cpus):
            raise UsageFault(f"--threads {count}: this machine has {len(cpus)} CPUs to use")
        engine = tuple(cpus[:count])
        return cls(count, engine, tuple(cpus[count : 2 * count]) or engine)

    def text(self) -> str:
        """The binding in words."""
        return f"engine {','.join(map(str, self.engine))}; learner {','.join(map(str, self.learner))}"


FASTEST = "fastest-stock"


def _has(rollout: Rollout, settings: dict[str, Any]) -> bool:
    return settings.items() <= rollout.settings.items()


def environment(threads: Threads, cpus: tuple[int, ...], **more: str) -> dict[str, str | None]:
    """What a child gets: the user's settings of the engine and of math libraries do not reach it.

    One of them could change the bits, or hold the stock engine back and so flatter the port.
    """
    cleared = {name: None for name in os.environ if name.startswith(NOT_TAKEN_OVER)}
    return cleared | {
        "OMP_NUM_THREADS": str(threads.count),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "ZM_PORT_CPUS": ",".join(map(str, cpus)),
    } | more  # fmt: skip


@dataclass
class Rollout:
    """A vLLM engine child; `settings` are what it was started with."""

    child: Child
    settings: dict[str, Any]
    started: Pending
    environment: dict[str, Any] = field(default_factory=dict)

    def ready(self, on_progress=None) -> Rollout:
        """Waits for the start."""
        if not self.environment:
            self.environment = self.started.wait(on_progress)["environment"]
        return self

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: list[int],
        temperature: float = 1.0,
        on_progress=None,
        **more: Any,
    ) -> dict[str, Any]:
        """Samples from all prompts at once; see vllm_adapter.Engine.generate."""
        return self.child.ask(
            "generate",
            600,
            on_progress,
            prompts=prompts,
            max_tokens=max_tokens,
            temperature=temperature,
            **more,
        )

    def rpc(self, name: str, *arguments: Any) -> Any:
        """A named method inside the worker."""
        return self.child.ask("call", 600, rpc=name, arguments=list(arguments))

    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        self.child.ask("forget_prefixes", 60)

    def stop(self) -> None:
        """Ends the engine's processes."""
        self.child.stop()


def start_rollout(
    name: str,
    path: Path,
    dtype: str,
    threads: Threads,
    log: Path,
    port: Path | None = None,
    package: str = "",
    cpus: tuple[int, ...] | None = None,
    **settings: Any,
) -> Rollout:
    """Starts an engine without waiting for it. `port` is the folder that goes on PYTHONPATH."""
    cpus = cpus or threads.engine
    eager = settings.setdefault("enforce_eager", True)
    more = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_PLUGINS": package,  # empty: a name that no plugin has, so none is loaded
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TORCHDYNAMO_DISABLE": "1" if eager else "0",
    }
    if port is not None:
        more["PYTHONPATH"] = os.pathsep.join(filter(None, [str(port.resolve()), os.environ.get("PYTHONPATH", "")]))
    child = Child(name, "porter.engine_server", log, environment(threads, (), **more))
    settings = {
        "dtype": dtype,
        "max_model_len": MAX_LENGTH,
        "max_num_seqs": SEQUENCES,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "kv_cache_memory_bytes": KV_BYTES,
        "enable_prefix_caching": True,
        **settings,
    }
    return Rollout(child, settings, child.request("start", 900, path=str(path), **settings))


@dataclass
class Learner:
    """A transformers model child."""

    child: Child
    started: Pending
    facts: dict[str, Any] = field(default_factory=dict)

    def ready(self) -> Learner:
        """Waits for the model to be loaded."""
        if not self.facts:
            self.facts = self.started.wait()
        return self

    def score(self, sequences: list[dict[str, Any]], temperature: float = 1.0, layout: str = "alone") -> Pending:
        """Asks for log-probabilities; the answer has `logprobs` and `seconds`."""
        return self.child.request("score", 3600, sequences=sequences, temperature=temperature, layout=layout)

    def step(self, ids: list[list[int]]) -> dict[str, Any]:
        """Forward and backward of one batch of equally long sequences: {seconds, peak_bytes, loss}."""
        return self.child.ask("step", 3600, ids=ids)

    def stop(self) -> None:
        """Ends the learner."""
        self.child.stop()


def start_learner(
    name: str,
    path: Path,
    dtype: str,
    threads: Threads,
    log: Path,
    port: Path | None = None,
    package: str = "",
    remote_code: bool = False,
) -> Learner:
    """Starts a learner without waiting for it."""
    more = {}
    if port is not None:
        more["PYTHONPATH"] = os.pathsep.join(filter(None, [str(port.resolve()), os.environ.get("PYTHONPATH", "")]))
    child = Child(name, "porter.learner_server", log, environment(threads, threads.learner, **more))
    started = child.request(
        "load", 900, path=str(path), dtype=dtype, threads=threads.count, port=package, allow_remote_code=remote_code
    )
    return Learner(child, started)


@dataclass
class Sides:
    """The children of one run by name: started once, shared by the stages, stopped together."""

    checkpoint: Path
    dtype: str
    threads: Threads
    logs: Path
    remote_code: bool = False
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    learners: dict[str, Learner] = field(default_factory=dict)

    def start_rollout(
        self, name: str, dtype: str = "", port: Path | None = None, package: str = "", **settings: Any
    ) -> Rollout:
        """The engine called `name`, started if it is not up; not waited for."""
        if name not in self.rollouts:
            log = self.logs / f"{name}-engine.log"
            self.rollouts[name] = start_rollout(
                f"{name} engine",
                self.checkpoint,
                dtype or self.dtype,
                self.threads,
                log,
                port,
                package,
                trust_remote_code=self.remote_code,
                **settings,
            )
        return self.rollouts[name]

    def start_learner(self, name: str, port: Path | None = None, package: str = "", dtype: str = "") -> Learner:
        """The learner called `name`, started if it is not up; not waited for."""
        if name not in self.learners:
            log = self.logs / f"{name}-learner.log"
            self.learners[name] = start_learner(
                f"{name} learner",
                self.checkpoint,
                dtype or self.dtype,
                self.threads,
                log,
                port,
                package,
                self.remote_code,
            )
        return self.learners[name]

    def start_fastest(self, settings: dict[str, Any]) -> Rollout:
        """The stock engine that throughput is measured against, in this configuration; not waited for."""
        known = self.rollouts.get(FASTEST)
        if known and not _has(known, settings):
            self.stop(FASTEST)
        return self.start_rollout(FASTEST, **settings)

    def start_trial(self, settings: dict[str, Any]) -> Rollout:
        """A candidate for the fastest one; the fastest one itself if it is like that."""
        known = self.rollouts.get(FASTEST)
        if known and _has(known, settings):
            return known
        return self.start_rollout(f"trial-{'-'.join(map(str, settings.values()))}", **settings)

    def stop_rollout(self, rollout: Rollout) -> None:
        """Ends this engine, whatever it is called."""
        self.stop(*[name for name, other in self.rollouts.items() if other is rollout])

    def call_fastest(self, rollout: Rollout) -> None:
        """From now on this engine is the fastest stock one."""
        if self.rollouts.get(FASTEST) not in (None, rollout):
            self.stop(FASTEST)
        others = {name: other for name, other in self.rollouts.items() if other is not rollout}
        self.rollouts = others | {FASTEST: rollout}

    def stop(self, *names: str) -> None:
        """Ends the engine and the learner called by each name."""
        for name in names:
            for sides in (self.rollouts, self.learners):
                if name in sides:
                    sides.pop(name).stop()

    def stop_all(self, keep: tuple[str, ...] = ()) -> None:
        """Ends every child but the engines named in `keep`."""
        self.stop(*[name for name in {*self.rollouts, *self.learners} if name not in keep])
