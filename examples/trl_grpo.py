"""TRL's GRPOTrainer with vLLM rollouts, with stock kernels and with a port: TRL's own importance-sampling ratios.

    python examples/trl_grpo.py runs/smollm2/port CHECKPOINT [--side stock|port|both] [--json]

TRL's server mode, as it is, with three things put in:

- `FolderClient`: TRL sends new weights over NCCL, which needs CUDA. Here they go through a folder in shared memory.
  On a GPU, leave it out and start the server with `--weight-transfer-config '{"backend": "nccl"}'`.
- `align(model)` and the port in the server's PYTHONPATH: only with `--side port`.
- `AlignedGRPOTrainer`: TRL multiplies by the head's weight itself (its fused head), past the aligned module, and counts
  the positions of a padded prompt from the padding. This one asks the model for logits: only with `--side port`.

Needs `pip install trl`; run with trl 1.16.0. Two steps, the second one with weights that the first one has changed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PREFIX = "sampling/"
STEPS, GROUP, NEW_TOKENS = 2, 4, 24
SHARED_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


def tokenizer_folder(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint, or `folder` with a tokenizer of one word a token where the checkpoint has none: a twin."""
    if (checkpoint / "tokenizer.json").exists():
        return checkpoint
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    words = ["<unk>", "<s>", "</s>"] + [f"w{i}" for i in range(3, size)]
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return folder


@contextmanager
def server(checkpoint: Path, tokenizer: Path, log: Path, plugins: str) -> Iterator[str]:
    """vLLM's plain server; gives its address when it answers. The development mode is what TRL's client asks for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, "--tokenizer", tokenizer,
        "--dtype", "bfloat16", "--enforce-eager", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
        "--max-model-len", "256", "--kv-cache-memory-bytes", 1 << 28, "--host", "127.0.0.1", "--port", port,
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": plugins, "TORCHDYNAMO_DISABLE": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(list(map(str, command)), env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def trainer_classes(log_probability: Any) -> tuple[type, type]:
    """(TRL's trainer with FolderClient, the same with the port's log-probabilities)."""
    import torch
    import trl
    from safetensors.torch import save_file
    from trl.generation import vllm_generation

    class FolderClient(vllm_generation.VLLMClient):
        """Sends weights through a folder in shared memory: TRL's own way is NCCL, which needs CUDA."""

        def init_communicator(self, device: Any = 0) -> None:
            """Nothing to join."""

        def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
            """Writes the weights and lets the worker read them; TRL resets the prefix cache afterwards."""
            folder = Path(tempfile.mkdtemp(prefix="weights-", dir=SHARED_MEMORY))
            try:
                save_file({name: value.contiguous() for name, value in named_params}, folder / "model.safetensors")
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                self._post(f"{self.base_url}/collective_rpc", json=body)
            finally:
                shutil.rmtree(folder)

    vllm_generation.VLLMClient = FolderClient

    class AlignedGRPOTrainer(trl.GRPOTrainer):
        """TRL's trainer, with log-probabilities from the aligned model's logits."""

        def _get_per_token_logps_and_entropies(
            self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **rest
        ):
            logps, entropies = [], []
            size = batch_size or len(input_ids)
            for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True):
                positions = (mask.cumsum(-1) - 1).clamp(min=0)  # of the tokens, as the engine counts them
                logits = model(
                    input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False,
                    logits_to_keep=logits_to_keep + 1,
                ).logits[:, :-1]  # fmt: skip
                tokens = ids[:, -logits_to_keep:]
                rows = log_probability(logits.flatten(0, 1), tokens.flatten(), self.temperature)
                logps.append(rows.view(tokens.shape))
                if compute_entropy:
                    spread = torch.distributions.Categorical(logits=logits.float() / self.temperature)
                    entropies.append(spread.entropy())
            return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    return trl.GRPOTrainer, AlignedGRPOTrainer


def train(side: str, package: str, checkpoint: Path, work: Path) -> list[dict[str, float]]:
    """A few GRPO steps on a toy reward; returns TRL's sampling metrics of each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    port = importlib.import_module(package)
    tokenizer_at = tokenizer_folder(checkpoint, work / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_at)
    tokenizer.padding_side = "left"
    words = tokenizer.convert_ids_to_tokens(range(20, 60))
    prompts = [tokenizer.convert_tokens_to_string(words[i : i + 8 + 3 * i]) for i in range(4)]
    stock, aligned = trainer_classes(port.log_probability)
    with server(checkpoint, tokenizer_at, work / f"{side}.log", package if side == "port" else "") as address:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        trainer = (aligned if side == "port" else stock)(
            model=port.align(model) if side == "port" else model,
            reward_funcs=lambda completion_ids, **_: [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids],
            args=GRPOConfig(
                output_dir=str(work / side), use_cpu=True, bf16=False, max_steps=STEPS, learning_rate=1e-4,
                per_device_train_batch_size=2 * GROUP, num_generations=GROUP, max_completion_length=NEW_TOKENS,
                use_vllm=True, vllm_mode="server", vllm_server_base_url=address, vllm_server_timeout=300,
                logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts * 4}),
            processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
    return [
        {name.removeprefix(PREFIX): value for name, value in step.items() if name.startswith(PREFIX)}
        for step in trainer.state.log_history
        if any(name.startswith(PREFIX) for name in step)
    ]


def main() -> int:
    """The program; see the top of the file."""
    parser = argparse.ArgumentParser(description="TRL's GRPOTrainer with stock kernels and with a port.")
    parser.add_argument("port", type=Path, help="the folder `port` of a run")
    parser.add_argument("checkpoint", type=Path, help="the checkpoint folder that the port was made for")
    parser.add_argument("--side", choices=("stock", "port", "both"), default="both")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    given = parser.parse_args()
    port = given.port.resolve()
    sys.path.insert(0, str(port))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(port), os.environ.get("PYTHONPATH", "")]))
    os.environ["HF_HUB_OFFLINE"] = "1"
    package = next(path.parent.name for path in sorted(port.glob("zm_port_*/__init__.py")))
    with tempfile.TemporaryDirectory() as work:
        sides = ("stock", "port") if given.side == "both" else (given.side,)
        try:
            result = {side: train(side, package, given.checkpoint.resolve(), Path(work)) for side in sides}
        except BaseException:
            for log in sorted(Path(work).glob("*.log")):
                print(log.read_text()[-3000:], file=sys.stderr)
            raise
    if given.json:
        print(json.dumps(result))
    for side, steps in {} if given.json else result.items():
        for i, step in enumerate(steps, 1):
            ratio = [step[f"importance_sampling_ratio/{which}"] for which in ("min", "mean", "max")]
            print(f"{side:5} step {i}: importance sampling ratio min, mean, max: {ratio}")
    ratios = [v for step in result.get("port", []) for name, v in step.items() if "ratio" in name]
    return 0 if "port" not in result or (ratios and all(v == 1.0 for v in ratios)) else 1


if __name__ == "__main__":
    sys.exit(main())
