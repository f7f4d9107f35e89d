"""The configuration of a twin: the published one with few layers and small dimensions, every feature kept.

Kept: the field names as published, head size, grouping of heads, tying, windows, rotary options, biases, some
layers of each kind in the published order. The MLP stays wide where it was (1536): on some CPUs a GEMM
computes one row in another order than several once it sums more than 1024 products. A twin must show that.
"""

from __future__ import annotations

import copy
import math
from typing import Any

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # what vLLM's CPU attention takes
_VOCABULARY = 1024
_WIDTH = 512  # heads times head size
_LAYER_LIMIT = 16

# What one fact is called across architectures. The first name is the one used when none is in the file.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "experts_used": ("num_experts_per_tok", "moe_topk", "moe_k"),
}
_INDEX_LISTS = ("_layers", "_idxs", "_indices", "_ids")
_PERIODS = ("_period", "_interval", "_pattern", "_step", "_freq")  # every n-th layer is of another kind
# Plain sizes, each with its largest value in a twin.
_LARGEST = {
    "intermediate_size": 1536,
    "ffn_dim": 1536,
    "n_inner": 1536,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "q_lora_rank": 128,
    "sliding_window": 32,
    "attention_chunk_size": 32,
    "hidden_size_per_layer_input": 64,
    "laurel_rank": 16,
    "vocab_size": _VOCABULARY,
    "vocab_size_per_layer_input": _VOCABULARY,
    "n_shared_experts": 2,
    "mamba_n_groups": 2,
    "mamba_num_groups": 2,
}


def shrink(published: dict[str, Any], effective: dict[str, Any]) -> dict[str, Any]:
    """A twin's config.json.

    Args:
        published: the content of the model's config.json.
        effective: the same with every default filled in, as transformers reads it; of the text part only.
    """
    twin = copy.deepcopy(published)
    text = twin["text_config"] if isinstance(twin.get("text_config"), dict) else twin
    sizes = _Sizes(text, effective)
    for name, largest in _LARGEST.items():
        value = effective.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > largest:
            sizes.put((name,), largest)
    _heads(sizes)
    _experts(sizes)
    _linear_attention(sizes)
    _layers(sizes)
    for part in {id(twin): twin, id(text): text}.values():
        _tokens(part)
    vision = twin.get("vision_config")
    if isinstance(vision, dict):
        for name in ("num_hidden_layers", "depth"):
            if isinstance(vision.get(name), int):
                vision[name] = min(vision[name], 2)
    return twin


class _Sizes:
    """Reads a fact under any of its names; writes it under the name the file uses."""

    def __init__(self, text: dict[str, Any], effective: dict[str, Any]) -> None:
        self.text, self.effective = text, effective

    def get(self, names: tuple[str, ...]) -> Any:
        """The value of the first name that has one."""
        return next((self.effective[n] for n in names if self.effective.get(n) is not None), None)

    def put(self, names: tuple[str, ...], value: Any) -> None:
        """Sets every name that the file has; the first that transformers knows where it has none."""
        present = [name for name in names if name in self.text]
        known = [name for name in names if self.effective.get(name) is not None]
        for name in present or known[:1]:
            self.text[name] = value


