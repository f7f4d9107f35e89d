"""Converts a GGUF file of the llama architecture to a checkpoint that transformers and vLLM load.

Done once per file and kept in the user's cache. Written to a folder beside the final one and renamed when it
is complete, so that whatever interrupts it leaves nothing half-written. Torch is not needed.

Shapes: V vocabulary, C features, H query heads, K key/value heads, D head size, F features of the MLP.
Keys and tensor names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from porter import gguf_tokenizer, safetensors_files
from porter.checkpoint_config import Progress
from porter.errors import EngineFault, UsageFault

RECORD = "conversion.json"
_FORMAT = 1  # raise it when the conversion writes something else for the same file
_STALE_SECONDS = 3600  # a partial folder this old belongs to no running conversion

# GGUF name -> transformers name; {} is the layer's index.
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_once(file: Path, parent: Path, *, slug: str, progress: Progress | None = None) -> Path:
    """The checkpoint folder made from `file`: the one in `parent` if it is there already.

    Raises:
        UsageFault: the file is broken, or holds something that is not covered.
        EngineFault: the disk is full, or the cache cannot be written.
    """
    with open(file, "rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    folder = parent / f"{slug}-{hashlib.sha256(f'{digest} {_FORMAT}'.encode()).hexdigest()[:16]}"
    if (folder / RECORD).exists():
        return folder
    partial = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(parent)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
        _convert(file, partial, {"from": file.name, "sha256": digest, "format": _FORMAT}, progress)
        partial.chmod(0o755)
        _move(partial, folder)
    except OSError as error:
        raise EngineFault(
            f"the checkpoint could not be written to {parent}: {error.strerror or error}",
            "free some space there, or set XDG_CACHE_HOME to another disk",
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _move(partial: Path, folder: Path) -> None:
    """Renames the finished folder; another process that was faster made the same one."""
    try:
        partial.rename(folder)
    except OSError:
        if not (folder / RECORD).exists():
            raise


def _remove_stale(parent: Path) -> None:
    """What a conversion that was killed outright has left."""
    for old in parent.glob(".partial-*"):
        if time.time() - old.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(old, ignore_errors=True)


def _convert(file: Path, folder: Path, record: dict[str, Any], progress: Progress | None) -> None:
    import gguf

    try:
        reader = gguf.GGUFReader(file)
        facts = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise UsageFault(f"{file}: no complete GGUF file: {error}") from error
    names = [_name(file, tensor.name) for tensor in reader.tensors]
    config = _config(file, facts, tied="lm_head.weight" not in names)
    shapes = [tuple(int(length) for length in reversed(tensor.shape)) for tensor in reader.tensors]
    needed = 2 * sum(map(math.prod, shapes)) + (16 << 20)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EngineFault(
            f"too little disk: the checkpoint takes {needed / 1e6:.0f} MB, {free / 1e6:.0f} MB are free "
            f"at {folder.parent}",
            "free some space there, or set XDG_CACHE_HOME to another disk",
        )

    def data() -> Iterator[np.ndarray]:
        for done, (tensor, name, shape) in enumerate(zip(reader.tensors, names, shapes, strict=True)):
            try:
                weight = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            except (ValueError, NotImplementedError) as error:
                raise UsageFault(f"{file}: tensor {tensor.name}: {error}") from error
            yield to_bfloat16(_reordered(name, weight, config))
            if progress:
                progress(f"converting {file.name} to bfloat16", (done + 1) / len(names))

    header = [(name, "BF16", shape) for name, shape in zip(names, shapes, strict=True)]
    safetensors_files.write(folder / "model.safetensors", header, data())
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special)
    for name, content in gguf_tokenizer.build(file, facts, config["max_position_embeddings"]).items():
        (folder / name).write_text(content, encoding="utf-8")
    kind = gguf.LlamaFileType(facts.get("general.file_type", 0)).name
    _write_json(folder / RECORD, {**record, "quantisation": kind.removeprefix("MOSTLY_")})


def _name(file: Path, name: str) -> str:
    """The transformers name of a GGUF tensor."""
    if name in _OUTER:
        return _OUTER[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER and parts[3] in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    raise UsageFault(f"{file}: tensor {name} is not covered: only plain llama files are")


def _config(file: Path, facts: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json from the GGUF's keys."""

    def need(key: str) -> Any:
        if key not in facts:
            raise UsageFault(f"{file}: key {key} is missing")
        return facts[key]

    if need("general.architecture") != "llama":
        raise UsageFault(f"{file}: general.architecture: {facts['general.architecture']!r} is not covered, only llama")
    for key in ("llama.rope.scaling.type", "llama.expert_count"):
        if facts.get(key) not in (None, "none", 0):
            raise UsageFault(f"{file}: {key}: {facts[key]!r} is not covered")
    heads, features = need("llama.attention.head_count"), need("llama.embedding_length")
    head = facts.get("llama.attention.key_length", features // heads)
    if facts.get("llama.rope.dimension_count", head) != head:
        raise UsageFault(f"{file}: llama.rope.dimension_count: partial rotary is not covered")
    eos = need("tokenizer.ggml.eos_token_id")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "head_dim": head,
        "hidden_act": "silu",
        "hidden_size": features,
        "intermediate_size": need("llama.feed_forward_length"),
        "max_position_embeddings": need("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": need("llama.block_count"),
        "num_key_value_heads": facts.get("llama.attention.head_count_kv", heads),
        "pad_token_id": facts.get("tokenizer.ggml.padding_token_id", eos),
        "rms_norm_eps": need("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": tied,
        "vocab_size": facts.get("llama.vocab_size", len(need("tokenizer.ggml.tokens"))),
    }


def _reordered(name: str, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Query and key rows as transformers has them: [H, 2, D/2, C]; GGUF has rotary pairs: [H, D/2, 2, C]."""
    for suffix, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f".{suffix}." in name:
            pairs = weight.reshape(config[heads], -1, 2, *weight.shape[1:])
            return pairs.swapaxes(1, 2).reshape(weight.shape)
    return weight


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Finite float32 values as the bits of bfloat16 (uint16), rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as out:
        out.write(json.dumps(value, indent=2, sort_keys=True) + "\n")
        out.flush()
        os.fsync(out.fileno())
