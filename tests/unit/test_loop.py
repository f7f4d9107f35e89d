"""The loop's turns and the choice of the baseline, with the engines' answers given: what follows from which answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from porter import baseline, hardware, loop, render, sides
from porter.bits import Mismatch
from porter.errors import BudgetSpent
from porter.plan import Binding, Plan, PlanModel
from porter.progress import Progress
from porter.rundir import RunDirectory

ACTIVATION = Binding(
    site="layers.*.act", op="activation", choice="adopt", side="rollout", seam="custom_op", kernel="learner_module",
    rollout_modules=("layers.*.act",),
)  # fmt: skip
PROJECTION = Binding(
    site="layers.*.proj", op="linear", choice="replace", side="both", seam="linear_method", kernel="linear",
    rollout_modules=("layers.*.proj",), learner_modules=("layers.*.proj",),
)  # fmt: skip


def started(folder: Path) -> loop.Loop:
    checkpoint = SimpleNamespace(
        slug="s",
        path=folder,
        dtype="bfloat16",
        revision="r",
        parameters=1,
        architecture="A",
        config={"text_config": None},
    )
    run = RunDirectory.create("s", "cpu", out=folder / "run")
    return loop.Loop(checkpoint, loop.Settings("cpu", max_iterations=4), run, Progress(quiet=True))


def turns(folder, monkeypatch, unequal):
    """The plans that were checked: {index: sites bound}. `unequal`: what the check finds without the activation."""
    it, seen = started(folder), {}
    model = PlanModel(name="s", architecture="A", dimensions={})
    both = Plan(index=1, slug="s", hw="cpu", dtype="bfloat16", model=model, bindings=(ACTIVATION, PROJECTION))
    it.conclusion.plan = both
    monkeypatch.setattr(render, "write", lambda *a: None)

    def check(reference):
        plan = it.conclusion.plan
        seen[plan.index] = {b.site for b in plan.installed()}
        bad = 0 if ACTIVATION.site in seen[plan.index] else unequal
        it.conclusion.mismatch = Mismatch(
            tokens=3000, unequal=bad, max_abs=0.0, mean_abs=0.0, k3_kl=0.0, d3=0.0, first_unequal=None
        )
        return {} if bad else {site: (0 if site == ACTIVATION.site else 24, 24) for site in seen[plan.index]}

    def climb(zero, skip):
        return both.model_copy(update={"index": it.conclusion.plan.index + 1}), ()

    monkeypatch.setattr(it, "check", check)
    monkeypatch.setattr(it, "_climb", climb)
    try:
        assert it.iterate({"reference": None})
    except BudgetSpent:
        seen["spent"] = set()
    return seen


def test_a_binding_that_no_token_needs_is_dropped(tmp_path, monkeypatch):
    assert turns(tmp_path, monkeypatch, 0) == {1: {ACTIVATION.site, PROJECTION.site}, 2: {PROJECTION.site}}


def test_a_binding_that_only_the_whole_check_needs_is_bound_again_and_stays(tmp_path, monkeypatch):
    both = {ACTIVATION.site, PROJECTION.site}
    assert turns(tmp_path, monkeypatch, 3) == {1: both, 2: {PROJECTION.site}, 3: both}


def test_what_was_checked_on_another_cpu_is_not_taken_over(tmp_path, monkeypatch):
    keys = set()
    for i, (name, isa) in enumerate((("one", "avx2"), ("one", "amx"), ("other", "amx"))):
        monkeypatch.setattr(hardware, "cpu_isa", lambda root=None, isa=isa: isa)
        monkeypatch.setattr(hardware, "device_name", lambda target=None, root=None, name=name: name)
        (tmp_path / str(i)).mkdir()
        keys.add(started(tmp_path / str(i)).key)
    assert len(keys) == 3


def test_a_configuration_without_a_text_part_has_prompts(tmp_path):
    assert started(tmp_path).prompts(1).short(1)


SECONDS = {
    "the last one tried wins": {("float32", False): 4.0, ("bfloat16", True): 3.0, ("float32", True): 2.5, ("bfloat16", False): 2.0},
    "what was expected wins": {("float32", False): 1.0, ("bfloat16", True): 3.0, ("float32", True): 2.5, ("bfloat16", False): 2.0},
}  # fmt: skip


class Engine:
    """An engine of known speed."""

    def __init__(self, settings):
        self.settings, self.stopped = settings, False

    def ready(self):
        return self

    def stop(self):
        self.stopped = True


@pytest.mark.parametrize("name", SECONDS)
def test_the_engine_of_the_choice_is_left_running_and_the_others_are_not(name, tmp_path, monkeypatch):
    engines = []

    def start(name, path, dtype, threads, log, port=None, package="", trust_remote_code=False, **settings):
        engines.append(Engine({"dtype": dtype, **settings}))
        return engines[-1]

    def measure(rollouts, prompts):
        return {
            n: {"all": SECONDS[name][r.settings["dtype"], r.settings["enforce_eager"]]} for n, r in rollouts.items()
        }

    monkeypatch.setattr(baseline, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(hardware, "cpu_isa", lambda root=None: "avx2")
    monkeypatch.setattr(sides, "start_rollout", start)
    monkeypatch.setattr(baseline, "measure", measure)
    both, checkpoint = sides.Sides(tmp_path, "bfloat16", None, tmp_path), SimpleNamespace(dtype="bfloat16", slug="s")
    chosen = baseline.decide("key", checkpoint, both, None, lambda note: None, {})["settings"]
    dtype, eager = min(SECONDS[name], key=SECONDS[name].get)
    assert chosen == {"dtype": dtype, "enforce_eager": eager} == baseline.known("key")["settings"]
    assert [e.settings for e in engines if not e.stopped] == [chosen]
    assert both.rollouts[sides.FASTEST].settings == chosen


@pytest.mark.parametrize("text", ["[]", "null", "{}", "{", '{"settings": 1}'])
def test_a_kept_choice_that_is_none_counts_as_unknown(text, tmp_path, monkeypatch):
    monkeypatch.setattr(baseline, "cache_folder", lambda: tmp_path)
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines" / "key.json").write_text(text)
    assert baseline.known("key") is None