def _heads(sizes: _Sizes) -> None:
    hidden, heads = sizes.get(_NAMES["hidden"]), sizes.get(_NAMES["heads"])
    if not heads:
        sizes.put(_NAMES["hidden"], min(hidden or 256, 256))
        return
    kv_heads = sizes.get(_NAMES["kv_heads"]) or heads
    if sizes.effective.get("kv_lora_rank"):  # latent attention: its kernels fix the head sizes
        sizes.put(_NAMES["heads"], min(heads, 4))
        sizes.put(_NAMES["kv_heads"], min(kv_heads, 4))
        sizes.put(_NAMES["hidden"], min(hidden, 256))
        return
    head = sizes.effective.get("head_dim") or hidden // heads
    small = max((size for size in HEAD_SIZES if size <= head), default=HEAD_SIZES[0])
    group = heads // kv_heads
    if group == 1:
        kv_small = min(heads, 4 if small <= 64 else 2)
    else:
        kv_small = min(kv_heads, 2)
        group = min(group, max(_WIDTH // (kv_small * small), 2))
    heads_small = kv_small * group
    wide = heads_small * small
    square = hidden == heads * head
    if not square:  # hidden size and query width differ: keep on which side
        wide = wide // 2 if hidden < heads * head else min(wide * 2, _WIDTH)
    sizes.put(_NAMES["heads"], heads_small)
    sizes.put(_NAMES["kv_heads"], kv_small)
    sizes.put(_NAMES["hidden"], wide)
    if "head_dim" in sizes.text or not square:
        sizes.put(("head_dim",), small)


def _experts(sizes: _Sizes) -> None:
    experts, used = sizes.get(_NAMES["experts"]), sizes.get(_NAMES["experts_used"])
    if not experts or not used:
        return
    few = min(experts, 8)
    groups = sizes.effective.get("n_group")
    if isinstance(groups, int) and groups > 1:
        small = min(groups, 4)
        chosen = max(sizes.effective.get("topk_group", 1) * small // groups, 1)
        sizes.put(("n_group",), small)
        sizes.put(("topk_group",), chosen)
        used = min(used, chosen * few // small)
    if not sizes.effective.get("moe_intermediate_size"):  # then every expert is as wide as an MLP would be
        sizes.put(("intermediate_size",), min(sizes.effective.get("intermediate_size") or 256, 256))
    sizes.put(_NAMES["experts"], few)
    sizes.put(_NAMES["experts_used"], min(used, max(few // 2, 1)))


def _linear_attention(sizes: _Sizes) -> None:
    keys, values = (sizes.effective.get(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if keys and values:
        sizes.put(("linear_num_key_heads",), min(keys, 2))
        sizes.put(("linear_num_value_heads",), min(keys, 2) * (values // keys))
    # State-space layers: heads times head size is the expanded width.
    for heads, head, expand in (
        ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
        ("mamba_num_heads", "mamba_head_dim", "expand"),
        ("num_heads", "head_dim", "expand"),
    ):
        size, factor = sizes.effective.get(head), sizes.effective.get(expand)
        if sizes.effective.get(heads) and size and factor:
            width = next((sizes.text[n] for n in _NAMES["hidden"] if n in sizes.text), None)
            if width is None:
                sizes.put(_NAMES["hidden"], min(sizes.get(_NAMES["hidden"]), 256))
                width = min(sizes.get(_NAMES["hidden"]), 256)
            sizes.put((heads,), max(int(width * factor) // size, 1))
    if sizes.effective.get("mamba_d_ssm"):
        few = min(sizes.effective["mamba_n_heads"], 4)
        sizes.put(("mamba_n_heads",), few)
        sizes.put(("mamba_d_ssm",), few * sizes.effective["mamba_d_head"])


def _layers(sizes: _Sizes) -> None:
    """The shortest beginning of the layers that has every kind, two at least."""
    total, effective = sizes.get(_NAMES["layers"]), sizes.effective
    if not total:
        return
    if (effective.get("first_k_dense_replace") or 0) > 1:
        sizes.put(("first_k_dense_replace",), 1)
    lists = {name: value for name, value in effective.items() if isinstance(value, list) and value}
    # Two ways to speak of single layers: one value for each, or the indices of some.
    indices = {name: value for name, value in lists.items() if name.endswith(_INDEX_LISTS) and _ascending(value)}
    each = {name: value for name, value in lists.items() if len(value) == total and name not in indices}
    if effective.get("use_sliding_window") and effective.get("max_window_layers"):
        sizes.put(("max_window_layers",), 1)  # layers from there on have a window: one before, one after
        each.pop("layer_types", None)
        sizes.text.pop("layer_types", None)

    def kind(layer: int) -> str:
        return repr(([v[layer] for v in each.values()], [layer in v for v in indices.values()]))

    kinds = {kind(layer) for layer in range(total)}
    count = next((n for n in range(1, total) if {kind(layer) for layer in range(n)} == kinds), total)
    periods = [n for name, n in effective.items() if name.endswith(_PERIODS) and isinstance(n, int) and n < total]
    count = min(max(2, count, *periods), total, _LAYER_LIMIT)
    if (effective.get("num_kv_shared_layers") or 0) > 0:
        sizes.put(("num_kv_shared_layers",), count)
        count *= 2  # the last layers read the cache of earlier ones of their kind
    sizes.put(_NAMES["layers"], count)
    for name, value in sizes.text.items():
        if name in each and isinstance(value, list):
            sizes.text[name] = value[:count]
        elif name in indices and isinstance(value, list):
            sizes.text[name] = [layer for layer in value if layer < count]
        elif isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            sizes.text[name] = {key: item for key, item in value.items() if int(key) < count}


def _ascending(values: list[Any]) -> bool:
    return all(type(value) is int for value in values) and values == sorted(set(values))


def _tokens(part: dict[str, Any]) -> None:
    """Special tokens inside the small vocabulary."""
    last = _VOCABULARY - 1

    def inside(value: Any) -> Any:
        if isinstance(value, list):
            return [inside(item) for item in value]
        return min(value, last) if isinstance(value, int) and not math.isnan(value) else value

    for name in part:
        if name.endswith(("_token_id", "_token_ids", "_token_index")):
            part[name] = inside(part[name])
