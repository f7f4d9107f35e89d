"""A tiny checkpoint that nothing is wrong with, and copies of it to break."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from porter import checkpoint, checkpoint_shapes, safetensors_files
from porter.checkpoint import Checkpoint
from porter.errors import ExitCode, UsageFault
from porter.safetensors_files import chunks, read_header
from porter.twin import make_twin

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "vocab_size": 128,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
Stored = dict[str, tuple[str, np.ndarray]]  # name -> (dtype, the bits as unsigned integers)


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint folder under test."""

    path: Path
    cache: Path

    def look(self, **options: Any) -> Checkpoint:
        """What zm-port says of it."""
        return checkpoint.resolve(str(self.path), cache=self.cache, **options)

    def refused(self, *words: str) -> None:
        """It is refused with one line that names all `words`, and exit code 2."""
        with pytest.raises(UsageFault) as caught:
            self.look()
        line = str(caught.value)
        assert caught.value.exit_code == ExitCode.usage
        assert "\n" not in line and all(word in line for word in words), line

    def change_config(self, **fields: Any) -> None:
        """Sets fields of config.json; None removes one."""
        path = self.path / "config.json"
        config = {**json.loads(path.read_text()), **fields}
        path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))

    def rewrite(self, change: Callable[[Stored], object]) -> None:
        """Rewrites model.safetensors after `change` has had its tensors."""
        path = self.path / "model.safetensors"
        stored = {
            name: (tensor.dtype, np.concatenate([*chunks(tensor)]).reshape(tensor.shape))
            for name, tensor in read_header(path)[0].items()
        }
        change(stored)
        header = [(name, dtype, array.shape) for name, (dtype, array) in stored.items()]
        safetensors_files.write(path, header, [array for _, array in stored.values()])

    def shard(self) -> dict[str, str]:
        """Splits model.safetensors in two; returns the index's weight_map."""
        path = self.path / "model.safetensors"
        tensors = list(read_header(path)[0].values())
        weight_map = {}
        for number, part in ((1, tensors[::2]), (2, tensors[1::2])):
            name = f"model-0000{number}-of-00002.safetensors"
            data = [np.concatenate([*chunks(tensor)]) for tensor in part]
            safetensors_files.write(self.path / name, [(t.name, t.dtype, t.shape) for t in part], data)
            weight_map |= {tensor.name: name for tensor in part}
        path.unlink()
        (self.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return weight_map


@pytest.fixture(autouse=True)
def shapes_in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the program that asks transformers here, which imports torch once and not once per configuration.

    A test marked `slow` has the program itself.
    """

    def program(arguments: list[str]) -> tuple[int, str, str]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = checkpoint_shapes.main(arguments)
        return code, out.getvalue(), ""

    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(checkpoint_shapes, "_program", program)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all: what transformers says of a configuration is asked once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> CheckpointFolder:
    """A tiny checkpoint that nothing is wrong with, made by the program that makes twins."""
    path = make_twin(CONFIG, tmp_path_factory.mktemp("whole") / "Tiny_Llama", seed=3)
    (path / "twin.json").unlink()
    return CheckpointFolder(path, cache)


@pytest.fixture
def folder(whole: CheckpointFolder, tmp_path: Path) -> CheckpointFolder:
    """A copy to break."""
    return CheckpointFolder(Path(shutil.copytree(whole.path, tmp_path / "broken")), whole.cache)
