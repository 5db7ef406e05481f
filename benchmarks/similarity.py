"""SVCCA and CKA of all pairs of heads of one layer, against the same computed pair by pair from the tokens.

Random responses of 12 heads of width 64 that share some of their directions, in float32. Three ways take turns in
random order; a row is the median (and quartiles) of how many times faster ours is, over the rounds.

* ours: one pass over the tokens in batches of 1024, then all pairs from the covariance.
* pairwise: for each pair centre both heads (N×64), decompose both, keep 99 % of the variance, correlate what is left,
  and take CKA from their feature products; in float64, as ours is at the end.
* pairwise, decomposed once: the same, but each head is centred and decomposed only once.

The largest difference between the results is printed too.

Examples:
    python benchmarks/similarity.py --quick
    python benchmarks/similarity.py --threads 1 --json similarity.json
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from collab_compress.analysis import cka, svcca
from collab_compress.analysis.covariance import RunningCovariance

HEADS, WIDTH, BATCH, VARIANCE = 12, 64, 1024, 0.99
LIMIT = 20  # times faster than pairwise at 50 000 tokens, at least

Pair = tuple[Tensor, Tensor]


def responses(tokens: int) -> Tensor:
    """Random head outputs (N, H, d): directions of falling variance, partly shared between heads."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(tokens, WIDTH, generator=generator)
    turns = torch.randn(HEADS, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    scale = torch.logspace(0, -1.5, WIDTH)
    own = torch.randn(tokens, HEADS, WIDTH, generator=generator) * scale
    return own + torch.einsum("nd,hde->nhe", shared * scale, turns)


def ours(x: Tensor) -> Pair:
    """SVCCA and CKA of all pairs, in the order of `combinations`."""
    running = RunningCovariance((WIDTH,) * HEADS)
    for batch in x.flatten(1).split(BATCH):
        running.add(batch)
    joint = running.result(tuple(map(str, range(HEADS))), "heads")
    rows, columns = torch.triu_indices(HEADS, HEADS, 1)
    return svcca(joint, VARIANCE).similarity[rows, columns], cka(joint)[rows, columns]


def decomposed(head: Tensor) -> Pair:
    """Centre a head and give it with the left singular vectors that hold 99 % of its variance."""
    centred = head.double() - head.double().mean(0)
    left, values, _ = torch.linalg.svd(centred, full_matrices=False)
    shares = values.square().cumsum(0) / values.square().sum()
    return centred, left[:, : int((shares < VARIANCE).sum()) + 1]


def compared(first: Pair, second: Pair) -> Pair:
    """Mean canonical correlation and CKA of two decomposed heads."""
    (x, left), (y, right) = first, second
    alignment = (x.T @ y).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())
    return torch.linalg.svdvals(left.T @ right).mean(), alignment


def pairwise(x: Tensor) -> Pair:
    found = [compared(decomposed(x[:, i]), decomposed(x[:, j])) for i, j in combinations(range(HEADS), 2)]
    return torch.stack([similarity for similarity, _ in found]), torch.stack([alignment for _, alignment in found])


def decomposed_once(x: Tensor) -> Pair:
    heads = [decomposed(x[:, head]) for head in range(HEADS)]
    found = [compared(heads[i], heads[j]) for i, j in combinations(range(HEADS), 2)]
    return torch.stack([similarity for similarity, _ in found]), torch.stack([alignment for _, alignment in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds, noisier")
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens N")
    parser.add_argument("--threads", type=int, help="CPU threads; PyTorch's own choice if not given")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    arguments = parser.parse_args()
    random.seed(0)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    x = responses(arguments.tokens)
    ways: dict[str, Callable[[Tensor], Pair]] = {
        "ours": ours, "pairwise": pairwise, "pairwise, decomposed once": decomposed_once,
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in ways}
    results: dict[str, Pair] = {}
    for way in ways.values():  # for warming up
        way(x[:BATCH])
    for _ in range(2 if arguments.quick else 5):
        for name in random.sample(list(ways), len(ways)):
            before = perf_counter()
            results[name] = ways[name](x)
            times[name].append(perf_counter() - before)
    pairs = HEADS * (HEADS - 1) // 2
    print(f"{torch.get_num_threads()} threads; {pairs} pairs of {HEADS} heads of {WIDTH}, {arguments.tokens} tokens")
    print("way                          seconds   times slower than ours, median [quartiles]   SVCCA, CKA off by")
    rows = []
    for name in ways:
        ratios = [theirs / own for theirs, own in zip(times[name], times["ours"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        off = [float((a - b).abs().max()) for a, b in zip(results[name], results["ours"], strict=True)]
        rows.append({"way": name, "seconds": statistics.median(times[name]), "ratio": middle, "low": low,
                     "high": high, "svcca_off": off[0], "cka_off": off[1]})  # fmt: skip
        limit = f"at least {LIMIT}" if name == "pairwise" else ""
        print(
            f"{name:27} {rows[-1]['seconds']:8.2f}   {middle:6.1f}  [{low:.1f}, {high:.1f}]  {limit:14}"
            f"          {off[0]:.1e}, {off[1]:.1e}"
        )
    if arguments.json:
        report = {"threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
