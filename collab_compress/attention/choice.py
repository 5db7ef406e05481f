"""Which kernel attends: one table by form, device, mode and number of queries.

Measured on CPUs by `benchmarks/speed.py`, on GPUs by `make bench-gpu`.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
Mode = Literal["inference", "training", "general"]
Case = Literal["one token", "equal widths"]


class Choice(NamedTuple):
    """A row of the table; the first that fits counts.

    Args:
        kernel: name of a function: `decoded` of `functions`, or one that the form's own module calls.
        form: of the queries and keys; None for all, dense ones included.
        cpu: whether it is for CPUs, or for all other devices.
        mode: None for all. "inference" is where nothing is recorded, traced or dropped, and dtypes agree; "training"
            where something is recorded or dropped, and dtypes agree; "general" is the rest: traced or compiled calls,
            transforms of torch.func, mixed dtypes, masks that are trained.
        case: what else a call has to be: of one new token, or of heads that are all as wide as their values.
        most: scores B·T·S of one head up to which it is for; None for any number.
    """

    kernel: str
    form: str | None
    cpu: bool
    mode: Mode | None = None
    case: Case | None = None
    most: int | None = None


TABLE = (
    Choice("decoded", None, cpu=True, mode="inference", case="one token"),
    Choice("blocked", "shared", cpu=True, mode="inference"),
    Choice("recomputed", "shared", cpu=True, mode="training"),
    Choice("folded", "shared", cpu=True),
    Choice("sdpa", "shared", cpu=False),
    Choice("side_by_side", "per-head", cpu=True, mode="inference", case="equal widths", most=2**15),
    Choice("padded", "per-head", cpu=True, mode="inference", most=2**12),
    Choice("one_by_one", "per-head", cpu=True, mode="inference"),
    Choice("padded", "per-head", cpu=True),
    Choice("padded", "per-head", cpu=False),
)


def kernel_for(form: str | None, mode: Mode, query: Tensor, *, case: Case | None = None, scores: int = 0) -> str:
    """Name the kernel for a call; "stock" where the table has none.

    Args:
        form: of the queries and keys.
        mode: as `mode_of` says.
        query: on the device in question.
        case: what the call is, if it is anything special.
        scores: B·T·S.
    """
    for row in TABLE:
        fits = row.form in (None, form) and row.cpu == query.is_cpu and row.mode in (None, mode)
        if fits and row.case in (None, case) and (row.most is None or scores <= row.most):
            return row.kernel
    return "stock"


def mode_of(dropout: float, query: Tensor, *others: Tensor | None) -> Mode:
    """Return the mode of a call, by what records it and by its dtypes: all the same, in float32 at least."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return "general"
    if torch._C._are_functorch_transforms_active():  # "recomputed" has no rules for torch.func
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
