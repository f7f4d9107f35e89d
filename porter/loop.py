"""The whole loop: inspect -> plan -> render -> check -> diagnose -> (again) -> prune -> bench -> report.

One direction; every stage keeps its typed result in the run directory, so a run that stopped goes on from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from porter import baseline, bench, hardware, iteration, iteration_zero, ladder_words, render
from porter import plan as plans
from porter.ahead import Ahead
from porter.bits import Mismatch, PositionSeries
from porter.check import Ladder, rungs
from porter.checkpoint import Checkpoint, require_memory
from porter.conclusion import Conclusion, versions
from porter.errors import BudgetSpent, Escalation, NotMeasured
from porter.names import package_of
from porter.profile import Profile
from porter.progress import Progress
from porter.prompts import Prompts
from porter.report import Check, Iteration, Report, Throughput, Workload
from porter.rundir import RunDirectory
from porter.sides import FASTEST, KV_BYTES, Learner, Rollout, Sides, Threads
from porter.storage import digest_of

TYPICAL = {
    "start stock engine and learner": 40,
    "record and diagnose": 5,
    "stock mismatch": 110,
    "start aligned engine and learner": 15,
    "check": 70,
    "prove each binding": 8,
    "start fastest stock engine": 1,
    "throughput": 240,
}


def suspects(plan: plans.Plan) -> set[str]:
    """Sites to bind otherwise when a mismatch shows on no recorded input: where a stock kernel's invariance is trusted.

    Attention first, whose shapes vary most; then linear layers.
    """
    trusted = [
        b for b in plan.bindings if b.op in ("attention", "linear", "lm_head") and b.choice in ("keep", "adopt", "pin")
    ]
    attention = {b.site for b in trusted if b.op == "attention"}
    return attention or {b.site for b in trusted}


@dataclass(frozen=True)
class Settings:
    """What the command was asked for."""

    hw: str
    target_ratio: float = 0.9
    max_iterations: int = 4
    threads: int = 1
    seed: int = 0
    pairs: int = 6
    remote_code: bool = False
    follow: str = ""  # rollout or learner: which side is right where the two compute different functions


@dataclass
class Loop:
    """One run of the main command; `conclusion` tells at any moment what is known, also after an exception."""

    checkpoint: Checkpoint
    settings: Settings
    run: RunDirectory
    progress: Progress
    conclusion: Conclusion = field(init=False)

    def __post_init__(self) -> None:
        self.target = hardware.resolve(self.settings.hw)
        self.threads = Threads.on_this_machine(self.settings.threads)
        self.package = package_of(self.checkpoint.slug)
        self.trace = self.run.path / "trace-0"
        logs = self.run.path / "logs"
        self.sides = Sides(self.checkpoint.path, self.checkpoint.dtype, self.threads, logs, self.settings.remote_code)
        self.ahead = Ahead(self.checkpoint, self.sides, self.target.name, self.run.port, self.prompts)
        self.conclusion = Conclusion(self.checkpoint, self.target, self.threads, self.progress)
        sources = render.sources()
        machine = hardware.device_name(), hardware.cpu_isa()  # another one has other stock kernels
        asked = (
            self.settings.seed,
            self.settings.threads,
            self.target.name,
            self.settings.target_ratio,
            self.settings.follow,
        )
        self.key = digest_of(self.checkpoint.revision, self.checkpoint.dtype, versions(), machine, asked, sources)

    def go(self) -> Report:
        """Runs every stage that is not done yet. Raises PorterError; what was done until then stays in `conclusion`."""
        self.require_machine()
        try:
            zero = self.iteration_zero()
            if self.iterate(zero):
                self.measure_throughput(zero["gathered"])
        finally:
            self.sides.stop_all()
        return self.conclusion.report()

    def require_machine(self) -> None:
        """Raises NotMeasured when the target's device is not one this version measures on, EngineFault for memory."""
        if self.target.device != "cpu":
            here = f"kernels for {self.target.device} targets are not in this version"
            raise NotMeasured(f"--hw {self.target.name}: {here}", "--hw cpu measures here")
        require_memory(self.checkpoint, KV_BYTES, engines=3)

    def prompts(self, purpose: int) -> Prompts:
        """Prompts of one purpose, the same in every run of one seed."""
        config = self.checkpoint.config
        vocabulary = int(config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size", 256))
        return Prompts(self.checkpoint.path, vocabulary, self.settings.seed * 100 + purpose)

    def record(self, check: Check) -> None:
        """Keeps one check, in the conclusion and in checks.jsonl."""
        self.conclusion.checks.append(check)
        self.run.append_check(check)
        if check.status != "pass":
            self.run.log(f"check {check.name}: {check.status}, {check.unequal} of {check.tokens}. {check.detail}")

    def iteration_zero(self, start_next: bool = True) -> dict[str, Any]:
        """Stock against stock: the mismatch, every culprit, the first plan. `start_next`: the next engines as well."""
        kept = self.run.stage_result("iteration-0", self.key)
        if kept is None:
            ahead = self.ahead if start_next else None
            kept = iteration_zero.run(self.checkpoint, self.sides, self.prompts, self.trace, self.progress, ahead)
            kept = iteration_zero.ask_in_float32(self.sides, self.prompts, self.progress, kept)
            other = kept["diagnosis"]["semantic"]
            if (self.settings.follow == "learner") if other else iteration_zero.gaps(kept["diagnosis"]):
                folder = self.run.path / "trace-0-modelling"
                kept = iteration_zero.follow_modelling(self.sides, self.prompts, folder, self.progress, kept)
            self.run.stage_done("iteration-0", self.key, kept)
        else:
            kept["gathered"] = {}  # timings of another hour
        known, bindings = self.conclusion, kept["diagnosis"]["bindings"]
        known.stock = Mismatch.model_validate(kept["mismatch"])
        known.stock_positions = PositionSeries.model_validate(kept["positions"])
        profile = Profile.model_validate(kept["profile"])
        self.run.save_json("profile.json", profile)
        self.progress.facts(iteration=0, unequal=known.stock.unequal)
        known.semantic = kept["diagnosis"]["semantic"]
        self._refuse_other_functions(kept)
        self._refuse_gaps(kept["diagnosis"])
        known.plan = plans.make(profile, bindings, 1, self.target.name, kept["foreign_layouts"])
        self._turn(0, known.stock, ladder_words.culprits(bindings), ladder_words.change(known.plan))
        return kept

    def _refuse_other_functions(self, zero: dict[str, Any]) -> None:
        """A zero forced by copying the wrong side is not a port: a person says which side is right."""
        follow, found = self.settings.follow, self.conclusion.semantic
        if not found or zero["modelling"]:
            return
        first = found[0]
        what = (
            f"the two sides compute different functions at {first['site']} ({first['apart']}; {first['rollout_does']})"
        )
        hints = {
            "": "see findings in the report, then say which side is right with --follow learner or --follow rollout",
            "learner": "vLLM cannot run this model with transformers' modelling code, so the rollout cannot follow it",
            "rollout": "a learner that follows the rollout there needs an author; --follow learner can be tried",
        }
        self.run.save_json("task.json", {"semantic": found, "follow": follow})
        raise Escalation(what, hints[follow])

    def _refuse_gaps(self, diagnosis: dict[str, Any]) -> None:
        gaps = iteration_zero.gaps(diagnosis)
        if gaps:
            author = [b for b in diagnosis["bindings"] if b["choice"] == "author"]
            path = self.run.save_json("task.json", {"unplaced": diagnosis["unplaced"], "author": author})
            raise Escalation(
                f"no binding in the catalogue for {', '.join(gaps[:5])}", f"the task is written out in {path}"
            )

    def _turn(self, index: int, mismatch: Mismatch, culprits: tuple, change: str) -> None:
        self.conclusion.iterations.append(
            Iteration(index=index, tokens=mismatch.tokens, unequal=mismatch.unequal, culprits=culprits, change=change)
        )

    def iterate(self, zero: dict[str, Any]) -> bool:
        """Plan, render, check; on a mismatch find the culprit on the aligned sides and climb on; then prune.

        True when the port is at zero; False when a required check failed although no token is unequal.
        """
        skip: dict[str, list[dict[str, Any]]] = {}
        known, larger, needed = self.conclusion, None, set()
        while True:
            plan = known.plan
            self.run.save_json(f"plan-{plan.index}.json", plan)
            render.write(plan, self.run.port)
            proof = self.check(zero["reference"])
            red = known.mismatch.unequal or any(c.status != "pass" for c in known.checks if c.required)
            smaller = None if red else iteration.pruned(plan, proof, needed)
            if not red and smaller is None:
                known.plan = iteration.proved(plan, proof)
                self._turn(plan.index, known.mismatch, (), "none: zero, and each binding is needed")
                self.run.save_json(f"plan-{plan.index}.json", known.plan)
                return True
            if red and not known.mismatch.unequal:
                self._turn(plan.index, known.mismatch, (), "none: a required check failed, see checks")
                return False
            culprits, change = (), ladder_words.dropped(plan, smaller)
            spent = red and not larger and plan.index >= self.settings.max_iterations
            if red and larger:  # dropped for a proof on few tokens, needed for one of the check's
                dropped = {b.site for b in larger.installed()} - {b.site for b in plan.installed()}
                needed |= dropped
                following, larger = larger.model_copy(update={"index": plan.index + 1}), None
                change = f"bound again, the check needs them: {', '.join(sorted(dropped))}"
            elif red:
                following, culprits = self._climb(zero, skip)
                change = ladder_words.change(following)
            else:
                following, larger = smaller, plan
            self._turn(plan.index, known.mismatch, culprits, change)
            if spent:
                hint = "raise --max-iterations, or look at the culprits in report.md"
                raise BudgetSpent(f"{plan.index} iterations and not done", hint)
            self.sides.stop_all(keep=(FASTEST,))
            known.plan, known.checks = following, []

    def _climb(self, zero: dict[str, Any], skip: dict[str, list[dict[str, Any]]]) -> tuple[plans.Plan, tuple]:
        """Culprits on the aligned sides; their present rung is refuted, the ladder is climbed again without it."""
        plan = self.conclusion.plan
        rollout, learner = self.aligned()
        folder = self.run.path / f"trace-{plan.index}"
        recorded = iteration_zero.record(rollout, self.prompts(1), folder)
        found = iteration_zero.diagnose(learner, recorded, folder).wait()
        guilty = {s["site"] for s in found["sites"] if s["unequal"]}
        guilty = guilty or suspects(plan)
        if not guilty:
            unequal = self.conclusion.mismatch.unequal
            reds = ", ".join(c.name for c in self.conclusion.checks if c.status != "pass")
            raise Escalation(
                f"{unequal} unequal tokens ({reds}), yet every site agrees on recorded inputs", f"see {folder}"
            )
        for binding in plan.bindings:
            if binding.site in guilty:
                skip.setdefault(binding.site, []).append({"choice": binding.choice, "settings": binding.settings})
        self.sides.stop_all(keep=(FASTEST,))
        stock = self.sides.start_learner("stock").ready()
        trace = self.run.path / zero["trace"]
        again = iteration_zero.diagnose(stock, zero["recorded"], trace, skip).wait()
        self._refuse_gaps(again)
        bindings = [*zero["modelling"], *again["bindings"]]
        profile, foreign = Profile.model_validate(zero["profile"]), zero["foreign_layouts"]
        following = plans.make(profile, bindings, plan.index + 1, plan.hw, foreign)
        return following, ladder_words.culprits([b for b in found["bindings"] if b["site"] in guilty])

    def aligned(self) -> tuple[Rollout, Learner]:
        """The aligned engine and learner of the port in the run directory, started if they are not up."""
        rollout = self.sides.start_rollout("aligned", port=self.run.port, package=self.package)
        self.sides.stop("stock")
        learner = self.sides.start_learner("aligned", port=self.run.port, package=self.package)
        return rollout.ready(), learner.ready()

    def check(self, reference: dict[str, Any] | None = None) -> dict[str, tuple[int, int]]:
        """Every rung on the present port, or what a run before this one found. Returns the proof of each binding.

        `reference`: tokens and log-probabilities of the stock sides, from iteration 0.
        """
        known = self.conclusion
        key = digest_of(self.key, known.plan.model_dump(mode="json"))
        kept = self.run.stage_result(f"check-{known.plan.index}", key)
        if kept is None:
            kept = self._check(reference)
            self.run.stage_done(f"check-{known.plan.index}", key, kept)
        else:
            for check in kept["checks"]:
                self.record(Check.model_validate(check))
        known.mismatch = Mismatch.model_validate(kept["mismatch"])
        known.positions = PositionSeries.model_validate(kept["positions"])
        known.calls = {site: tuple(calls) for site, calls in kept["calls"].items()}
        self.progress.facts(iteration=known.plan.index, unequal=known.mismatch.unequal)
        return {site: tuple(found) for site, found in kept["proof"].items()}

    def _check(self, reference: dict[str, Any] | None) -> dict[str, Any]:
        plan, before = self.conclusion.plan, len(self.conclusion.checks)
        with self.progress.stage("start aligned engine and learner"):
            rollout, learner = self.aligned()
        wanted = rungs(self.prompts(3))
        again = (iteration.RESCORED + 3 * iteration.LAID_OUT) * wanted[0].max_tokens[0]
        with self.progress.stage("check", total=sum(r.tokens for r in wanted) + again) as stage:
            ladder = Ladder(rollout, learner, self.record, stage.advance)
            iteration.check(ladder, self.prompts(3), plan.model.foreign_layouts)
            if reference:
                iteration.stays_with_the_reference(learner, reference, reference["mean"], self.record)
            calls = iteration.ran(plan, self.package, rollout, learner, self.record)
        mismatch, proof = ladder.pairs.mismatch(), {}
        if not mismatch.unequal:
            with self.progress.stage("prove each binding"):
                proof = iteration.needed(plan, self.package, rollout, learner, self.prompts(4))
        return {
            "mismatch": mismatch.model_dump(mode="json"),
            "positions": ladder.pairs.by_position().model_dump(mode="json"),
            "checks": [c.model_dump(mode="json") for c in self.conclusion.checks[before:]],
            "calls": calls,
            "proof": proof,
        }

    def measure_throughput(self, gathered: dict[str, Any] | None = None) -> None:
        """Interleaved pairs against the fastest stock configuration; only after zero. `gathered`: see baseline.decide."""
        known, loads = self.conclusion, bench.default_loads(self.prompts(5))
        known.choice = baseline.known(baseline.key_of(self.checkpoint, self.threads)) or {}
        kept = self._kept(loads) if known.choice else {}
        if not kept or not all(kept.values()):
            aligned, stock = self.contestants(gathered)
            kept = self._kept(loads)
            total = 2 * self.settings.pairs * sum(not w for w in kept.values())
            with self.progress.stage("throughput", total=total, unit="runs") as stage:
                for i, load in enumerate(loads):
                    if kept[load.name] is None:
                        stage.note(load.name)
                        found = bench.pairs(aligned, stock, load, self.settings.pairs, stage.advance)
                        kept[load.name] = found.model_dump(mode="json")
                        self.run.stage_done(f"throughput-{i}", self._throughput_key(), kept[load.name])
        workloads = [Workload.model_validate(w) for w in kept.values()]
        known.throughput = Throughput.of(
            workloads, target_ratio=self.settings.target_ratio, baseline_configuration=known.choice["settings"]
        )

    def contestants(self, gathered: dict[str, Any] | None = None) -> tuple[Rollout, Rollout]:
        """The aligned engine and the fastest stock one, both up and bound alike, nothing else running."""
        key = baseline.key_of(self.checkpoint, self.threads)
        with self.progress.stage("start fastest stock engine"):
            self.ahead.fastest()
            for learner in list(self.sides.learners):
                self.sides.learners.pop(learner).stop()
            aligned = self.sides.start_rollout("aligned", port=self.run.port, package=self.package).ready()
            self.sides.rollouts[FASTEST].ready()
        self.conclusion.choice = baseline.known(key) or {}
        if not self.conclusion.choice:
            with self.progress.stage("choose the fastest stock configuration (once per machine)") as stage:
                self.conclusion.choice = baseline.decide(
                    key, self.checkpoint, self.sides, lambda: self.prompts(9), stage.note, gathered or {}
                )
        return aligned, self.sides.rollouts[FASTEST]

    def _throughput_key(self) -> str:
        plan = self.conclusion.plan.model_dump(mode="json")
        return digest_of(self.key, plan, self.conclusion.choice, self.settings.pairs)

    def _kept(self, loads: list[bench.Load]) -> dict[str, Any]:
        key = self._throughput_key()
        return {load.name: self.run.stage_result(f"throughput-{i}", key) for i, load in enumerate(loads)}
