"""Rendering: canonical, reproducible, formatted text; edits by hand are found; the golden tree holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from porter import render
from porter.errors import UsageFault
from porter.plan import Binding, Plan, PlanModel, patterns

GOLDEN = Path(__file__).parents[1] / "golden" / "port"


LAYER = "model.layers.*."


def binding(
    site: str, op: str, choice: str, side: str, seam: str, kernel: str, learner: str = "", **settings
) -> Binding:
    modules = (f"{LAYER}{learner}",) if learner else ()
    return Binding(
        site=f"layers.*.{site}", op=op, choice=choice, side=side, seam=seam, kernel=kernel, settings=settings,
        rollout_modules=(f"{LAYER}{site}",), learner_modules=modules, unequal=3, elements=10,
    )  # fmt: skip


def plan(**changes) -> Plan:
    dimensions = {"hidden_size": 64, "tie_word_embeddings": True}
    bindings = (
        Binding(site="embed_tokens", op="embedding", choice="keep", side="none"),
        binding("input_layernorm", "rms_norm", "adopt", "rollout", "custom_op", "rms_norm", rounding="before_weight"),
        binding("self_attn.rotary_emb", "rotary", "adopt", "rollout", "custom_op", "rotary", rounding="each_product"),
        binding("mlp.down_proj", "linear", "replace", "both", "linear_method", "linear", "mlp.down_proj"),
        binding("self_attn.attn", "attention", "replace", "both", "attention_impl", "attention", "self_attn"),
    )
    model = PlanModel(name="tiny", architecture="LlamaForCausalLM", dimensions=dimensions)
    facts = {"index": 1, "slug": "tiny", "hw": "cpu", "dtype": "bfloat16", "model": model, "bindings": bindings}
    return Plan(**facts | changes)


def pinned() -> Plan:
    attention = ("attention", "pin", "both", "attention_impl", "engine_attention", "self_attn")
    return plan(
        bindings=(
            binding("mlp.down_proj", "linear", "pin", "both", "linear_method", "", "mlp.down_proj", minimum_rows=2),
            binding("self_attn.attn", *attention, split_kv=False),
        )
    )


def modelled() -> Plan:
    """The rollout on the modelling code, with a norm of the learner's class."""
    own = {"learner_class": "torch.nn:RMSNorm", "attributes": {"eps": 1e-6, "normalized_shape": [64]}}
    model = Binding(
        site="model", op="modelling", choice="adopt", side="rollout", seam="modelling", rollout_modules=("model",)
    )
    norm = binding("input_layernorm", "rms_norm", "adopt", "rollout", "custom_op", "learner_module", **own)
    return plan(bindings=(model, norm, *plan().bindings[3:]))


def written_out() -> Plan:
    """Attention that the modelling code writes out, with position slopes."""
    attention = ("attention", "replace", "both", "attention_impl", "attention", "self_attention")
    return plan(bindings=(binding("self_attention.attn", *attention, slopes=[0.5, 0.25], written_out=True),))


