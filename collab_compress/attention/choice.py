"""Which kernel attends: one table by form, device, mode and number of queries.

Measured on CPUs by `benchmarks/decoding.py`, `benchmarks/latency.py` and `benchmarks/attention_kernels.py`. Rows for
GPUs are chosen by what PyTorch's kernels take there, and measured by `make bench-gpu`.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
Mode = Literal["inference", "training", "general"]


class Choice(NamedTuple):
    """A row of the table; the first that fits counts.

    Args:
        form: of the queries and keys; None for all, dense ones included.
        cpu: whether it is for CPUs, or for all other devices.
        mode: None for all. "inference" is where nothing is recorded, traced or dropped, and dtypes agree; "training"
            where something is recorded or dropped, and dtypes agree; "general" is the rest: traced or compiled calls,
            mixed dtypes, masks that are trained.
        one: whether it is for one new token only.
        kernel: name of a function: `decoded` of `functions`, or one of the form's own module.
    """

    form: str | None
    cpu: bool
    mode: Mode | None
    one: bool
    kernel: str


TABLE = (
    Choice(None, True, "inference", True, "decoded"),
    Choice("shared", True, "inference", False, "blocked"),
    Choice("shared", True, "training", False, "recomputed"),
    Choice("shared", True, "general", False, "folded"),
    Choice("shared", False, None, False, "sdpa"),
    Choice("per-head", True, "inference", False, "one_by_one"),
    Choice("per-head", True, None, False, "padded"),
    Choice("per-head", False, None, False, "padded"),
)


def kernel_for(form: str | None, mode: Mode, query: Tensor, *, one: bool = False) -> str:
    """Name the kernel for a call; "stock" where the table has none.

    Args:
        form: of the queries and keys.
        mode: as `mode_of` says.
        query: on the device in question.
        one: whether the call has one new token and may be `decoded`.
    """
    for choice in TABLE:
        fits = choice.form in (None, form) and choice.cpu == query.is_cpu and choice.mode in (None, mode)
        if fits and (one or not choice.one):
            return choice.kernel
    return "stock"


def mode_of(dropout: float, query: Tensor, *others: Tensor | None) -> Mode:
    """Say in which mode a call is, by what records it and by its dtypes: all the same, in float32 at least."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return "general"
    dtype = torch.float32 if query.dtype in HALVES else query.dtype
    if dtype not in (torch.float32, torch.float64):
        return "general"
    recorded = query.requires_grad
    for tensor in others:
        if tensor is not None:
            own = tensor.dtype
            if own not in (dtype, torch.bool) and not (own in HALVES and dtype == torch.float32):
                return "general"
            recorded = recorded or tensor.requires_grad
    return "training" if dropout > 0 or (recorded and torch.is_grad_enabled()) else "inference"
