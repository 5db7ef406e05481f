"""Kernels of converted attention beside PyTorch's own for dense attention: time, share of peak, memory.

At the shapes of BERT-base (12 heads of 64, dk = dv = 384) and BERT-large (16 heads of 64, dk = dv = 512), forward
alone and with backward. Share of peak is that of the fastest matrix product of 4096 measured here, in the same dtype;
memory is what a call adds at most (GPUs only). Which kernel is for what stands in `collab_compress.attention.choice`.

Examples:
    make bench-gpu
    python benchmarks/attention_kernels.py --device cpu --lengths 128 512 --batch 1
"""

import argparse
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from collab_compress.attention.kernels import blocked, folded, sdpa
from collab_compress.attention.per_head import one_by_one, padded, side_by_side
from collab_compress.attention.recomputed import recomputed

SHAPES = {"BERT-base": 12, "BERT-large": 16}
WIDTH = 64  # of a dense head
Call = Callable[[], Tensor]


def calls(heads: int, batch: int, length: int, device: str, dtype: torch.dtype, train: bool) -> dict[str, Any]:
    """Functions by name, each with its multiply-accumulates and the tensors that it is differentiated by."""
    rank, narrow, scale = heads * WIDTH // 2, WIDTH // 2, WIDTH**-0.5

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=train)

    def of_heads(width: int) -> Tensor:
        return normal(batch, heads, length, width)

    dense = [of_heads(WIDTH) for _ in range(3)]
    query, key, content = normal(batch, length, rank), normal(batch, length, rank), normal(batch, length, heads)
    mixing, value = normal(heads, rank), of_heads(narrow)
    shared: tuple[Any, ...] = (query, key, content, mixing, value, None, scale)
    own: tuple[Any, ...] = (query, key, content, (narrow,) * heads, value, None, scale)
    pairs = batch * length**2
    for_shared, for_own = pairs * heads * (rank + narrow), pairs * heads * 2 * narrow
    found = {
        "dense: sdpa": (lambda: scaled_dot_product_attention(*dense), pairs * heads * 2 * WIDTH, dense),
        "shared: sdpa": (lambda: sdpa(*shared, 0.0, False), for_shared, shared),
        "shared: folded": (lambda: folded(*shared, 0.0, False), for_shared, shared),
        "per-head: padded": (lambda: padded(*own, 0.0, False), for_own, own),
    }
    if train and device == "cpu":
        found["shared: recomputed"] = (lambda: recomputed(*shared, 0.0, False), for_shared, shared)
    if not train and device == "cpu":
        found["shared: blocked"] = (lambda: blocked(*shared, False), for_shared, shared)
        found["per-head: side_by_side"] = (lambda: side_by_side(*own, False), for_own, own)
        found["per-head: one_by_one"] = (lambda: one_by_one(*own, False), for_own, own)
    return found


def seconds(call: Callable[[], Any], device: str, rounds: int = 10) -> float:
    """Median time of a call, after three for warming up."""
    times = []
    for count in range(rounds + 3):
        started = perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        if count > 2:
            times.append(perf_counter() - started)
    return median(times)


def peak(device: str, dtype: torch.dtype) -> float:
    """Multiply-accumulates a second of a large matrix product."""
    size = 4096 if device != "cpu" else 1024
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return size**3 / seconds(lambda: one @ other, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shapes", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--batch", type=int, default=8)
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here, so nothing was measured; run it on a machine with one, or pass --device cpu")
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, torch {torch.__version__}, batch {arguments.batch}")
    print(f"{'shape':10} {'dtype':8} {'T':>5} {'':8} {'kernel':24} {'ms':>8} {'of peak':>7} {'MiB':>7}")
    for dtype in (torch.float32, torch.bfloat16):
        most = peak(device, dtype)
        for shape in arguments.shapes:
            for length in arguments.lengths:
                for train in (False, True):
                    rows = calls(SHAPES[shape], arguments.batch, length, device, dtype, train)
                    for kernel, (call, work, inputs) in rows.items():
                        report(call, inputs, device, train, f"{shape:10} {str(dtype)[6:]:8} {length:5}",
                               kernel, work / most)  # fmt: skip


def report(call: Call, inputs: Any, device: str, train: bool, place: str, kernel: str, ideal: float) -> None:
    """Measure one kernel and print its row; backward counts as twice the work, whatever is computed again."""
    leaves = [part for part in inputs if isinstance(part, Tensor)]

    def run() -> None:
        if not train:
            with torch.inference_mode():
                call()
            return
        torch.autograd.grad(call().sum(), leaves)

    run()
    memory = ""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        memory = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:7.0f}"
    taken = seconds(run, device)
    share = (3 if train else 1) * ideal / taken
    print(f"{place} {'training' if train else '':8} {kernel:24} {1e3 * taken:8.3f} {share:7.0%} {memory}", flush=True)


if __name__ == "__main__":
    main()
