"""A norm of the learner's class on the rollout: its bits, on whatever weights its owner has at the moment."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from porter.kernels import learner_module
from porter.kernels.operation import CALLS
from porter.trace import unequal

NORMS = {
    "layer norm": lambda: nn.LayerNorm(48, eps=1e-5),
    "layer norm without bias": lambda: nn.LayerNorm(48, bias=False),
    "one more than the weight": lambda: Gemma2RMSNorm(48, eps=1e-6),
    "mean and no bias": lambda: CohereLayerNorm(hidden_size=48, eps=1e-5),
}


@pytest.mark.parametrize("name", NORMS)
def test_it_has_the_bits_of_the_learners_norm_and_follows_its_owner(name):
    learner, owner = NORMS[name]().bfloat16(), nn.Module()
    for parameter, value in learner.named_parameters():
        nn.init.normal_(value)
        owner.register_parameter(parameter, nn.Parameter(value.detach().clone()))
    kind = f"{type(learner).__module__}:{type(learner).__qualname__}"
    norm = learner_module.learner_module(kind, learner_module.attributes_of(learner), owner, "a site")
    x, before = torch.randn(5, 48).bfloat16(), CALLS["a site"]
    assert unequal(norm(x), learner(x)) == 0 and CALLS["a site"] == before + 1
    assert unequal(norm(x[2:3]), learner(x)[2:3]) == 0
    owner.weight = nn.Parameter(owner.weight.detach() * 2)  # as a reload of weights may do
    with torch.no_grad():
        learner.weight.mul_(2)
    assert unequal(norm(x), learner(x)) == 0
