"""Looks at a checkpoint folder before an engine does: configuration, files, tensors, values.

vLLM answers a missing tensor or a NaN weight with NaN log-probabilities, transformers fills what is missing
at random, both without a word. So everything is checked here, without torch, and the first thing that is
wrong is one line that names the file, the tensor or the field.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from porter import checkpoint_files, checkpoint_shapes
from porter.checkpoint_config import (
    DTYPES,
    Progress,
    accepted_dtypes,
    check_architecture,
    check_dtype,
    check_heads,
    check_tokenizer,
    layer_count,
    read_json,
    sampling_notes,
)
from porter.errors import UsageFault
from porter.known_models import known_models
from porter.safetensors_files import Tensor, first_not_finite, read_header, same_bits

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Contents:
    """What a valid checkpoint folder holds. `tensors` is empty where there is a configuration alone."""

    config: dict[str, Any]
    architecture: str
    model_type: str
    dtype: str
    layers: int
    parameters: int
    bytes: int
    digest: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def validate(path: Path, *, allow_remote_code: bool = False, cache: Path, progress: Progress | None = None) -> Contents:
    """Everything about the checkpoint in `path`; `cache` keeps what is slow to find out.

    Raises:
        UsageFault: the checkpoint cannot be used; one line that names the file, the tensor or the field.
    """
    config_path = path / "config.json"
    config = read_json(config_path)
    notes: list[str] = []
    architecture, model_type = check_architecture(config_path, config, allow_remote_code, notes)
    dtype = check_dtype(config_path, config)
    check_heads(config_path, config)
    tensors, files = read_tensors(path)
    check_tokenizer(path)
    notes += sampling_notes(path, config)
    wanted = {"shapes": {}, "whole": [], "tied": {}, "layers": layer_count(config)}
    own = any(model.own_model and model.architecture == architecture for model in known_models().values())
    if own or not checkpoint_shapes.transformers_version():
        why = f"{architecture} is zm-port's own" if own else "transformers is not installed"
        notes.append(f"tensor names and shapes were not compared with the model: {why}")
    else:
        wanted = checkpoint_shapes.expected(path, config, cache, allow_remote_code)
        if tensors:
            _check_tensors(path, tensors, wanted, allow_remote_code, notes)
    _check_values(tensors, wanted, progress)
    dtype = dtype or _stored_dtype(config_path, tensors, notes)
    stored = {tensor.dtype for tensor in tensors.values() if tensor.dtype in DTYPES.values()}
    if stored - {DTYPES[dtype]}:
        notes.append(f"some weights are stored as {', '.join(sorted(stored))}; both sides read them as {dtype}")
    counted = {name: tensor.size for name, tensor in tensors.items()}
    if not counted:
        counted = {name: _product(shape) for name, shape in wanted["shapes"].items()}
    tied = {name for name, other in wanted["tied"].items() if other in counted}
    return Contents(
        config=config,
        architecture=architecture,
        model_type=model_type,
        dtype=dtype,
        layers=wanted["layers"],
        parameters=sum(size for name, size in counted.items() if name not in tied),
        bytes=sum(file.stat().st_size for file in files),
        digest=_digest(config, files, cache),
        tensors=tensors,
        notes=notes,
    )


def _stored_dtype(path: Path, tensors: dict[str, Tensor], notes: list[str]) -> str:
    """The type most weights are stored in, for a configuration that names none."""
    sizes = {name: sum(t.size for t in tensors.values() if t.dtype == code) for name, code in DTYPES.items()}
    if not any(sizes.values()):
        raise UsageFault(
            f"{path}: dtype: missing, and there are no weights to read it from; accepted: {accepted_dtypes()}"
        )
    dtype = max(sizes, key=lambda name: sizes[name])
    notes.append(f"config.json names no dtype: {dtype}, as the weights are stored")
    return dtype


def _product(shape: list[int]) -> int:
    result = 1
    for length in shape:
        result *= length
    return result


def _digest(config: dict[str, Any], files: list[Path], cache: Path) -> str:
    """Over the configuration and every byte of the weights."""
    held = [[file.name, checkpoint_files.digest(file, cache)] for file in sorted(files)]
    return hashlib.sha256(json.dumps([config, held], sort_keys=True).encode()).hexdigest()


def read_tensors(path: Path) -> tuple[dict[str, Tensor], list[Path]]:
    """(tensors by name, the files that they are in) of a folder."""
    files = _weight_files(path)
    tensors: dict[str, Tensor] = {}
    for file, names in files.items():
        found, _ = read_header(file)
        for name in names - found.keys():
            raise UsageFault(f"{file}: tensor {name} is missing: {INDEX} says that it is in this file")
        for name in sorted(found.keys() & tensors.keys()):
            raise UsageFault(f"{file}: tensor {name} is also in {tensors[name].file.name}")
        tensors |= found
    return tensors, list(files)


def _weight_files(path: Path) -> dict[Path, set[str]]:
    """Each file of weights, with the tensors that the index wants in it; empty for a bare configuration."""
    index, single = path / INDEX, path / SINGLE
    present = {file.name for file in path.glob("*.safetensors")}
    if not index.exists():
        if single.exists() and len(present) > 1:
            others = ", ".join(sorted(present - {SINGLE}))
            raise UsageFault(f"{path}: beside {SINGLE} there is {others}: vLLM would load both", "move it away")
        if single.exists():
            return {single: set()}
        if present:
            raise UsageFault(f"{path}: no {INDEX} to say what is in {', '.join(sorted(present))[:200]}")
        old = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
        if old:
            raise UsageFault(f"{path / old[0]}: safetensors are needed: pickled weights can run code when loaded")
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UsageFault(f"{index}: weight_map: names of tensors and files are needed")
    files: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        if name != Path(name).name or len(os.fsencode(name)) > 255 or not (path / name).is_file():
            where = path / checkpoint_files.shortened(name)
            raise UsageFault(f"{where}: missing: {INDEX} wants tensor {tensor} from it")
        files.setdefault(path / name, set()).add(tensor)
    if single.exists() and single not in files:
        raise UsageFault(f"{path}: transformers would load {SINGLE}, vLLM the files of {INDEX}", "keep one of them")
    return files


def _check_tensors(
    path: Path,
    tensors: dict[str, Tensor],
    wanted: dict[str, Any],
    allow_remote_code: bool,
    notes: list[str],
) -> None:
    """Every tensor of the model is there, with its shape and a type that is covered."""
    shapes, tied = wanted["shapes"], wanted["tied"]
    missing = [name for name in shapes if name not in tensors and name not in tied]
    wrong = [name for name, shape in shapes.items() if name in tensors and list(tensors[name].shape) != shape]
    surplus = sorted(tensors.keys() - shapes.keys() - tied.keys())
    if missing or wrong:
        if not surplus:  # nothing here could be what is missing under another name
            _raise_unloadable(path, tensors, shapes, missing, wrong)
        stored = {name: tensor.shape for name, tensor in tensors.items()}
        left = checkpoint_shapes.unloadable(path, stored, allow_remote_code)
        if left["missing"] or left["wrong"]:
            _raise_unloadable(path, tensors, shapes, missing or left["missing"], wrong or left["wrong"])
        notes.append("the tensors have other names than in transformers, which renames them when it loads")
    elif surplus:
        more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        notes.append(f"the model has no place for tensor {surplus[0]}{more}: not loaded")
    loaded = tensors.keys() if missing or wrong else tensors.keys() & shapes.keys()
    for name in sorted(loaded - set(wanted["whole"])):
        if tensors[name].dtype not in DTYPES.values():
            raise UsageFault(
                f"{tensors[name].file}: tensor {name}: dtype {tensors[name].dtype} is not covered; "
                f"accepted: {accepted_dtypes()}"
            )


def _raise_unloadable(
    path: Path, tensors: dict[str, Tensor], shapes: dict[str, list[int]], missing: list[str], wrong: list[str]
) -> None:
    for name in wrong:
        shape = f", the model needs {shapes[name]}" if name in shapes else ""
        raise UsageFault(f"{tensors[name].file}: tensor {name} has shape {list(tensors[name].shape)}{shape}")
    files = sorted({str(tensor.file) for tensor in tensors.values()})
    where = files[0] if len(files) == 1 else str(path)
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    raise UsageFault(f"{where}: tensor {missing[0]} is missing{more}: the configuration asks for it")


def _check_values(tensors: dict[str, Tensor], wanted: dict[str, Any], progress: Progress | None) -> None:
    """No weight is NaN or infinite, and a tensor that is tied to another equals it where both are stored."""
    total, seen = sum(tensor.size for tensor in tensors.values()), 0
    for name, tensor in tensors.items():
        bad = first_not_finite(tensor)
        if bad:
            raise UsageFault(f"{tensor.file}: tensor {name}: {bad[0]} at element {bad[1]} of {tensor.size}")
        seen += tensor.size
        if progress:
            progress("looking at the weights", seen / total if total else 1.0)
    for name, other in wanted["tied"].items():
        if name in tensors and other in tensors and not same_bits(tensors[name], tensors[other]):
            raise UsageFault(
                f"{tensors[name].file}: tensor {name} differs from {other}, to which config.json ties it "
                "(tie_word_embeddings): one engine would use the one, the other the other"
            )
