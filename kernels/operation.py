"""One opaque torch operation per kernel, with the count of its calls kept inside.

Opaque, because torch.compile must neither look into it nor reorder it; counted inside, because a Python counter
around the call stops at trace time, and a binding that did not run must not pass a check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Dtypes that the C++ kernels take, by their number there (simd.h)."""

CALLS: Counter[str] = Counter()
"""Calls by site, in this process."""

_NAMESPACE = __name__.split(".")[0]
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")


def _plain(arguments: tuple) -> bool:
    """Whether the dispatcher would do nothing but call the CPU kernel: no tracer, fake, meta or distributed tensor."""
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack():
        return False
    return all(
        type(a) in (torch.Tensor, torch.nn.Parameter) and a.is_cpu for a in arguments if isinstance(a, torch.Tensor)
    )


def operation(schema: str, compute: Callable, *, shape: Callable | None = None) -> Callable:
    """Registers `compute` as `<package>::<schema>` for CPU tensors and returns the operation.

    Every schema ends with `str site`, by which the calls are counted. `shape` is the fake implementation. In inference
    mode, on plain CPU tensors with nothing looking on, the call takes the short way past torch's dispatcher: a decode
    step makes hundreds of calls, and each would pay some microseconds.
    """
    name = schema.split("(")[0]
    _LIBRARY.define(schema)

    def counted(*arguments):
        CALLS[arguments[-1]] += 1
        return compute(*arguments[:-1])

    _LIBRARY.impl(name, counted, "CPU")
    if shape is not None:
        torch.library.register_fake(f"{_NAMESPACE}::{name}", lambda *a: shape(*a[:-1]), lib=_LIBRARY)
    registered = getattr(getattr(torch.ops, _NAMESPACE), name).default

    def call(*arguments):
        short = torch.is_inference_mode_enabled() and _plain(arguments)
        return (counted if short else registered)(*arguments)

    call.registered = registered
    return call


def with_backward(name: str, backward: Callable, remember: Callable) -> None:
    """Gives the operation a backward; `remember(ctx, inputs, output)` saves what it needs."""
    torch.library.register_autograd(f"{_NAMESPACE}::{name}", backward, setup_context=remember, lib=_LIBRARY)
