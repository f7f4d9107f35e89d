"""Every private import of vLLM in one place: the engine as zm-port drives it, and what runs inside its worker.

Used only in a process that has imported vLLM (see engine_server.py). The worker side is a `worker_extension_cls`:
named methods called through `collective_rpc`, so the unmodified engine can be recorded, probed and read back.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from porter.trace import token_axis

OPERATION_CLASSES = {
    # the base class that says what a vLLM module computes -> operation; the first match in the MRO decides
    "QKVParallelLinear": "linear",
    "LinearBase": "linear",
    "ParallelLMHead": "lm_head",
    "VocabParallelEmbedding": "embedding",
    "LogitsProcessor": "logits",
    "LayerNorm": "layer_norm",
    "Linear": "linear",  # modules of torch and transformers that vLLM's own backend leaves as they are
    "Conv1D": "linear",
    "Embedding": "embedding",
    "Attention": "attention",
    "RMSNorm": "rms_norm",
    "RotaryEmbeddingBase": "rotary",
    "SiluAndMul": "gated_activation",
    "GeluAndMul": "gated_activation",
    **dict.fromkeys(
        ("GELU", "NewGELU", "FastGELU", "QuickGELU", "GELUTanh", "ReLUSquaredActivation", "ReLU", "SiLU", "Tanh"),
        "activation",
    ),
}
ROW_WISE = ("linear", "rms_norm", "layer_norm", "activation", "gated_activation")
"""Operations that compute each row by itself."""
SUFFIXES = {"RMSNorm": "rms_norm", "LayerNorm": "layer_norm"}
"""How a class of a model's own is called that computes a known operation in a form of its own."""
FACTS = (
    "variance_epsilon", "variance_size_override", "has_weight", "head_size", "rotary_dim", "is_neox_style", "base",
    "num_heads", "num_kv_heads", "sliding_window", "output_sizes", "input_size", "output_size", "approximate", "scale",
    "soft_cap", "org_vocab_size", "embedding_dim",
)  # fmt: skip


def operation_of(module: torch.nn.Module) -> str | None:
    """Operation a vLLM module computes, by the first known class in its MRO; None when it only composes others."""
    named = next((OPERATION_CLASSES[c.__name__] for c in type(module).__mro__ if c.__name__ in OPERATION_CLASSES), None)
    return named or next((op for end, op in SUFFIXES.items() if type(module).__name__.endswith(end)), None)


def _facts(module: torch.nn.Module) -> dict[str, Any]:
    facts = {}
    for source in (module, getattr(module, "impl", None)):
        for name in FACTS:
            value = getattr(source, name, None)
            if isinstance(value, bool | int | float | str) or (
                isinstance(value, list | tuple) and all(isinstance(v, int) for v in value)
            ):
                facts.setdefault(name, list(value) if isinstance(value, tuple) else value)
    impl = getattr(module, "impl", None)
    if impl is not None:
        facts["softcap"] = float(getattr(impl, "logits_soft_cap", 0) or 0)
        slopes = getattr(impl, "alibi_slopes", None)
        facts["slopes"] = None if slopes is None else [float(s) for s in slopes]
        facts["sinks"] = getattr(impl, "sinks", None) is not None
        facts["kv_cache_dtype"] = getattr(impl, "kv_cache_dtype", "auto")
    return facts


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    return []


def _packed_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """Name of a packed module -> names of its parts: the model's own table, and vLLM's convention where it has none."""
    table = {k: list(v) for k, v in (getattr(model, "packed_modules_mapping", None) or {}).items()}
    for name in {n.rpartition(".")[2] for n, _ in model.named_modules()} - set(table):
        for packed, parts in (("qkv", "q k v"), ("gate_up", "gate up")):
            if name.startswith(packed):
                table[name] = [part + name.removeprefix(packed) for part in parts.split()]
    return table


