"""Architectures that no folder of models/ names, by the main command: each to zero, or to a task for a person."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

# Parallel residual, LayerNorm, partial rotary, biases: vLLM runs it with its transformers backend.
GPT_NEOX = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "use_parallel_residual": True, "hidden_act": "gelu", "dtype": "bfloat16",
}  # fmt: skip
# Positions by slopes, attention written out in torch operations, a fused projection in another order on each side.
BLOOM = {
    "architectures": ["BloomForCausalLM"], "model_type": "bloom", "hidden_size": 128, "n_head": 4, "n_layer": 2,
    "vocab_size": 512, "dtype": "bfloat16",
}  # fmt: skip
# Beyond the original length one side chooses its rotary factors by the sequence, the other by the engine's longest.
PHI3 = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 512,
    "max_position_embeddings": 2048, "original_max_position_embeddings": 64, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
    "rope_theta": 10000.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.0 + i for i in range(16)]},
}  # fmt: skip


def port(command, folder, config, *options):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    done = command(folder / "model", "--hw", "cpu", "--twin", "--json", "--out", folder / "run", *options)
    return done, done.json()


def test_a_family_of_the_transformers_backend_reaches_zero(command, tmp_path):
    done, report = port(command, tmp_path, GPT_NEOX)
    assert done.code in (0, 7) and report["mismatch"]["unequal"] == 0 and report["mismatch"]["tokens"] > 3000
    assert report["baseline"]["unequal"] > 2000
    assert not [c for c in report["checks"] if c["required"] and c["status"] != "pass"]


def test_a_family_that_writes_its_attention_out_reaches_zero(command, tmp_path):
    done, report = port(command, tmp_path, BLOOM)
    assert done.code in (0, 7) and report["mismatch"]["unequal"] == 0 and report["mismatch"]["tokens"] > 3000
    bound = {b["op"]: b for b in report["bindings"] if b["choice"] != "keep"}
    assert bound["attention"]["calls_rollout"] and bound["attention"]["calls_learner"]
    assert bound["activation"]["side"] == "rollout"


def test_two_functions_are_for_a_person(command, tmp_path):
    done, report = port(command, tmp_path, PHI3)
    assert done.code == 3 and report["verdict"] == "escalate" and report["throughput"] is None
    (first, *_) = [f for f in report["findings"] if f["kind"] == "semantic"]
    assert "rope" in first["decided_by"]
    assert json.loads((tmp_path / "run" / "task.json").read_text())["semantic"]
    assert "Traceback" not in done.err


def test_the_rollout_follows_where_a_person_says_that_the_learner_is_right(command, tmp_path):
    done, report = port(command, tmp_path, PHI3, "--follow", "learner")
    assert done.code in (0, 7) and report["mismatch"]["unequal"] == 0 and report["mismatch"]["tokens"] > 3000
    (first, *_) = [f for f in report["findings"] if f["kind"] == "semantic"]
    assert "the learner is followed" in first["decided_by"]
    (model,) = [b for b in report["bindings"] if b["site"] == "model"]
    assert model["side"] == "rollout" and model["choice"] == "adopt"
    assert not [c for c in report["checks"] if c["required"] and c["status"] != "pass"]