MADE = {"replace": plan(), "pin": pinned(), "modelling": modelled(), "written_out": written_out()}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_every_file_is_valid_formatted_and_lints(made, tmp_path):
    port = render.write(made, tmp_path / "port")
    ruff = [sys.executable, "-m", "ruff"]
    generated = [p for p in sorted(port.rglob("*.py")) if "kernels" not in p.parts]
    subprocess.run(
        [
            *ruff,
            "check",
            "--isolated",
            "--no-cache",
            "--line-length",
            "110",
            "--select",
            "E9,F,I",
            "--config",
            "lint.isort.known-first-party=['zm_port_tiny']",
            *generated,
        ],
        check=True,
        cwd=port,
    )
    done = subprocess.run(
        [
            *ruff,
            "format",
            "--isolated",
            "--no-cache",
            "--line-length",
            "110",
            "--check",
            "--diff",
            *generated,
        ],
        cwd=port,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert not any("\r" in p.read_text() for p in port.rglob("*") if p.is_file())


def test_proofs_written_into_a_plan_do_not_change_its_port():
    proved = tuple(b.model_copy(update={"needed": "24 of 24 tokens"}) for b in plan().bindings)
    assert render.files_of(plan(bindings=proved, index=3)) == render.files_of(plan())


def test_a_port_on_the_modelling_code_chooses_it_before_the_model_is_constructed():
    files = render.files_of(modelled())
    assert 'model_config.model_impl = "transformers"' in files["zm_port_tiny/rollout_modelling.py"]
    assert "rollout_modelling.prepare(model_config)" in files["zm_port_tiny/plugin.py"]
    assert "zm_port_tiny/kernels/learner_module.py" in files
    assert "zm_port_tiny/rollout_modelling.py" not in render.files_of(plan())


def test_rendering_is_reproducible_and_without_a_time_stamp():
    assert render.files_of(plan()) == render.files_of(plan())


def test_the_generated_text_is_the_golden_one():
    """After an intended change: ZM_PORT_GOLDEN=write pytest tests/unit/test_render.py, then read the diff."""
    made = {
        n: t for n, t in render.files_of(plan()).items() if "/kernels/" not in n and not n.endswith("manifest.json")
    }
    if os.environ.get("ZM_PORT_GOLDEN") == "write":
        for name, text in made.items():
            (GOLDEN / name).parent.mkdir(parents=True, exist_ok=True)
            (GOLDEN / name).write_text(text)
    there = {str(p.relative_to(GOLDEN)): p.read_text() for p in GOLDEN.rglob("*") if p.is_file()}
    assert there == made


def test_drift_and_hand_edits_are_found(tmp_path):
    port = render.write(plan(), tmp_path / "port")
    assert render.drift(plan(), port) == []
    edited = port / "zm_port_tiny" / "learner.py"
    edited.write_text(edited.read_text() + "\n# mine\n")
    (port / "extra.txt").write_text("x")
    assert render.drift(plan(), port) == [
        "extra.txt: not part of the port",
        "zm_port_tiny/learner.py: differs",
    ]
    with pytest.raises(UsageFault, match="extra.txt: not part of the port"):
        render.write(plan(), port)
    (port / "extra.txt").unlink()
    with pytest.raises(UsageFault, match="learner.py: edited by hand"):
        render.write(plan(), port)
    render.write(plan(), port, force=True)
    assert render.drift(plan(), port) == []


def test_a_folder_that_is_no_port_is_left_alone(tmp_path):
    (tmp_path / "letter").write_text("dear")
    with pytest.raises(UsageFault, match="not a port"):
        render.write(plan(), tmp_path)
    assert (tmp_path / "letter").read_text() == "dear"


def test_only_the_seams_and_kernels_of_the_plan_are_there():
    names = set(render.files_of(pinned()))
    assert not any(n.endswith(("linear.cpp", "elementwise.cpp", "rollout_custom_op.py")) for n in names)
    assert "zm_port_tiny/kernels/engine_attention.py" in names


def test_an_authors_binding_cannot_be_rendered():
    author = Binding(site="x", op="mystery", choice="author", side="both")
    with pytest.raises(UsageFault, match="author"):
        render.files_of(plan(bindings=(author,)))


def test_the_manifest_names_every_file_by_digest(tmp_path):
    port = render.write(plan(), tmp_path / "port")
    record = json.loads((port / "zm_port_tiny" / "manifest.json").read_text())
    there = {str(p.relative_to(port)) for p in port.rglob("*") if p.is_file()}
    assert set(record["files"]) | {"zm_port_tiny/manifest.json"} == there


def test_patterns_stand_for_layers():
    assert patterns(["model.layers.0.mlp", "model.layers.11.mlp", "lm_head"]) == (
        "lm_head",
        "model.layers.*.mlp",
    )
