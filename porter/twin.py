"""Makes a twin: a checkpoint of the same architecture, small, with random weights.

    python -m porter.twin CONFIG_OR_FOLDER OUT [--seed 0] [--dtype bfloat16] [--full] [--allow-remote-code]

The weights are drawn so that no layer is idle: norms are not all ones, biases not zero, attention not flat.
The logits' standard deviation is near 2: sampling meets probable and improbable tokens alike.
Importing this module costs nothing: torch and transformers are imported by the program, in its own process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from porter.checkpoint import TWIN_FILE, Checkpoint
from porter.checkpoint_config import DTYPES, read_json
from porter.errors import EngineFault, ExitCode, PorterError, UsageFault
from porter.twin_config import shrink

LOGIT_STD = 2.0
CERTAIN = 0.5  # mean probability of the likeliest token from which a twin would test nothing
GROWTH = 4
_SECONDS = 900
_FORMAT = 2  # raise it when the same seed gives other weights


def make_twin(
    source: Checkpoint | dict[str, Any] | Path,
    folder: Path,
    seed: int = 0,
    dtype: str | None = None,
    *,
    full: bool = False,
    allow_remote_code: bool = False,
) -> Path:
    """Writes a twin of `source` to `folder` and returns it; a twin that is there already is used again.

    Args:
        source: a checkpoint, the content of a config.json, or the folder or file that holds it.
        folder: the new checkpoint folder.
        seed: of the weights; the same seed gives the same weights.
        dtype: bfloat16, float16 or float32; the source's own if not given.
        full: published dimensions, random weights.

    Raises:
        UsageFault: no twin can be made of this configuration.
        EngineFault: the program crashed, or the disk is full.
    """
    if isinstance(source, dict):
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "config.json").write_text(json.dumps(source), encoding="utf-8")
            return make_twin(Path(place), folder, seed, dtype, full=full, allow_remote_code=allow_remote_code)
    if isinstance(source, Checkpoint):
        dtype, source = dtype or source.dtype, source.path
    command = [sys.executable, "-P", "-m", "porter.twin", str(source), str(folder), "--seed", str(seed)]
    command += ["--dtype", dtype] if dtype else []
    command += ["--full"] if full else []
    command += ["--allow-remote-code"] if allow_remote_code else []
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env={**os.environ, **quiet},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EngineFault(f"making a twin in {folder} took more than {_SECONDS} s and was stopped") from None
    if done.returncode == 0:
        return folder
    last = (done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode}"])[-1]
    if done.returncode == ExitCode.usage:
        raise UsageFault(last)
    raise EngineFault(f"making a twin: {last}", f"run it by hand: {' '.join(command[3:])}")


def build(
    source: Path, folder: Path, seed: int, dtype: str | None, full: bool, allow_remote_code: bool = False
) -> dict[str, Any]:
    """What the program does; returns the record that is written beside the weights."""
    path = source / "config.json" if source.is_dir() else source
    published = read_json(path)
    named = published.get("dtype") or published.get("torch_dtype")
    dtype = dtype or (named if isinstance(named, str) and named in DTYPES else "bfloat16")
    names = published.get("architectures") or [published.get("model_type")]
    config_digest = hashlib.sha256(json.dumps(published, sort_keys=True).encode()).hexdigest()
    record = {
        "of": names[0],
        "seed": seed,
        "dtype": dtype,
        "full": full,
        "format": _FORMAT,
        "config": config_digest,
    }
    if folder.exists():
        if (folder / TWIN_FILE).exists() and read_json(folder / TWIN_FILE) == record:
            return record
        if not folder.is_dir() or any(folder.iterdir()):
            raise UsageFault(f"{folder} exists and is not this twin: an empty or new folder is needed")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
        try:
            _write(path, published, partial, record, allow_remote_code)
            partial.chmod(0o755)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise EngineFault(f"{folder} could not be written: {error.strerror or error}") from error
    return record


def _write(
    path: Path, published: dict[str, Any], partial: Path, record: dict[str, Any], allow_remote_code: bool
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    options = {"trust_remote_code": allow_remote_code}
    try:
        effective = AutoConfig.from_pretrained(path.parent, local_files_only=True, **options)
        twin = published if record["full"] else shrink(published, effective.get_text_config().to_dict())
        twin = {key: value for key, value in twin.items() if key != "torch_dtype"} | {"dtype": record["dtype"]}
        (partial / "config.json").write_text(json.dumps(twin, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        config = AutoConfig.from_pretrained(partial, local_files_only=True, **options)
        dtype = getattr(torch, record["dtype"])
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options).eval()
        _fill(model, record["seed"])
        _scale_logits(model, record["seed"])
    except (ImportError, OSError):
        raise
    except Exception as error:
        raise UsageFault(f"{path}: no twin can be made of it: {type(error).__name__}: {error}"[:400]) from error
    model.save_pretrained(partial)
    # transformers would write its own reading of the configuration: the published field names matter too.
    (partial / "config.json").write_text(json.dumps(twin, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (partial / TWIN_FILE).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _fill(model: Any, seed: int) -> None:
    """Draws every parameter. Matrices keep the size of their input; the rest stays near its start value."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    floats = [(n, b) for n, b in model.named_buffers() if n.endswith("bias") and b.is_floating_point()]
    with torch.no_grad():
        for name, parameter in [*sorted(model.named_parameters()), *sorted(floats)]:
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embeddings:
                parameter.copy_(noise)
            elif parameter.ndim >= 2 and not name.endswith(("bias", "A_log")):
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(parameter.float() + 0.1 * noise)