class WorkerProbe:
    """Methods that zm-port adds to the worker of its own engines. Named, because vLLM refuses callables over RPC."""

    def zm_tree(self) -> dict[str, Any]:
        """Modules by name with class, operation, facts and parameter dtypes; packed names; configuration facts."""
        model = self.model_runner.get_model()
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        modules = []
        for name, module in model.named_modules(remove_duplicate=False):
            modules.append(
                {
                    "name": name,
                    "class": type(module).__name__,
                    "operation": operation_of(module),
                    "facts": _facts(module),
                    "parameters": {n: str(p.dtype) for n, p in module.named_parameters(recurse=False)},
                    "leaf": not any(True for _ in module.children()),
                }
            )
        return {
            "architecture": type(model).__name__,
            "modules": modules,
            "packed": _packed_names(model),
            "prefixes": {k: v for k, v in (mapper.orig_to_new_prefix if mapper else {}).items() if isinstance(v, str)},
            "block_size": self.model_runner.cache_config.block_size,
            "threads": torch.get_num_threads(),
        }

    def zm_record_start(self) -> int:
        """From now on, inputs and outputs of every operation are kept (cloned: several kernels write in place).

        Each module's forward is wrapped, not hooked: vLLM's transformers backend calls some forwards directly.
        """
        self.zm_events, self.zm_unwrapped = [], []

        def wrapped(name, module):
            stock, kind, operation = module.forward, type(module).__name__, operation_of(module)

            def forward(*args, **kwargs):
                inputs = [t.detach().clone() for t in _tensors(list(args) + list(kwargs.values()))]
                output = stock(*args, **kwargs)
                outputs = [t.detach().clone() for t in _tensors(output)]
                self.zm_events.append((name, kind, operation, inputs, outputs))
                return output

            return forward

        for name, module in self.model_runner.get_model().named_modules():
            if operation_of(module) is not None:
                self.zm_unwrapped.append((module, module.__dict__.get("forward")))
                module.forward = wrapped(name, module)
        return len(self.zm_unwrapped)

    def zm_record_stop(self, folder: str) -> int:
        """Writes events.json and tensors.safetensors, unwraps the modules, returns the number of events."""
        for module, before in self.zm_unwrapped:
            del module.forward
            if before is not None:
                module.forward = before
        events, tensors = [], {}
        for index, (name, cls, operation, inputs, outputs) in enumerate(self.zm_events):
            for part, values in (("in", inputs), ("out", outputs)):
                for j, t in enumerate(values):
                    tensors[f"{index}.{part}.{j}"] = t.contiguous()
            events.append(
                {
                    "name": name,
                    "class": cls,
                    "operation": operation,
                    "inputs": len(inputs),
                    "outputs": len(outputs),
                }
            )
        modules = dict(self.model_runner.get_model().named_modules())
        for name in {e["name"] for e in events if e["operation"] == "rotary"}:
            for buffer, value in modules[name].named_buffers():
                tensors[f"buffer.{name}.{buffer}"] = value.clone()
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(Path(folder) / "tensors.safetensors"))
        (Path(folder) / "events.json").write_text(json.dumps(events))
        self.zm_events = []
        return len(events)

    def zm_probe_rows(self, folder: str) -> dict[str, dict[str, int]]:
        """Calls recorded row-wise modules again on single rows and odd batches.

        Returns for each module name {"repeat": unequal elements of an identical second call, "1", "2", "7": unequal
        elements of that many rows on their own}.
        """
        from safetensors import safe_open

        modules = dict(self.model_runner.get_model().named_modules())
        result: dict[str, dict[str, int]] = {}
        with torch.inference_mode(), safe_open(str(Path(folder) / "tensors.safetensors"), "pt") as tensors:
            for index, event in enumerate(json.loads((Path(folder) / "events.json").read_text())):
                if event["operation"] not in ROW_WISE or event["name"] in result:
                    continue
                inputs = [tensors.get_tensor(f"{index}.in.{j}") for j in range(event["inputs"])]
                outputs = [tensors.get_tensor(f"{index}.out.{j}") for j in range(event["outputs"])]
                axis = token_axis(outputs[0])
                rows = outputs[0].shape[axis]
                outputs = [
                    t for t in outputs if t.ndim > axis and t.shape[axis] == rows
                ]  # not a bias to be added later
                if any(t.shape[axis] != rows for t in inputs):
                    continue
                module, unequal = modules[event["name"]], {"repeat": 0, "1": 0, "2": 0, "7": 0}
                for size in (n for n in (rows, 1, 2, 7) if n <= rows):
                    for start in {0, rows - size}:
                        again = _tensors(module(*[t.narrow(axis, start, size).clone() for t in inputs]))
                        parts = [t.narrow(axis, start, size) for t in outputs]
                        bad = sum(_unequal(a, b) for a, b in zip(again, parts, strict=False))
                        unequal["repeat" if size == rows else str(size)] += bad
                result[event["name"]] = unequal
        return result

    def zm_ports(self) -> dict[str, Any]:
        """What the ports in this worker did; empty when no port was loaded at all, which vLLM would only log."""
        state = getattr(self, "zm_port_state", None)
        return state() if state is not None else {}

    def zm_environment(self) -> dict[str, Any]:
        """What the worker actually runs with: read back here, not assumed outside."""
        import os

        import vllm
        from vllm import envs

        return {
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "affinity": sorted(os.sched_getaffinity(0)),
            "attention_split_kv": bool(envs.VLLM_CPU_ATTN_SPLIT_KV),
            "vllm": vllm.__version__,
            "capability": torch.backends.cpu.get_cpu_capability(),
            "eager": bool(self.model_config.enforce_eager),
        }


