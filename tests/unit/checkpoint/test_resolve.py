"""What MODEL may be, and what is said of a checkpoint that nothing is wrong with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from porter import checkpoint
from porter.checkpoint import Checkpoint
from porter.errors import EngineFault, ExitCode, UsageFault
from porter.safetensors_files import read_header


def test_a_whole_checkpoint(whole: Any, cache: Path) -> None:
    seen: list[float | None] = []
    found = whole.look(progress=lambda text, part: seen.append(part))
    assert found.path == whole.path and found.slug == "tiny_llama" and found.weights == "real"
    assert (found.architecture, found.model_type, found.dtype) == ("LlamaForCausalLM", "llama", "bfloat16")
    assert found.layers == 2 and found.source == "folder Tiny_Llama"
    tensors = read_header(whole.path / "model.safetensors")[0]
    assert found.parameters == sum(tensor.size for tensor in tensors.values())
    assert found.bytes == (whole.path / "model.safetensors").stat().st_size and seen[-1] == 1.0
    assert found.revision == whole.look().revision and len(found.revision) == 64
    assert Checkpoint.model_validate_json(found.model_dump_json()) == found
    assert found.notes == []


def test_the_revision_follows_the_configuration(folder: Any, whole: Any, cache: Path) -> None:
    folder.change_config(rms_norm_eps=1e-5)
    assert folder.look().revision != whole.look().revision


def test_shards_are_read_like_one_file(folder: Any, whole: Any, cache: Path) -> None:
    folder.shard()
    assert folder.look().parameters == whole.look().parameters


def test_a_configuration_alone_has_random_weights(tmp_path: Path, whole: Any, cache: Path) -> None:
    shutil.copy(whole.path / "config.json", tmp_path)
    found = checkpoint.resolve(str(tmp_path), cache=cache)
    assert found.weights == "random" and not found.has_weights
    assert found.parameters == whole.look().parameters and found.layers == 2


def test_a_twin_says_what_it_is(folder: Any, cache: Path) -> None:
    (folder.path / "twin.json").write_text('{"of": "LlamaForCausalLM", "seed": 3}')
    found = folder.look()
    assert found.weights == "random" and found.source == "twin of LlamaForCausalLM, seed 3"


@pytest.mark.parametrize("name", ["smollm2-135", "gpt-5", "", "..", "owner/name/more", "./nowhere", "/no/where"])
def test_unknown_model_names_what_exists(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cache)
    if name in ("", ".."):  # folders, but no checkpoints
        with pytest.raises(UsageFault, match="has no config.json"):
            checkpoint.resolve(name, cache=cache)
        return
    with pytest.raises(UsageFault) as caught:
        checkpoint.resolve(name, cache=cache)
    line = str(caught.value)
    assert all(word in line for word in (name, "smollm2-135m", "checkpoint folder", "owner/name"))
    assert ("did you mean smollm2-135m?" in line) == (name == "smollm2-135")


def test_a_file_is_no_model(whole: Any, cache: Path) -> None:
    with pytest.raises(UsageFault, match="config.json is a file"):
        checkpoint.resolve(str(whole.path / "config.json"), cache=cache)


def test_weights_for_a_slug(whole: Any, folder: Any, cache: Path) -> None:
    found = checkpoint.resolve("smollm2", checkpoint=whole.path, cache=cache)
    assert found.slug == "smollm2-135m" and found.path == whole.path
    folder.change_config(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    with pytest.raises(UsageFault, match="is not smollm2-135m's"):
        checkpoint.resolve("smollm2", checkpoint=folder.path, cache=cache)
    with pytest.raises(UsageFault, match="is no folder"):
        checkpoint.resolve("smollm2", checkpoint=folder.path / "nothing", cache=cache)


def test_memory_is_asked_for_before_loading(whole: Any, cache: Path, tmp_path: Path) -> None:
    found = whole.look()
    needed = checkpoint.estimate_memory(found, kv_bytes=1 << 30)
    assert checkpoint.estimate_memory(found, kv_bytes=1 << 30, engines=2) > needed > 1 << 30
    (tmp_path / "proc").mkdir()
    meminfo = tmp_path / "proc" / "meminfo"
    meminfo.write_text(f"MemAvailable: {needed // 1024 + 1} kB\n")
    checkpoint.require_memory(found, 1 << 30, root=tmp_path)
    meminfo.write_text(f"MemAvailable: {needed // 2048} kB\n")
    with pytest.raises(EngineFault, match=r"needs about 3\.5 GiB .* 1\.8 GiB are available") as caught:
        checkpoint.require_memory(found, 1 << 30, root=tmp_path)
    assert caught.value.exit_code == ExitCode.error
