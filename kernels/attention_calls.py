"""Attention that a model writes out in torch operations, recognised while it runs and handed to one function.

Inside `AttentionCalls`, a product of queries and keys becomes a placeholder that remembers what is done with it: scales,
masks, position biases, the softmax. When the weights meet the values, `attend` is asked. A product that goes another way
is computed after all, by the operations it went through, so that code which is no attention keeps its values.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

HIDDEN = -1e4  # a bias at or below it hides a key

Stock = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Call:
    """One attention: q [B, H, T, D], k and v [B, G, S, D]; scores = scale q k^T + bias.

    bias: [B or 1, H or 1, T or 1, S] of what was added to the scores, or None. causal: a triangle is meant besides.
    stock: the operations that were written, on other q, k, v of these shapes.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    causal: bool
    stock: Stock
    eps: float = 0.0  # of the coarsest dtype that a part of the bias had

    def visible(self) -> torch.Tensor | None:
        """[B, 1, T, S] of bool: the keys that each query sees; None for all before it.

        Raises ValueError when heads see other keys.
        """
        (batch, _, queries, _), keys = self.query.shape, self.key.shape[2]
        if self.bias is None:
            return None if self.causal or queries == 1 else torch.ones(batch, 1, queries, keys, dtype=torch.bool)
        seen = self.bias > HIDDEN
        if not bool((seen == seen[:, :1]).all()):
            raise ValueError("attention: heads see other keys")
        return seen[:, :1].expand(batch, 1, queries, keys)

    def follows(self, slopes: torch.Tensor | None) -> bool:
        """True when what the bias adds to visible keys is slopes [H] times their position (Press et al. 2022), or nothing.

        Up to a constant of the row, which a softmax does not see, and to the rounding of each key's bias and slope.
        """
        if self.bias is None:
            return slopes is None
        seen, bias = self.bias > HIDDEN, self.bias.double()
        if slopes is None:
            return not bool(bias[seen].any())
        line = slopes.double()[:, None, None] * torch.arange(bias.shape[-1], dtype=torch.float64)
        apart = (bias - line).masked_fill(~seen, math.inf)
        room = max(self.eps, torch.finfo(self.bias.dtype).eps) * bias.masked_fill(~seen, 0).abs()
        least, where = apart.min(-1, keepdim=True)
        return bool(((apart - least <= room + room.gather(-1, where)) | ~seen).all())


@dataclass(frozen=True)
class _Made:
    """What a placeholder stands for: scores = scale q k^T + bias, or their softmax."""

    calls: AttentionCalls
    query: torch.Tensor  # as the first product had them: [.., T, D] and [.., S, D]
    key: torch.Tensor
    real: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (query, key) -> the tensor
    scale: float = 1.0
    biases: tuple[torch.Tensor, ...] = ()
    softmax: bool = False
    grid: tuple[int, ...] = ()  # (B, H), once a placeholder had four dimensions
    versions: tuple[int, ...] = ()  # of query and key at the product

    def unchanged(self) -> _Made:
        """Raises ValueError where an operand was written to after the product: its value is gone."""
        if self.versions != _versions(self.query, self.key):
            raise ValueError("attention: queries or keys are changed in place before their scores are used")
        return self


class _Memory:
    """What placeholders share that would be views of each other; `version` counts the writes."""

    version = 0


class Scores(torch.Tensor):
    """A placeholder: the shape and the dtype of scores or weights; `value` has their memory once something needed it."""

    made: _Made
    value: torch.Tensor | None = None
    memory: _Memory
    seen: int

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Remembers what is done with scores; computes them where that is not understood."""
        return _apply(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"Scores(shape={tuple(_plain(self).shape)})"


def _plain(x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def _placeholder(like: torch.Tensor, made: _Made, view_of: Scores | None = None) -> Scores:
    scores = like.as_subclass(Scores)
    scores.memory, scores.seen = (view_of.memory, view_of.seen) if view_of is not None else (_Memory(), 0)
    scores.made = replace(made, grid=tuple(like.shape[:2])) if like.ndim == 4 else made
    return scores


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((), dtype=dtype).expand(shape)


SHAPED = ("view", "reshape", "contiguous", "unsqueeze", "squeeze", "flatten")
CAST = ("to", "float", "half", "bfloat16", "type_as", "type")
IN_PLACE = ("__imul__", "__itruediv__", "__iadd__", "mul_", "div_", "add_", "masked_fill_")
KNOWN = ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "names")  # without memory
NAMES = {"__mul__": "mul", "__rmul__": "mul", "__imul__": "mul", "mul_": "mul", "multiply": "mul",
         "__truediv__": "div", "__itruediv__": "div", "div_": "div", "true_divide": "div", "divide": "div",
         "__add__": "add", "__radd__": "add", "__iadd__": "add", "add_": "add", "masked_fill_": "masked_fill",
         "__matmul__": "matmul", "bmm": "matmul"}  # fmt: skip


def _name(func: Callable) -> tuple[str, str]:
    """A function's own name, and the one name of all that do the same."""
    name = getattr(func, "__name__", "")
    return name, NAMES.get(name, name)