def _scale_logits(model: Any, seed: int) -> None:
    """Scales the output embedding until the logits' standard deviation is near LOGIT_STD.

    By steps of 2**(1/4), so that the weights do not depend on how this machine rounds. A head that is tied to a large
    embedding says the token it has just read, with certainty: then the embedding shrinks and the last norm grows.
    """
    import torch

    head = model.get_output_embeddings().weight
    ids = torch.randint(head.shape[0], (4, 32), generator=torch.Generator().manual_seed(seed))

    def logits() -> Any:
        return model(input_ids=ids, use_cache=False).logits.float()

    with torch.no_grad():
        for _ in range(32):
            seen = logits()
            std = float(seen.std(-1).mean())
            if not math.isfinite(std) or std == 0:
                raise ValueError(f"its random logits have the standard deviation {std}")
            tied = head is model.get_input_embeddings().weight
            if (
                tied
                and float((seen * LOGIT_STD / std).softmax(-1).amax(-1).mean()) > CERTAIN
                and _grow_last_norm(model, logits)
            ):
                head.mul_(1 / GROWTH)
                continue
            step = round(4 * math.log2(LOGIT_STD / std))
            if step == 0:
                return
            head.mul_(2 ** (step / 4))


def _grow_last_norm(model: Any, logits: Any) -> bool:
    """Multiplies what the last norm gives by GROWTH, whether it multiplies by its weight or by one more than that."""
    head = model.get_output_embeddings()
    norms = [m for m in model.modules() if m is not head and getattr(getattr(m, "weight", None), "ndim", 0) == 1]
    if not norms:
        return False
    weight, before = norms[-1].weight, float(logits().std())
    kept = weight.clone()
    for grown in (kept * GROWTH, kept + (kept + 1) * (GROWTH - 1)):
        weight.copy_(grown)
        if float(logits().std()) > before * GROWTH / 2:
            return True
    weight.copy_(kept)
    return False


def main(arguments: list[str] | None = None) -> int:
    """The program; see the top of the file."""
    parser = argparse.ArgumentParser(prog="python -m porter.twin", description="Makes a twin of a model.")
    parser.add_argument("source", type=Path, help="config.json, or the folder it is in")
    parser.add_argument("out", type=Path, help="the new checkpoint folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=sorted(DTYPES))
    parser.add_argument("--full", action="store_true", help="published dimensions")
    parser.add_argument("--allow-remote-code", action="store_true")
    given = parser.parse_args(arguments)
    # One thread: these models are small, and idle threads that spin are slow on a busy machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        build(given.source, given.out, given.seed, given.dtype, given.full, given.allow_remote_code)
    except PorterError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
