"""A port in a plain torch loop: sample, score, one REINFORCE step, new weights into the running engine, sample again.

    python examples/plain_loop.py runs/smollm2/port CHECKPOINT [--stock] [--json]

vLLM runs in a child process, because it changes transformers' classes in its own. Each token's importance weight is
exp(learner - rollout), untruncated; with equal weights on both sides a port makes it exactly 1.0, and that is counted.
`--stock` runs the same loop without the port. The exit code is 1 if an aligned loop has another weight than 1.0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

PROMPTS, NEW_TOKENS, LEARNING_RATE = 8, 24, 1e-4
SHARED_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


class Sample(NamedTuple):
    """One response: token ids, and the log-probability with which the engine drew each of its tokens."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class Engine:
    """A plain vLLM engine in a process of its own, asked through a pipe."""

    def __init__(self, checkpoint: str) -> None:
        spawn = multiprocessing.get_context("spawn")  # with fork, the engine would inherit this process's torch threads
        self.pipe, its_end = spawn.Pipe()
        self.process = spawn.Process(target=_engine, args=(checkpoint, its_end))
        self.process.start()
        its_end.close()

    def ask(self, request: str, *arguments: Any) -> Any:
        """Runs one of the requests that _engine answers. Raises EOFError when the engine is gone."""
        self.pipe.send((request, arguments))
        return self.pipe.recv()

    def stop(self) -> None:
        """Ends the engine."""
        self.pipe.close()
        self.process.join(60)
        self.process.kill()


def _engine(checkpoint: str, pipe: Any) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=checkpoint, dtype="bfloat16", enforce_eager=True, logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True, max_model_len=256, max_num_seqs=16, kv_cache_memory_bytes=1 << 28, disable_log_stats=True,
    )  # fmt: skip

    def sample(prompts: list[list[int]], seed: int) -> list[Sample]:
        # Every field is given: vLLM fills a missing one from the checkpoint's generation_config.json.
        draws = [
            SamplingParams(
                temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
                frequency_penalty=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=0, seed=seed + i,
            )
            for i in range(len(prompts))
        ]  # fmt: skip
        done = llm.generate([{"prompt_token_ids": p} for p in prompts], draws, use_tqdm=False)
        responses = [one.outputs[0] for one in done]
        return [
            Sample(p, list(r.token_ids), [at[t].logprob for at, t in zip(r.logprobs, r.token_ids, strict=True)])
            for p, r in zip(prompts, responses, strict=True)
        ]

    def reload(folder: str) -> None:
        # Keys and values of the old weights are useless, so the prefix cache goes too.
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        if not llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not reset: requests were running")

    def ports() -> dict[str, Any]:
        return llm.collective_rpc("zm_port_state")[0]

    answers = {"sample": sample, "reload": reload, "ports": ports}
    try:
        while True:
            request, arguments = pipe.recv()
            pipe.send(answers[request](*arguments))
    except EOFError:
        pass
    finally:  # without it this process would wait for the engine's own at its end, for ever
        llm.llm_engine.engine_core.shutdown()


def score(model: Any, log_probability: Any, sample: Sample) -> Any:
    """The learner's log-probabilities of the very same tokens, [T] float32, with their graph."""
    import torch

    ids = torch.tensor([sample.prompt + sample.tokens])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt) - 1 : -1]
    return log_probability(logits, torch.tensor(sample.tokens), temperature=1.0)


def compare(model: Any, log_probability: Any, samples: list[Sample]) -> dict[str, Any]:
    """How many tokens have an importance weight of exactly 1.0, and how far the others are from it."""
    import torch

    with torch.no_grad():
        learner = torch.cat([score(model, log_probability, sample) for sample in samples])
    rollout = torch.cat([torch.tensor(sample.logprobs) for sample in samples])
    weights = (learner - rollout).exp()
    return {
        "tokens": weights.numel(),
        "exactly_one": int((weights == 1.0).sum()),
        "equal_bits": int((learner.view(torch.int32) == rollout.view(torch.int32)).sum()),
        "least": float(weights.min()),
        "largest": float(weights.max()),
    }


def reinforce(model: Any, log_probability: Any, samples: list[Sample]) -> None:
    """One step on a toy reward, the share of even token ids: L = -mean over tokens of w A, A = reward - mean reward."""
    import torch

    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    rewards = torch.tensor([sum(t % 2 == 0 for t in s.tokens) / len(s.tokens) for s in samples])
    for sample, advantage in zip(samples, rewards - rewards.mean(), strict=True):
        weights = (score(model, log_probability, sample) - torch.tensor(sample.logprobs)).exp()
        (-(advantage * weights).sum() / (len(samples) * NEW_TOKENS)).backward()
    optimiser.step()


def run(port: Path, checkpoint: str, stock: bool) -> dict[str, Any]:
    """The whole loop; returns one comparison for each time the engine sampled."""
    sys.path.insert(0, str(port))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(port), os.environ.get("PYTHONPATH", "")]))
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    package = next(path.parent.name for path in sorted(port.glob("zm_port_*/__init__.py")))
    os.environ["VLLM_PLUGINS"] = "" if stock else package
    engine = Engine(checkpoint)
    folder = tempfile.mkdtemp(prefix="weights-", dir=SHARED_MEMORY)
    try:
        import torch
        from transformers import AutoModelForCausalLM

        aligned = importlib.import_module(package)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        model = model if stock else aligned.align(model)
        ids = torch.randint(3, model.config.vocab_size, (PROMPTS, 32), generator=torch.Generator().manual_seed(0))
        prompts = [row[: 16 + 2 * i].tolist() for i, row in enumerate(ids)]
        result: dict[str, Any] = {"port": None if stock else package}

        def measure(name: str, samples: list[Sample]) -> list[Sample]:
            result[name] = compare(model, aligned.log_probability, samples)
            return samples

        first = measure("start", engine.ask("sample", prompts, 1))
        reinforce(model, aligned.log_probability, first)
        # The control: new weights in the learner, old ones in the engine. Weights of 1.0 would prove nothing here.
        measure("stepped_not_pushed", first)
        model.save_pretrained(folder)
        engine.ask("reload", folder)
        second = measure("pushed", engine.ask("sample", prompts, 1))
        engine.ask("reload", folder)
        third = measure("pushed_again", engine.ask("sample", prompts, 1))
        result["same_samples_after_equal_weights"] = second == third
        if not stock:
            result["calls"] = sum(engine.ask("ports")[package]["calls"].values())
        return result
    finally:
        engine.stop()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """The program; see the top of the file."""
    parser = argparse.ArgumentParser(description="A port in a plain torch loop.")
    parser.add_argument("port", type=Path, help="the folder `port` of a run")
    parser.add_argument("checkpoint", help="the checkpoint folder that the port was made for")
    parser.add_argument("--stock", action="store_true", help="the same loop without the port")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    given = parser.parse_args()
    result = run(given.port.resolve(), given.checkpoint, given.stock)
    steps = {name: value for name, value in result.items() if isinstance(value, dict)}
    for name, s in {} if given.json else steps.items():
        print(f"{name:20} {s['exactly_one']} of {s['tokens']} exactly 1.0, {s['least']:.6f} to {s['largest']:.6f}")
    if given.json:
        print(json.dumps(result))
    control = steps["stepped_not_pushed"]  # the step moved the learner, the engine does not know yet
    aligned = control["equal_bits"] < control["tokens"] and all(
        s["equal_bits"] == s["tokens"] > 0 for name, s in steps.items() if name != "stepped_not_pushed"
    )
    return 0 if given.stock or aligned else 1


if __name__ == "__main__":
    sys.exit(main())