def _versions(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(0 if x.is_inference() else x._version for x in tensors)


def _number(x: Any) -> float | None:
    if isinstance(x, bool) or isinstance(x, Scores):
        return None
    if isinstance(x, int | float):
        return float(x)
    return float(x) if isinstance(x, torch.Tensor) and x.numel() == 1 and not x.requires_grad else None


def _written(name: str, scores: Scores, kwargs: dict[str, Any]) -> None:
    """Counts a write. Raises ValueError where a view of these scores was written to before: its write is not here."""
    if scores.seen != scores.memory.version:
        raise ValueError("attention: scores are changed in place through a view")
    in_place = name in IN_PLACE or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if in_place or kwargs.get("inplace"):
        scores.memory.version += 1
        scores.seen = scores.memory.version


def _apply(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    name, known = _name(func)
    scores = next((a for a in args if isinstance(a, Scores)), None)  # those given by name are computed
    if scores is not None:
        _written(name, scores, kwargs)
    if scores is not None and scores.value is None:
        made = scores.made
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if attribute in KNOWN or name in ("size", "dim", "numel", "is_floating_point", "stride", "__len__"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if known == "matmul" and made.softmax and args[0] is scores and isinstance(args[1], torch.Tensor):
            found = made.calls.ask(func, scores, args[1])
            if found is not None:
                return found
        elif args[0] is scores or known in ("add", "mul", "where"):
            following = _following(known, made, scores, args, kwargs)
            if following is not None:
                return _next(func, following, scores, args, kwargs)
    return func(*_really(args), **{k: _really((v,))[0] for k, v in kwargs.items()})


def _following(known: str, made: _Made, scores: Scores, args: tuple, kwargs: dict[str, Any]) -> _Made | None:
    """What one more operation makes of it; None where it is not understood."""
    other, dims = next((a for a in args if a is not scores), None), _plain(scores).ndim
    if known in SHAPED or (known in CAST and (known != "type" or len(args) > 1)):
        return made
    if known == "dropout":
        p, training = _argument(args, kwargs, 1, "p", 0.5), _argument(args, kwargs, 2, "training", True)
        if p and training:
            raise ValueError("attention: its dropout is not covered, set it to 0")
        return made
    if made.softmax:
        return None
    if known in ("mul", "div") and _number(other) is not None:
        factor = _number(other) if known == "mul" else 1 / _number(other)
        return replace(made, scale=made.scale * factor, biases=tuple(b * factor for b in made.biases))
    if known == "add" and isinstance(other, torch.Tensor) and not kwargs and not other.requires_grad:
        return replace(made, biases=(*made.biases, _bias(other, dims)))
    if known == "masked_fill" and len(args) == 3 and (_number(args[2]) or 0) <= HIDDEN:
        return replace(made, biases=(*made.biases, _bias(_hiding(args[1]), dims)))
    if known == "where" and len(args) == 3 and args[1] is scores and (_number(args[2]) or 0) <= HIDDEN:
        return replace(made, biases=(*made.biases, _bias(_hiding(~args[0]), dims)))
    if known == "softmax" and _argument(args, kwargs, 1, "dim", None) in (-1, dims - 1):
        return replace(made, softmax=True)
    return None


def _argument(args: tuple, kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _bias(bias: torch.Tensor, dims: int) -> torch.Tensor:
    """What is added to scores of so many dimensions, with as many, as broadcasting reads it."""
    return bias.reshape((1,) * (dims - bias.ndim) + bias.shape)


def _hiding(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)


def _next(func: Callable, made: _Made, scores: Scores, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The placeholder after one more operation."""
    (name, known), before, plain = _name(func), scores.made, _plain(scores)

    def real(query, key):
        done = before.real(query, key)
        return func(*[done if a is scores else a for a in args], **kwargs)

    if known in SHAPED:
        like = getattr(plain, "reshape" if known == "view" else known)(*args[1:], **kwargs)
        if like.shape[-2:] != plain.shape[-2:]:
            return func(*_really(args), **kwargs)
    elif known in CAST:
        one = getattr(torch.empty((), dtype=plain.dtype), known)(*[_really((a,))[0] for a in args[1:]], **kwargs)
        like = _empty(plain.shape, one.dtype)
    else:
        shape, dtype = plain.shape, kwargs.get("dtype") or plain.dtype
        if known == "add":
            other = next(a for a in args if a is not scores)
            shape, dtype = torch.broadcast_shapes(shape, other.shape), torch.result_type(plain, other)
        like = _empty(shape, dtype)
    made = replace(made, real=real)
    if name in IN_PLACE:
        scores.made = made
        return scores
    may_be_a_view = known in SHAPED or (known in CAST and like.dtype == plain.dtype)
    return _placeholder(like, made, scores if may_be_a_view else None)


def _really(values: Any) -> list[Any]:
    """Placeholders among the values computed, once each, everything else as it is."""
    found = []
    for v in values:
        if isinstance(v, Scores):
            if v.value is None:
                made = v.made.unchanged()
                v.value = made.real(made.query, made.key)
            v = v.value
        elif isinstance(v, list | tuple) and any(isinstance(x, Scores) for x in v):
            v = type(v)(_really(v))
        found.append(v)
    return found


def _product(calls: AttentionCalls, func: Callable, args: tuple, kwargs: dict[str, Any]) -> _Made | None:
    """The product of queries [.., T, D] and transposed keys [.., D, S] that this call may be."""
    _, known = _name(func)
    scale, biases, first = 1.0, (), 0
    if known == "baddbmm":
        beta, scale, first = kwargs.get("beta", 1), float(kwargs.get("alpha", 1)), 1
        given = [*args, *(kwargs[k] for k in ("batch1", "batch2") if k in kwargs)]
        biases = (given[0] * beta,) if beta else ()
        rest = {k: v for k, v in kwargs.items() if k not in ("batch1", "batch2")}
    elif known == "matmul" and not kwargs:
        given, rest = list(args), {}
    else:
        return None
    pair = given[first : first + 2]
    if len(pair) < 2 or not all(isinstance(x, torch.Tensor) and x.ndim in (3, 4) for x in pair):
        return None
    query, transposed = pair
    if query.ndim != transposed.ndim or not query.is_floating_point() or query.shape[-1] != transposed.shape[-2]:
        return None

    def real(query, key):
        return func(*given[:first], query, key.transpose(-1, -2), **rest)

    key = transposed.transpose(-1, -2)
    return _Made(calls, query, key, real, scale, biases, versions=_versions(query, key))


class AttentionCalls(TorchFunctionMode):
    """Within it, written-out attention and torch's own are handed to `attend(call)` -> [B, H, T, D]."""

    def __init__(self, attend: Callable[[Call], torch.Tensor]):
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Spots torch's own attention and products that may be scores."""
        kwargs = kwargs or {}
        if any(isinstance(a, Scores) for a in (*args, *kwargs.values())):
            return _apply(func, args, kwargs)
        if func is scaled_dot_product_attention:
            return self._torch(func, args, kwargs)
        made = _product(self, func, args, kwargs)
        if made is None:
            return func(*args, **kwargs)
        q, k = made.query.shape, made.key.shape
        shape = (*torch.broadcast_shapes(q[:-2], k[:-2]), q[-2], k[-2])
        return _placeholder(_empty(shape, made.query.dtype), made)

    def ask(self, func: Callable, weights: Scores, value: torch.Tensor) -> torch.Tensor | None:
        """attend's answer in the shape that weights @ value has; None where heads or dtypes are not an attention's."""
        made, plain = weights.made.unchanged(), _plain(weights)
        if not made.grid or value.ndim != plain.ndim or math.prod(plain.shape[:-2]) != math.prod(made.grid):
            return None
        batch = made.grid[0]
        q = made.query.reshape(batch, -1, *made.query.shape[-2:])
        k, v = made.key.reshape(batch, -1, *made.key.shape[-2:]), value.reshape(batch, -1, *value.shape[-2:])
        bias = None
        for b in made.biases:
            if b.ndim == 3:
                b = b[None] if len(b) == 1 else b.reshape(batch, -1, *b.shape[-2:])
            bias = b if bias is None else bias + b

        def stock(q, k, v):
            weights = made.real(*(x.reshape(o.shape).to(o.dtype) for x, o in ((q, made.query), (k, made.key))))
            return func(weights, v.reshape(value.shape).to(value.dtype)).reshape(q.shape[:3] + v.shape[3:])

        narrow = [_narrowed(x, v.dtype) for x in (q, k)]
        if any(x is None for x in narrow):
            return None
        eps = max((torch.finfo(b.dtype).eps for b in made.biases if b.is_floating_point()), default=0.0)
        call = Call(*narrow, v, bias, made.scale, False, stock, eps)
        return self.attend(call).reshape(*plain.shape[:-2], q.shape[2], v.shape[3])

    def _torch(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = dict(zip(names, args, strict=False)) | kwargs
        query, key, value, mask = (given.get(name) for name in names[:4])
        if given.get("dropout_p"):
            raise ValueError("attention: its dropout is not covered, set it to 0")
        if query.ndim != 4:
            return func(*args, **kwargs)
        more = {name: given[name] for name in names[3:] if name in given}
        bias = _hiding(~mask) if mask is not None and mask.dtype == torch.bool else mask
        bias = None if bias is None else _bias(bias, 4)
        scale = given.get("scale") or query.shape[-1] ** -0.5

        def stock(q, k, v):
            return func(q, k, v, **more)

        return self.attend(Call(query, key, value, bias, scale, bool(given.get("is_causal")), stock))


def _narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """x in the dtype of the values; None where that would round it: it was more than widened for the product."""
    narrow = x.to(dtype)
    return narrow if narrow.dtype == x.dtype or torch.equal(narrow.to(x.dtype), x) else None
