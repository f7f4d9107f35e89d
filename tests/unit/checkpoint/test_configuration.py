"""Configurations, each broken in one way, and the one line that says how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from porter import checkpoint
from porter.checkpoint_config import NEUTRAL, sampling_notes
from porter.errors import UsageFault


def test_no_config(folder: Any, cache: Path) -> None:
    (folder.path / "config.json").unlink()
    folder.refused(str(folder.path), "has no config.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_truncated_json_names_file_and_position(name: str, folder: Any, cache: Path) -> None:
    if "index" in name:
        folder.shard()
    path = folder.path / name
    path.write_text(path.read_text()[:-5])
    folder.refused(name, "no complete JSON", "line ", "column ")


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe{}", b"[" * 100000, b"null"])
def test_json_that_is_no_object(content: bytes, folder: Any, cache: Path) -> None:
    (folder.path / "config.json").write_bytes(content)
    folder.refused("config.json")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"architectures": ["KimiK31ForCausalLM"]},
            ("architectures", "'KimiK31ForCausalLM'", "transformers"),
        ),
        ({"architectures": ["LlamaForCausalML"]}, ("architectures", "did you mean LlamaForCausalLM?")),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            ("architectures", "no causal language model"),
        ),
        ({"architectures": []}, ("architectures",)),
        ({"architectures": None}, ("architectures",)),
        ({"architectures": "LlamaForCausalLM"}, ("architectures",)),
        ({"model_type": None}, ("model_type",)),
        ({"model_type": "lama"}, ("model_type", "'lama'")),
        ({"model_type": "qwen2"}, ("architectures", "model_type", "Qwen2ForCausalLM", "LlamaForCausalLM")),
        ({"dtype": "float8_e4m3fn"}, ("dtype", "float8_e4m3fn", "bfloat16, float16, float32")),
        ({"dtype": None, "torch_dtype": "float64"}, ("torch_dtype", "float64", "bfloat16, float16, float32")),
        ({"dtype": 16}, ("dtype", "16")),
        ({"dtype": ["bfloat16"]}, ("dtype",)),
        ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config",)),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, ("auto_map", "remote code", "permission")),
        ({"trust_remote_code": True}, ("trust_remote_code", "remote code", "permission")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", "3 does not divide num_attention_heads: ")),
        ({"num_key_value_heads": 0}, ("num_key_value_heads", "0 does not divide")),
        ({"text_config": {"num_attention_heads": 6, "num_key_value_heads": 4}}, ("text_config.num_key_value_heads",)),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps", "finite", "nan")),
        ({"rope_parameters": {"factors": [1.0, float("inf")]}}, ("rope_parameters.factors[1]", "inf")),
    ],
)
def test_configuration_that_cannot_be_used(
    fields: dict[str, Any], words: tuple[str, ...], folder: Any, cache: Path
) -> None:
    folder.change_config(**fields)
    folder.refused("config.json", *words)


def test_a_number_too_large_for_a_float(folder: Any, cache: Path) -> None:
    path = folder.path / "config.json"
    path.write_text(path.read_text().replace("{", '{"rope_theta": 1e999, ', 1))
    folder.refused("config.json", "rope_theta", "finite")


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_cannot_be_loaded(content: str, folder: Any, cache: Path) -> None:
    (folder.path / "tokenizer.json").write_text(content)
    folder.refused("tokenizer.json", "no tokenizer")


def test_what_transformers_refuses(folder: Any, cache: Path) -> None:
    folder.change_config(hidden_act="no_such_activation")
    folder.refused("config.json", "no_such_activation")


def test_a_dtype_that_is_not_named_is_read_from_the_weights(folder: Any, cache: Path) -> None:
    folder.change_config(dtype=None)
    found = folder.look()
    assert found.dtype == "bfloat16" and any("names no dtype" in note for note in found.notes)


def test_sampling_settings_are_noted(folder: Any, cache: Path) -> None:
    brought = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.1}
    (folder.path / "generation_config.json").write_text(json.dumps({**brought, "eos_token_id": 2, "do_sample": True}))
    (note,) = folder.look().notes
    assert "generation_config.json" in note and "overridden" in note and "min_p" not in note
    assert all(f"{name}={brought[name]}" in note for name in ("temperature", "top_k", "top_p", "repetition_penalty"))


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_each_sampling_setting_is_noted_and_each_neutral_value_is_not(name: str, tmp_path: Path) -> None:
    for value in NEUTRAL[name]:
        (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
        assert sampling_notes(tmp_path, {}) == []
    (tmp_path / "generation_config.json").write_text(json.dumps({name: 7}))
    assert f"{name}=7" in sampling_notes(tmp_path, {})[0]
    (tmp_path / "generation_config.json").unlink()
    assert f"config.json brings {name}=7" in sampling_notes(tmp_path, {name: 7})[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
FIELDS = [
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "auto_map",
    "quantization_config",
    "text_config",
]
FIELDS += [
    "num_hidden_layers",
    "hidden_size",
    "tie_word_embeddings",
    "head_dim",
    "rope_parameters",
    "temperature",
]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=st.sampled_from(FIELDS), value=JSON)
def test_any_value_in_any_field_is_no_traceback(field: str, value: Any, whole: Any, tmp_path: Path) -> None:
    config = {**json.loads((whole.path / "config.json").read_text()), field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        found = checkpoint.resolve(str(tmp_path), cache=tmp_path / "cache")
    except UsageFault as fault:
        assert "config.json" in str(fault) and "\n" not in str(fault)
    else:
        assert found.weights == "random"
