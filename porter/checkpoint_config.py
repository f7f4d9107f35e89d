"""What a checkpoint's config.json and generation_config.json say, and whether zm-port can use it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from porter import checkpoint_shapes
from porter.checkpoint_files import require_file
from porter.errors import UsageFault
from porter.known_models import known_models
from porter.storage import without_nan

Progress = Callable[[str, float | None], None]  # what is being done, and the part of it that is done

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Sampling settings a checkpoint may bring, each with the values under which it does nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "temperature": (1,),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "diversity_penalty": (0,),
    "exponential_decay_length_penalty": (),
    "penalty_alpha": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_new_tokens": (),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint; every number in it is finite."""
    try:
        require_file(path)
        value = json.loads(path.read_text(encoding="utf-8"))
        endless: list[str] = []
        for name, held in value.items() if isinstance(value, dict) else ():
            without_nan(held, name, endless)
    except FileNotFoundError:
        raise UsageFault(
            f"{path.parent} has no {path.name}", "give a folder that transformers can load a model from"
        ) from None
    except OSError as error:
        raise UsageFault(f"{path}: cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise UsageFault(f"{path}: no complete JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise UsageFault(f"{path}: no readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageFault(f"{path}: a JSON object is needed, this is a {type(value).__name__}")
    if endless:
        raise UsageFault(f"{path}: {endless[0].replace(' was ', ': a finite number is needed, this is ')}")
    return value


def check_architecture(
    path: Path, config: dict[str, Any], allow_remote_code: bool, notes: list[str]
) -> tuple[str, str]:
    """(architecture, model_type) of a causal language model that the installed transformers has.

    `path` is the config.json that `config` was read from. What could not be looked up is added to `notes`.
    """
    for key in ("auto_map", "trust_remote_code"):
        if config.get(key) and not allow_remote_code:
            raise UsageFault(
                f"{path}: {key}: remote code without permission: the checkpoint brings Python code to run",
                "read that code, then pass --allow-remote-code, or remove the field to use transformers' own",
            )
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UsageFault(f"{path}: architectures: a list with the model's class is needed, this is {names!r}")
    architecture, kind = names[0], config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise UsageFault(f"{path}: model_type: a name is needed, this is {kind!r}")
    own = {model.architecture for model in known_models().values() if model.own_model}
    models = checkpoint_shapes.causal_models()
    if architecture in own or config.get("auto_map"):
        return architecture, kind
    if not models:
        notes.append("the architecture was not looked up: transformers is not installed")
        return architecture, kind
    classes = sorted({name for group in models.values() for name in group})
    version = checkpoint_shapes.transformers_version()
    if architecture not in classes:
        close = difflib.get_close_matches(architecture, classes, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise UsageFault(
            f"{path}: architectures: {architecture!r} is no causal language model of transformers {version}{meant}"
        )
    if kind not in models:
        close = difflib.get_close_matches(kind, models, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise UsageFault(f"{path}: model_type: {kind!r} is no causal language model of transformers {version}{meant}")
    if architecture not in models[kind]:
        # vLLM goes by the one field, transformers by the other.
        raise UsageFault(
            f"{path}: architectures: {architecture!r} and model_type {kind!r} are two models: "
            f"transformers would build {models[kind][0]}, vLLM {architecture}"
        )
    return architecture, kind


def check_dtype(path: Path, config: dict[str, Any]) -> str | None:
    """The type the configuration names, one of DTYPES; None where it names none."""
    if config.get("quantization_config"):
        raise UsageFault(
            f"{path}: quantization_config: quantised weights are not covered; accepted: {accepted_dtypes()}"
        )
    for part, prefix in ((config, ""), (config.get("text_config"), "text_config.")):
        for key in ("dtype", "torch_dtype"):
            value = part.get(key) if isinstance(part, dict) else None
            if value is not None:
                name = value.removeprefix("torch.") if isinstance(value, str) else value
                if not isinstance(name, str) or name not in DTYPES:
                    raise UsageFault(f"{path}: {prefix}{key}: {value!r} is not covered; accepted: {accepted_dtypes()}")
                return name
    return None


def check_heads(path: Path, config: dict[str, Any]) -> None:
    """Every key head serves the same number of query heads: transformers builds another model too, vLLM does not."""
    for part, prefix in ((config, ""), (config.get("text_config"), "text_config.")):
        if not isinstance(part, dict):
            continue
        heads, key_heads = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if type(heads) is int and type(key_heads) is int and heads > 0 and (key_heads < 1 or heads % key_heads):
            raise UsageFault(
                f"{path}: {prefix}num_key_value_heads: {key_heads} does not divide num_attention_heads: {heads}"
            )


def check_tokenizer(path: Path) -> None:
    """The folder's tokenizer.json, if there is one, can be loaded."""
    file = path / "tokenizer.json"
    if not file.exists():
        return
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return  # then no engine is installed either
    try:
        require_file(file)
        Tokenizer.from_file(str(file))
    except UsageFault:
        raise
    except OSError as error:
        raise UsageFault(f"{file}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # the library raises nothing narrower
        raise UsageFault(f"{file}: no tokenizer: {' '.join(str(error).split())[:300]}") from None


def accepted_dtypes() -> str:
    """DTYPES in words."""
    return ", ".join(DTYPES)


def layer_count(config: dict[str, Any]) -> int:
    """The number of layers by the configuration alone; 0 where it does not say."""
    for part in (config, config.get("text_config")):
        for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            if isinstance(part, dict) and isinstance(part.get(key), int):
                return part[key]
    return 0


def sampling_notes(path: Path, config: dict[str, Any]) -> list[str]:
    """What the checkpoint in folder `path` would do to sampling unasked, one note per file."""
    notes = []
    generation = path / "generation_config.json"
    for name, settings in (
        ("generation_config.json", read_json(generation) if generation.exists() else {}),
        ("config.json", config),
    ):
        brought = [
            f"{key}={settings[key]}"
            for key, neutral in NEUTRAL.items()
            if settings.get(key) is not None and settings[key] not in neutral
        ]
        if brought:
            notes.append(f"{name} brings {', '.join(brought)}: overridden by the run's own sampling settings")
    return notes
