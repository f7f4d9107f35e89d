"""The aligned model under FSDP2: two gloo ranks give the bits of one, before and after an optimiser step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).with_name("sharded_ranks.py")
SAME = ("aligned, then sharded", "sharded, then aligned", "bfloat16 of float32 weights")


@pytest.fixture(scope="module")
def ranks(port_of: Any, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two ranks saw."""
    port, folder = port_of("bfloat16"), tmp_path_factory.mktemp("ranks")
    place = os.pathsep.join([str(Path(port.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": place, "PORT": port.__name__, "OMP_NUM_THREADS": "1"}
    started = []
    for rank in range(2):
        with (folder / f"{rank}.log").open("wb") as log:
            command = [sys.executable, str(PROGRAM), str(rank), str(tiny_checkpoint), str(folder)]
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    try:
        codes = [process.wait(180) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0], "\n".join((folder / f"{rank}.log").read_text()[-2000:] for rank in range(2))
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def unequal(a: torch.Tensor, b: torch.Tensor) -> int:
    """Log-probabilities whose bits differ."""
    assert a.dtype == b.dtype == torch.float32 and a.shape == b.shape == (44,) and not a.isnan().any()
    return int((a.view(torch.int32) != b.view(torch.int32)).sum())


@pytest.mark.parametrize("way", SAME)
def test_a_sharded_forward_has_the_bits_of_an_unsharded_one(ranks, way):
    assert [unequal(seen[way], seen["unsharded"]) for seen in ranks] == [0, 0]


def test_the_stock_model_has_other_bits(ranks):
    """Were align lost on the way, the test above would compare stock with stock: these are not the aligned bits."""
    assert all(unequal(seen["stock"], seen["unsharded"]) for seen in ranks)


def test_the_ranks_scored_different_rows(ranks):
    assert unequal(ranks[0]["unsharded"], ranks[1]["unsharded"])


def test_gradients_are_the_mean_over_the_ranks(ranks):
    """Each rank's share and their mean are rounded to bfloat16, and a tied weight sums four shares: two 2^-8 at most."""
    for seen in ranks:
        for name, mine in seen["gradients"].items():
            wanted = seen["gradients of one rank"][name].double()
            assert (mine.double() - wanted).norm() <= 2 * 2**-8 * wanted.norm(), name


def test_a_step_changes_the_forward_of_both_ranks_alike(ranks):
    """The gathered weights, loaded into one rank's aligned model, give the bits that the sharded one gives."""
    for seen in ranks:
        assert unequal(seen["after a step"], seen["aligned, then sharded"])
        assert unequal(seen["after a step"], seen["after a step, unsharded"]) == 0
