"""One rank of two: an aligned model before and after `fully_shard`, for test_sharded.py.

    python sharded_ranks.py RANK CHECKPOINT FOLDER     (a port is on PYTHONPATH, its import name is PORT)

Writes FOLDER/<rank>.pt: for each way of sharding, log-probabilities [1, T - 1] of this rank's row. Shape legend: T tokens.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import SGD
from transformers import AutoModelForCausalLM

port = importlib.import_module(os.environ["PORT"])
WORLD = 2


def log_probabilities(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """ids [1, T] -> [T - 1] float32, with a graph where gradients are on."""
    logits = model(ids, use_cache=False).logits[0, :-1]
    return port.log_probability(logits, ids[0, 1:])


def shard(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """Every layer a unit of its own, the rest (embedding, norm, head) in the root, as trainers do."""
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights, gathered from all ranks."""
    return {name: weight.full_tensor() for name, weight in model.state_dict().items()}


def main(rank: int, checkpoint: str, folder: Path) -> None:
    """Runs every way of sharding; both ranks run the same collectives in the same order."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    ids = torch.randint(256, (WORLD, 1, 45), generator=torch.Generator().manual_seed(3))
    stock = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    plain = port.align(copy.deepcopy(stock))
    seen: dict[str, Any] = {}

    with torch.no_grad():
        seen["unsharded"] = log_probabilities(plain, ids[rank])
        seen["stock"] = log_probabilities(stock, ids[rank])
        seen["sharded, then aligned"] = log_probabilities(port.align(shard(copy.deepcopy(stock))), ids[rank])
        # float32 weights for the optimiser, bfloat16 for the forward: the cast comes after align
        halves = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        masters = shard(port.align(copy.deepcopy(stock)).float(), mp_policy=halves)
        seen["bfloat16 of float32 weights"] = log_probabilities(masters, ids[rank])

    sharded = shard(port.align(copy.deepcopy(stock)).train())
    sharded.gradient_checkpointing_enable()
    optimiser = SGD(sharded.parameters(), lr=1.0)
    values = log_probabilities(sharded, ids[rank])
    (-values.mean()).backward()
    seen["aligned, then sharded"] = values.detach()
    seen["gradients"] = {name: weight.grad.full_tensor() for name, weight in sharded.named_parameters()}
    optimiser.step()
    with torch.no_grad():
        seen["after a step"] = log_probabilities(sharded, ids[rank])

    (-sum(log_probabilities(plain, row).mean() for row in ids) / WORLD).backward()
    seen["gradients of one rank"] = {name: weight.grad for name, weight in plain.named_parameters()}
    plain.load_state_dict(whole(sharded))
    with torch.no_grad():
        seen["after a step, unsharded"] = log_probabilities(plain, ids[rank])

    torch.save(seen, folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
