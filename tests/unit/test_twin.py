"""Twins: real models built by transformers from shrunken configurations of several families."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from porter import twin
from porter.errors import UsageFault
from porter.safetensors_files import read_header, same_bits
from porter.twin_config import HEAD_SIZES, shrink

# What is published of each family, where it differs from transformers' defaults.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 49152,
        "rope_theta": 100000,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_window_layers": 21,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
        "eos_token_id": 151645,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 256,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "torch_dtype": "bfloat16",
        "vocab_size": 262144,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 128,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    },
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "bfloat16"},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Idle threads that spin make small models slow on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def published(family: str, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": family, **PUBLISHED[family]}))
    return folder


def bits(folder: Path) -> dict[str, Any]:
    return read_header(folder / "model.safetensors")[0]


@pytest.mark.parametrize("family", sorted(PUBLISHED))
def test_twin_is_small_whole_and_not_flat(family: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    twin.build(published(family, tmp_path / "source"), tmp_path / "twin", 0, None, False)
    config = json.loads((tmp_path / "twin" / "config.json").read_text())
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "twin", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == PUBLISHED[family]["architectures"][0] and config["dtype"] == "bfloat16"
    assert sum(parameter.numel() for parameter in model.parameters()) < 30e6
    assert 2 <= model.config.num_hidden_layers <= 8
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
        assert parameter.numel() == 1 or parameter.float().std() > 0.005, f"{name} is idle"
    ids = torch.randint(1000, (2, 48), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        spread = model(input_ids=ids).logits.float().std(-1).mean()
    assert 1.4 < spread < 2.8


def test_features_are_kept(tmp_path: Path) -> None:
    def small(family: str) -> dict[str, Any]:
        own = {"model_type": family, **PUBLISHED[family]}
        return shrink(own, {"head_dim": None, **own})

    llama = small("llama")
    assert llama["num_attention_heads"] == 3 * llama["num_key_value_heads"]  # the grouping
    assert llama["hidden_size"] == 64 * llama["num_attention_heads"] and llama["intermediate_size"] == 1536
    assert llama["tie_word_embeddings"] is True and llama["rope_theta"] == 100000
    gemma = small("gemma3_text")
    assert set(gemma["layer_types"]) == {"sliding_attention", "full_attention"}
    assert len(gemma["layer_types"]) == gemma["num_hidden_layers"] == 6 and gemma["sliding_window"] == 32
    assert gemma["head_dim"] == 256 and gemma["num_key_value_heads"] == 1
    assert gemma["hidden_size"] != gemma["head_dim"] * gemma["num_attention_heads"]
    assert small("qwen2")["eos_token_id"] < small("qwen2")["vocab_size"]
    experts = small("qwen3_moe")
    assert experts["num_experts_per_tok"] < experts["num_experts"] <= 8


@pytest.mark.parametrize(("head", "twins"), [(64, 64), (120, 112), (48, 32), (16, 32), (512, 512)])
def test_head_size_is_one_the_engine_takes(head: int, twins: int) -> None:
    config = {"hidden_size": 8 * head, "num_attention_heads": 8, "num_hidden_layers": 4, "head_dim": head}
    small = shrink(config, config)
    assert small["head_dim"] == twins and twins in HEAD_SIZES


def test_same_seed_same_bits_other_seed_other_bits(tmp_path: Path) -> None:
    source = published("llama", tmp_path / "source")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        twin.build(source, tmp_path / name, seed, "float32", False)
    a, b, c = (bits(tmp_path / name) for name in "abc")
    assert a.keys() == b.keys() == c.keys() and {tensor.dtype for tensor in a.values()} == {"F32"}
    assert all(same_bits(a[name], b[name]) for name in a)
    assert not any(same_bits(a[name], c[name]) for name in a)


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    source = published("llama", tmp_path / "source")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageFault, match="mine exists"):
        twin.build(source, tmp_path / "mine", 0, None, False)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_what_transformers_refuses_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_act": "no_such_activation"}')
    with pytest.raises(UsageFault, match="no_such_activation") as caught:
        twin.build(tmp_path, tmp_path / "twin", 0, None, False)
    assert "config.json" in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]  # nothing half-written


def test_the_program_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "porter.twin", str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"{tmp_path} has no config.json\n"


def test_importing_the_module_imports_no_torch() -> None:
    code = "import sys, porter.twin, porter.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
