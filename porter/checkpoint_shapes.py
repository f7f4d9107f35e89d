"""Which tensors a configuration asks for, as transformers itself builds the model, on the meta device.

    python -m porter.checkpoint_shapes FOLDER [--tensors FILE]

prints as JSON {"layers", "shapes": {name: shape}, "whole": [names without floats], "tied": {name: name}}, or
{"fault": text} for a configuration that transformers refuses. It is a program of its own because it imports
torch, which takes seconds that `zm-port inspect` does not have; `expected` runs it once per configuration.

With --tensors, a JSON file {name: shape}, it prints {"missing", "wrong"} instead: what is left over when
transformers renames and merges these tensors, as it does for a checkpoint that was written in another form.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from porter.errors import EngineFault, UsageFault
from porter.storage import atomic_write

_SECONDS = 180  # a configuration with absurd dimensions must not hang the command


@cache
def transformers_version() -> str | None:
    """The installed transformers, without importing it; None where there is none."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def causal_models() -> dict[str, tuple[str, ...]]:
    """model_type -> classes, of each causal language model of the installed transformers; empty if unknown.

    Read from the source, for the import takes seconds.
    """
    spec = importlib.util.find_spec("transformers") if transformers_version() else None
    if spec is None or not spec.submodule_search_locations:
        return {}
    source = Path(next(iter(spec.submodule_search_locations))) / "models" / "auto" / "modeling_auto.py"
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Assign) and "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES" in {
                target.id for target in node.targets if isinstance(target, ast.Name)
            }:
                pairs = ast.literal_eval(node.value.args[0])
                return {kind: (name,) if isinstance(name, str) else tuple(name) for kind, name in pairs}
    except (OSError, ValueError, AttributeError, IndexError, TypeError, SyntaxError):
        pass
    return {}


def expected(
    folder: Path, config: dict[str, Any], cache_folder: Path, allow_remote_code: bool = False
) -> dict[str, Any]:
    """What the program prints for `folder`, whose config.json says `config`; kept per configuration.

    Raises:
        UsageFault: transformers refuses the configuration.
        EngineFault: the program crashed or took too long.
    """
    program = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    shaping = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    key = json.dumps([shaping, transformers_version(), program, allow_remote_code], sort_keys=True)
    kept = cache_folder / "shapes" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        return json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        pass
    found = _run(folder, allow_remote_code)
    with suppress(OSError, EngineFault):  # not kept is no harm, it takes some seconds the next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(kept, json.dumps(found, sort_keys=True).encode())
    return found


def unloadable(
    folder: Path, shapes: dict[str, tuple[int, ...]], allow_remote_code: bool = False
) -> dict[str, list[str]]:
    """What is missing or has a wrong shape once transformers has renamed and merged the tensors."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump({name: list(shape) for name, shape in shapes.items()}, file)
        file.flush()
        return _run(folder, allow_remote_code, "--tensors", file.name)


def _run(folder: Path, allow_remote_code: bool, *options: str) -> dict[str, Any]:
    arguments = [str(folder), *options, *(["--allow-remote-code"] if allow_remote_code else [])]
    try:
        code, out, err = _program(arguments)
    except subprocess.TimeoutExpired:
        raise UsageFault(
            f"{folder / 'config.json'}: transformers has not built this model after {_SECONDS} s",
            "look for absurd dimensions",
        ) from None
    try:
        found = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        last = (err.strip().splitlines() or ["no output"])[-1]
        raise EngineFault(
            f"building {folder.name} on the meta device ended with exit code {code}: {last}",
            f"run it by hand: python -m porter.checkpoint_shapes {folder}",
        ) from None
    if "fault" in found:
        raise UsageFault(f"{folder / 'config.json'}: transformers refuses it: {found['fault']}")
    return found


def _program(arguments: list[str]) -> tuple[int, str, str]:
    """Runs this file as a program: (exit code, stdout, stderr)."""
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", "porter.checkpoint_shapes", *arguments]
    environment = {**os.environ, **quiet}
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment, check=False)
    return done.returncode, done.stdout, done.stderr


def _meta_model(folder: Path, allow_remote_code: bool) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=allow_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=allow_remote_code)


def _describe(model: Any) -> dict[str, Any]:
    """The tensors as `save_pretrained` would write them: experts apart, published names."""
    from transformers.core_model_loading import revert_weight_conversion

    state = revert_weight_conversion(model, model.state_dict())
    return {
        "layers": model.config.get_text_config().num_hidden_layers,
        "shapes": {name: list(tensor.shape) for name, tensor in state.items()},
        "whole": sorted(name for name, tensor in state.items() if not tensor.is_floating_point()),
        "tied": dict(model.all_tied_weights_keys),
    }


def _left_over(model: Any, shapes: dict[str, list[int]]) -> dict[str, list[str]]:
    """The part of a load that only looks at names. Source: transformers.core_model_loading, 5.19."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    steps = get_model_conversion_mapping(model)
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    renamings = [step for step in steps if not isinstance(step, WeightConverter)]
    targets = {pattern: step.target_patterns for step in converters for pattern in step.source_patterns}
    state = model.state_dict()
    found: set[str] = set()
    wrong: list[str] = []
    for name, shape in shapes.items():
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        found.add(renamed)
        if pattern is not None:  # one tensor may become several
            first, *others = targets[pattern]
            found.update(renamed.replace(first, other) for other in others)
        elif renamed in state and list(state[renamed].shape) != shape:
            wrong.append(name)
    needed = set(state) - set(model.all_tied_weights_keys)
    return {"missing": sorted(needed - found), "wrong": sorted(wrong)}


def main(arguments: list[str]) -> int:
    """The program; see the top of the file."""
    folder, options = Path(arguments[0]), arguments[1:]
    try:
        model = _meta_model(folder, "--allow-remote-code" in options)
    except ImportError:
        raise  # this machine's fault, not the configuration's
    except Exception as error:
        print(json.dumps({"fault": " ".join(f"{type(error).__name__}: {error}".split())[:400]}))
        return 0
    if options[:1] == ["--tensors"]:
        print(json.dumps(_left_over(model, json.loads(Path(options[1]).read_text(encoding="utf-8")))))
    else:
        print(json.dumps(_describe(model)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
