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
# Positions by slopes, attention that goes through no interface: the catalogue has no binding for its learner.
BLOOM = {
    "architectures": ["BloomForCausalLM"], "model_type": "bloom", "hidden_size": 128, "n_head": 4, "n_layer": 2,
    "vocab_size": 512, "dtype": "bfloat16",
}  # fmt: skip


def port(command, folder, config):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    done = command(folder / "model", "--hw", "cpu", "--twin", "--json", "--out", folder / "run")
    return done, done.json()


def test_a_family_of_the_transformers_backend_reaches_zero(command, tmp_path):
    done, report = port(command, tmp_path, GPT_NEOX)
    assert done.code in (0, 7) and report["mismatch"]["unequal"] == 0 and report["mismatch"]["tokens"] > 3000
    assert report["baseline"]["unequal"] > 2000
    assert not [c for c in report["checks"] if c["required"] and c["status"] != "pass"]


def test_what_the_catalogue_cannot_place_is_a_task_for_a_person(command, tmp_path):
    done, report = port(command, tmp_path, BLOOM)
    assert done.code == 3 and report["verdict"] == "escalate" and report["throughput"] is None
    task = json.loads((tmp_path / "run" / "task.json").read_text())
    assert task["author"] or task["unplaced"]
    assert "Traceback" not in done.err
