"""The tokenizer that a GGUF file carries, as the files that transformers and vLLM load.

Only byte-level BPE in the manner of GPT-2, with the pre-tokenizers below; another one would cut text
differently and is refused, for no later check would see it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from porter.errors import UsageFault

CONTROL = 3  # the GGUF's token_type of tokens that stand for no text
# tokenizer.ggml.pre -> whether every digit is a token of its own
PRE_TOKENIZERS = {"smollm": True, "gpt-2": False}


def build(file: Path, facts: dict[str, Any], context: int) -> dict[str, str]:
    """File name -> content; `facts` are the GGUF's keys, `context` is the longest sequence.

    Raises:
        UsageFault: a tokenizer that is not covered; names the key.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    def need(key: str, accepted: list[str] | None = None) -> Any:
        value = facts.get(f"tokenizer.ggml.{key}")
        if value is None or (accepted and value not in accepted):
            wanted = f"; accepted: {', '.join(accepted)}" if accepted else ""
            raise UsageFault(f"{file}: tokenizer.ggml.{key}: {value!r} is not covered{wanted}")
        return value

    need("model", ["gpt2"])
    split_digits = PRE_TOKENIZERS[need("pre", sorted(PRE_TOKENIZERS))]
    tokens, kinds = need("tokens"), need("token_type")
    merges = [tuple(merge.split(" ")) for merge in need("merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=bool(facts.get("tokenizer.ggml.add_space_prefix", False)))]
    if split_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])

    names = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = facts.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            names[f"{name}_token"] = tokens[index]
    if facts.get("tokenizer.ggml.add_bos_token"):
        bos = names["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    settings = {
        # The class that takes tokenizer.json as it is: GPT2Tokenizer would build its own and lose the digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "additional_special_tokens": [token for token in control if token not in names.values()],
        **names,
    }
    if "tokenizer.chat_template" in facts:
        settings["chat_template"] = facts["tokenizer.chat_template"]
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n",
    }
