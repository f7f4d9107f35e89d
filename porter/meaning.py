"""Meaning before numerics: do the two sides compute different functions, or one function in other roundings?

A replay feeds both sides the same input. Roundings then move an output by a few units in its last place; another
scale, window, width or a bias that one side ignores moves it by far more. So does a site that is cut elsewhere, for
instance a scale inside the embedding on one side and behind it on the other: then the whole model is asked, in float32,
where roundings are a thousand times smaller. What decides is looked up in the facts of both modules, so that a person
can judge which side is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from porter.prompts import Prompts
    from porter.replay import Comparison
    from porter.sides import Learner, Rollout

ROUNDINGS = 8  # units in the last place that a chain of roundings moves a mean value by, generously
LEAST = 1e-3  # float32 sums in another order stay far below it
TOLD = {
    "attention": ("sliding_window", "scale", "softcap", "slopes", "sinks", "num_heads", "num_kv_heads", "head_size"),
    "rotary": ("rotary_dim", "base", "is_neox_style", "head_size"),
    "rms_norm": ("variance_epsilon", "variance_size_override", "has_weight"),
    "gated_activation": ("approximate",),
    "linear": ("input_size", "output_size"),
}
OPTIONS = {
    "attention": (
        "sliding_window",
        "use_sliding_window",
        "layer_types",
        "attn_logit_softcapping",
        "query_pre_attn_scalar",
    ),
    "rotary": ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings"),
    "rms_norm": ("rms_norm_eps", "layer_norm_eps"),
    "gated_activation": ("hidden_act", "hidden_activation"),
    "linear": ("attention_bias", "mlp_bias", "bias", "qkv_bias", "use_bias"),
    "lm_head": ("logit_scale", "logits_scaling", "final_logit_softcapping", "tie_word_embeddings"),
    "embedding": ("embedding_multiplier", "scale_embedding", "hidden_size"),
}
"""Options of a configuration that such an operation may be read from."""
FLOAT32_MEAN = 1e-3  # nats; float32 engines that compute one function stay near 1e-5


def same_function(rollout: Rollout, learner: Learner, prompts: Prompts) -> tuple[bool, float]:
    """Whether a float32 engine and a float32 learner agree to float32's roundings: (yes, mean |difference| in nats).

    Short and long requests: windows, chunks and positional tables show only in long ones.
    """
    ids = [*prompts.short(6), *prompts.long(2, 300)]
    outputs = rollout.generate(ids, [24] * len(ids))["outputs"]
    sequences = [{"ids": p + o["tokens"], "prompt": len(p)} for p, o in zip(ids, outputs, strict=True)]
    scored = learner.score(sequences).wait()["logprobs"]
    apart = [
        abs(a - b) for o, own in zip(outputs, scored, strict=True) for a, b in zip(o["logprobs"], own, strict=True)
    ]
    mean = sum(apart) / len(apart)
    return mean <= FLOAT32_MEAN, mean


def distance(c: Comparison) -> float:
    """Mean distance of the two outputs over the mean value; equal infinities count as no distance."""
    import torch

    apart = total = 0.0
    for a, b in zip(c.learner, c.rollout, strict=True):
        a, b = a.double().flatten(), b.reshape(a.shape).double().flatten()
        apart += float(torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf).sum())
        total += float(b.abs().sum())
    return apart / total if total else (0.0 if apart == 0 else float("inf"))


def allowed(c: Comparison) -> float:
    """The distance that roundings explain, in the dtype of the site."""
    import torch

    return max(ROUNDINGS * torch.finfo(c.learner[0].dtype).eps, LEAST)


def differences(
    comparisons: list[Comparison], rollout: dict[str, Any], model: Any, config: dict[str, Any]
) -> list[dict[str, Any]]:
    """One record per class of sites that is no rounding: {site, layer, operation, distance, rollout_does, ...}.

    rollout: what `WorkerProbe.zm_tree` returned; model: the learner; config: its configuration as a dictionary.
    """
    facts, found = {m["name"]: m for m in rollout["modules"]}, {}
    for c in comparisons:
        if not c.unequal or c.site in found:
            continue
        far, limit = distance(c), allowed(c)
        if far <= limit:
            continue
        known = facts.get(c.event.name, {"class": c.event.kind, "facts": {}})
        told = {k: v for k, v in known["facts"].items() if k in TOLD.get(c.event.operation, ())}
        named = type(model.get_submodule(c.module)).__name__ if c.module else type(model).__name__
        before = OPTIONS["rotary"] if c.part == "glue" and c.event.operation == "attention" else ()
        options = {k: config[k] for k in (*before, *OPTIONS.get(c.event.operation, ())) if config.get(k) is not None}
        found[c.site] = {
            "site": c.site,
            "layer": c.layer,
            "operation": c.event.operation,
            "distance": far,
            "rollout_does": _told(known["class"], told),
            "learner_does": _told(f"{named}{' (what it computes before)' if c.part == 'glue' else ''}", c.arguments),
            "decided_by": _told("config.json", options)[:300] if options else "an option that only one side reads",
            "apart": f"{far:.1%} of the mean value apart on equal inputs, roundings explain {limit:.1%}",
        }
    return list(found.values())


def _told(name: str, facts: dict[str, Any]) -> str:
    facts = {
        k: {n: x for n, x in v.items() if not isinstance(x, list)} if isinstance(v, dict) else v
        for k, v in facts.items()
    }
    return name + (": " + ", ".join(f"{k} {v}" for k, v in facts.items() if v is not None) if facts else "")
