"""Safetensors files, each broken in one way, and the one line that says how."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from porter import safetensors_files
from porter.errors import UsageFault
from porter.safetensors_files import Tensor, read_header

DOWN = "model.layers.1.mlp.down_proj.weight"
Stored = dict[str, tuple[str, np.ndarray]]  # name -> (dtype, the bits as unsigned integers)


@pytest.mark.parametrize("name", [DOWN, "model.norm.weight", "model.embed_tokens.weight"])
def test_missing_tensor(name: str, folder: Any, cache: Path) -> None:
    folder.rewrite(lambda tensors: tensors.pop(name))
    folder.refused("model.safetensors", f"tensor {name} is missing")


def test_wrong_shape(folder: Any, cache: Path) -> None:
    folder.rewrite(lambda tensors: tensors.update({DOWN: ("BF16", tensors[DOWN][1].T)}))
    folder.refused("model.safetensors", DOWN, "[96, 64]", "[64, 96]")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "F64"])
def test_dtype_of_a_tensor(dtype: str, folder: Any, cache: Path) -> None:
    kind = np.dtype(f"u{safetensors_files.ITEM_BYTES[dtype]}")
    folder.rewrite(lambda tensors: tensors.update({DOWN: (dtype, np.zeros(tensors[DOWN][1].shape, kind))}))
    folder.refused("model.safetensors", DOWN, dtype, "bfloat16, float16, float32")


@pytest.mark.parametrize(
    ("dtype", "kind", "bits", "word"),
    [
        ("BF16", np.uint16, 0x7FC0, "NaN"),
        ("BF16", np.uint16, 0xFF81, "NaN"),
        ("BF16", np.uint16, 0xFF80, "infinity"),
        ("F16", np.uint16, 0x7E00, "NaN"),
        ("F32", np.uint32, 0x7F800000, "infinity"),
        ("F32", np.uint32, 0x7F800001, "NaN"),
    ],
)
def test_weights_that_are_not_finite(dtype: str, kind: type, bits: int, word: str, folder: Any, cache: Path) -> None:
    def plant(tensors: Stored) -> None:
        values = np.zeros(tensors[DOWN][1].shape, kind)
        values[-1, -2] = bits
        tensors[DOWN] = (dtype, values)

    folder.rewrite(plant)
    folder.refused("model.safetensors", DOWN, word, f"element {64 * 96 - 2}")


def test_surplus_tensor_is_noted(folder: Any, cache: Path) -> None:
    folder.rewrite(lambda tensors: tensors.update(extra=("F32", np.zeros(3, np.uint32))))
    found = folder.look()
    assert any("extra" in note for note in found.notes) and any("F32" in note for note in found.notes)


def test_a_tied_tensor_must_equal_its_twin(folder: Any, cache: Path) -> None:
    def store(tensors: Stored) -> None:
        tensors["lm_head.weight"] = ("BF16", tensors["model.embed_tokens.weight"][1].copy())

    def differ(tensors: Stored) -> None:
        tensors["lm_head.weight"][1][5, 5] ^= 1

    before = folder.look().parameters
    folder.rewrite(store)
    assert folder.look().parameters == before  # counted once
    folder.rewrite(differ)
    folder.refused("lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings")


def test_untied_needs_its_head(folder: Any, cache: Path) -> None:
    folder.change_config(tie_word_embeddings=False)
    folder.refused("tensor lm_head.weight is missing")


def test_names_that_transformers_converts_are_accepted(folder: Any, cache: Path) -> None:
    def strip(tensors: Stored) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    folder.rewrite(strip)
    assert any("other names" in note for note in folder.look().notes)


def test_missing_shard(folder: Any, cache: Path) -> None:
    weight_map = folder.shard()
    (folder.path / weight_map[DOWN]).unlink()
    folder.refused(weight_map[DOWN], "missing")


def test_tensor_that_the_index_promises(folder: Any, cache: Path) -> None:
    weight_map = folder.shard()
    other = next(name for name in weight_map.values() if name != weight_map[DOWN])
    (folder.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**weight_map, DOWN: other}}))
    folder.refused(other, DOWN, "missing")


@pytest.mark.parametrize(
    "weight_map", [None, [], {"a": 1}, {"a": "../elsewhere.safetensors"}, {"a": "y" * 300 + ".safetensors"}]
)
def test_index_that_is_none(weight_map: Any, folder: Any, cache: Path) -> None:
    (folder.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    folder.refused("safetensors")


def test_pickled_weights_are_not_loaded(folder: Any, cache: Path) -> None:
    (folder.path / "model.safetensors").rename(folder.path / "pytorch_model.bin")
    folder.refused("pytorch_model.bin", "safetensors are needed")


@pytest.mark.parametrize("other", ["adapter_model.safetensors", "model-00001-of-00002.safetensors"])
def test_files_that_only_one_engine_would_load(other: str, folder: Any, cache: Path) -> None:
    shutil.copy(folder.path / "model.safetensors", folder.path / other)
    folder.refused(other, "vLLM would load both")


def test_git_lfs_pointer(folder: Any, cache: Path) -> None:
    (folder.path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    folder.refused("model.safetensors", "Git LFS pointer")


def test_bytes_after_the_end(folder: Any, cache: Path) -> None:
    with open(folder.path / "model.safetensors", "ab") as file:
        file.write(b"rest")
    folder.refused("model.safetensors", "4 bytes after the last tensor")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1, exclude_max=True))
def test_truncated_at_any_byte(cut: float, whole: Any, cache: Path) -> None:
    data = (whole.path / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    # Half of the cuts in the header: it is a small part of the file.
    length = int(2 * cut * header) if cut < 0.5 else int(header + (2 * cut - 1) * (len(data) - header))
    path = cache / "cut.safetensors"
    path.write_bytes(data[:length])
    with pytest.raises(UsageFault) as caught:
        read_header(path)
    assert "truncated" in str(caught.value) and "cut.safetensors" in str(caught.value)
    if length > header:
        assert "tensor model." in str(caught.value)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 2000), value=st.integers(0, 255))
def test_a_flipped_header_byte_is_no_traceback(position: int, value: int, whole: Any, cache: Path) -> None:
    data = bytearray((whole.path / "model.safetensors").read_bytes())
    data[position] = value
    path = cache / "flipped.safetensors"
    path.write_bytes(data)
    try:
        tensors, _ = read_header(path)
    except UsageFault as fault:
        assert "flipped.safetensors" in str(fault)
    else:
        assert all(isinstance(tensor, Tensor) for tensor in tensors.values())