def _unequal(a: torch.Tensor, b: torch.Tensor) -> int:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return int((a.contiguous().view(kind) != b.contiguous().view(kind)).sum())


class Engine:
    """One vLLM engine in its default multi-process mode, driven step by step so that progress can be told."""

    def __init__(self, path: str, **settings: Any):
        from vllm import LLM

        self.llm = LLM(
            model=path,
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            worker_extension_cls="porter.vllm_adapter.WorkerProbe",
            disable_log_stats=True,
            **settings,
        )
        self.engine = self.llm.llm_engine
        self.requests = 0

    def call(self, method: str, *args: Any) -> Any:
        """A named method inside the worker; the answer of its first rank."""
        return self.llm.collective_rpc(method, args=tuple(args))[0]

    def generate(
        self, prompts, max_tokens, temperature=1.0, prompt_logprobs=False, progress=None
    ) -> list[dict[str, Any]]:
        """Samples max_tokens[i] tokens for prompt i (ids), all requests at once.

        Every sampling field is given explicitly, so that nothing a checkpoint brings can leak in. Returns for each
        request {tokens, logprobs (float32 values), cached, prompt_logprobs?}.
        """
        from vllm import SamplingParams

        names = []
        for ids, limit in zip(prompts, max_tokens, strict=True):
            params = SamplingParams(
                n=1, temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0,
                repetition_penalty=1.0, max_tokens=limit, min_tokens=0, ignore_eos=True, logprobs=0, detokenize=False,
                prompt_logprobs=0 if prompt_logprobs else None, stop=None, stop_token_ids=None, logit_bias=None,
                bad_words=None, skip_special_tokens=False,
            )  # fmt: skip
            names.append(str(self.requests))
            self.requests += 1
            self.engine.add_request(names[-1], {"prompt_token_ids": list(ids)}, params)
        finished, done, told = {}, 0, time.monotonic()
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    finished[output.request_id] = output
                    done += len(output.outputs[0].token_ids)
            if progress and time.monotonic() - told > 2:  # rarely: the engine is being timed
                told = time.monotonic()
                progress(done)
        return [self._result(finished[name], prompt_logprobs) for name in names]

    @staticmethod
    def _result(output, prompt_logprobs: bool) -> dict[str, Any]:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        chosen = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
        result = {"tokens": tokens, "logprobs": chosen, "cached": output.num_cached_tokens or 0}
        if prompt_logprobs:
            ids = output.prompt_token_ids
            result["prompt_logprobs"] = [
                step[token].logprob for step, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)
            ]
        return result

    def forget_prefixes(self) -> None:
        """Empties the prefix cache, so that equal prompts are computed again."""
        self.llm.reset_prefix_cache()
