r"""Perplexity of models that normalise queries and keys (QK-norm), with fewer channels in their key caches.

    collab-run llama-ptb.yaml output=QWEN3 data_dir=DIR fresh.config.model_type=qwen3 fresh.config.head_dim=16 \
        fresh.config.num_key_value_heads=8
    python benchmarks/qk_norm.py --data-dir DIR --models QWEN3/tuned/model ...

Scores are ⟨R γq q/n(q), R γk k/n(k)⟩ with the rotation R; n is the root mean square of a head (Qwen3) or of all heads
(OLMo 2). Four ways cache equally many values for each token, calibrated on training text:

- dropped, exact: a layer keeps its strongest pairs of channels, normalised before they are cached. Wk stays whole.
- dropped, fitted: n² is a least-squares fit of the squares of the kept channels.
- shared, exact: heads share channels of each frequency. Norms of single heads take the place of cached channels.
- shared, fitted: n² is a fit of the squares of the shared channels, which the rotation does not change.

With one norm for all heads shared keys are normalised before they are cached, too.

Prints mean perplexities over models, with 95 % t-intervals of the differences to the first way.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MethodType
from typing import Any

import pandas as pd
import torch
from language_models import chunks, perplexity
from quality import interval
from timing import append_record, read_records
from torch import Tensor
from torch.nn.functional import one_hot, pad
from transformers import AutoModelForCausalLM, AutoTokenizer

from collab_compress.factorization import Moments, RotaryFactors, factorize_rotary

SHARES = (0.75, 0.5, 0.25)
WAYS = ("dropped, exact", "dropped, fitted", "shared, exact", "shared, fitted")
CALIBRATED, SCORED = 128, 256  # chunks of 64 tokens


class Side:
    """Queries or keys of a layer: a projection (H·d, D) and its norm, of each head or of all."""

    def __init__(self, projection: Any, norm: Any, width: int) -> None:
        self.weight, scale = projection.weight.detach().double(), norm.weight.detach().double()
        self.norms, self.eps = len(self.weight) // len(scale), norm.variance_epsilon
        scaled = self.weight.unflatten(0, (-1, width)) * scale.view(-1, width, 1)
        self.channels = torch.complex(*scaled.chunk(2, dim=1))  # (H, d/2, D)

    def norm(self, x: Tensor) -> Tensor:
        """Return the norms of inputs (…, D): (…, 1) or (…, H)."""
        return ((x @ self.weight.mT).square().unflatten(-1, (self.norms, -1)).mean(-1) + self.eps).sqrt()

    def strength(self, x: Tensor) -> Tensor:
        """Return the mean squares of normalised channels, (H, d/2)."""
        products = torch.einsum("nx,hjx->nhj", x.to(self.channels.dtype), self.channels)
        return (products / self.norm(x)[..., None]).abs().square().mean(0)


def fitted(side: Side, kept: Tensor, x: Tensor, rotated: bool) -> Callable[[Tensor], Tensor]:
    """Return a function that estimates norms from products with kept channels (D, C); inputs x (N, D) calibrate."""

    def squares(x: Tensor) -> Tensor:
        parts = torch.view_as_real(x.to(kept.dtype) @ kept).square()  # rotation changes all but their sums
        return pad(parts.sum(-1) if rotated else parts.flatten(-2), (0, 1), value=1.0)

    norms = side.norm(x).mT[..., None]  # (norms, N, 1)
    weights = torch.linalg.lstsq(squares(x) / norms, norms).solution.squeeze(2)  # of n², with weights 1/n²
    least = norms.quantile(0.01, dim=1).squeeze(1) / 2
    return lambda x: (squares(x) @ weights.mT).clamp_min(0).sqrt().maximum(least)


def dropped(query: Side, key: Side, x: Tensor, channels: int) -> RotaryFactors:
    """Return a layer's strongest pairs of channels, each of one head."""
    heads, frequencies, _ = key.channels.shape
    kept = (query.strength(x) * key.strength(x)).flatten().topk(channels).indices
    mixing = one_hot(kept // frequencies, heads).mT.to(key.channels.dtype)
    sides = [side.channels.flatten(0, 1)[kept].mT for side in (query, key)]
    return RotaryFactors(sides[0], mixing, sides[1], tuple((kept % frequencies).tolist()), frequencies)


def shared(query: Side, key: Side, x: Tensor, channels: int) -> RotaryFactors:
    """Return shared channels, of heads divided by their typical norms and of inputs divided by a mean norm."""
    heads, moments, sizes = [], [], []
    for side in (query, key):
        inverse = side.norm(x).square().reciprocal()
        sizes.append(inverse.mean(0).rsqrt()[:, None])  # (norms, 1)
        heads.append(side.channels.mT / sizes[-1][..., None])
        moments.append(Moments.of(x * (inverse.mean(1, keepdim=True) / inverse.mean()).sqrt()))
    factors = factorize_rotary(heads[0], heads[1], channels, query_moments=moments[0], key_moments=moments[1]).factors
    return replace(factors, mixing=factors.mixing * sizes[0] * sizes[1])


def narrow_(attention: Any, x: Tensor, way: str, share: float) -> None:
    """Replace a module's forward pass by one with fewer keys, without padding; inputs x (N, D) calibrate."""
    query = Side(attention.q_proj, attention.q_norm, attention.head_dim)
    key = Side(attention.k_proj, attention.k_norm, attention.head_dim)
    after_cache = way.startswith("shared") and key.norms > 1  # otherwise keys are normalised before they are cached
    values = round(share * len(key.weight)) - (key.norms if after_cache and way.endswith("exact") else 0)
    factors = (dropped if way.startswith("dropped") else shared)(query, key, x, values // 2)
    assert factors.query is not None
    norms: list[Callable[[Tensor], Tensor]] = [query.norm, key.norm]
    if way.endswith("fitted"):
        norms = [fitted(query, factors.query, x, rotated=False), fitted(key, factors.key, x, rotated=after_cache)]
    maps = ((factors.query, norms[0]), (factors.key, norms[1]))

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, **_: Any) -> tuple[Tensor, None]:
        x = hidden_states.double()
        rotation = torch.complex(*position_embeddings)[:, :, None, list(factors.frequencies)]  # (B, T, 1, C)
        q, k = (
            ((x.to(kept.dtype) @ kept)[..., None, :] / norm(x)[..., None]).to(rotation.dtype) * rotation
            for kept, norm in maps
        )  # (B, T, norms, C)
        mixed = q * factors.mixing.to(q.dtype)  # (B, T, H, C)
        scores = torch.einsum("bthc,bshc->bhts", mixed, k.conj().expand_as(mixed)).real * self.scaling
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        v = self.v_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        heads = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        return self.o_proj(heads.transpose(1, 2).flatten(2)), None

    attention.forward = MethodType(forward, attention)


@torch.no_grad()
def measure(folder: Path, data: Path, records: Path) -> None:
    """Append the perplexities of one model to the records."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs: dict[Any, list[Tensor]] = {layer.self_attn: [] for layer in model.model.layers}
    for attention, seen in inputs.items():
        attention.k_proj.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].flatten(0, 1)))
    for batch in chunks(data, "train", tokenizer, CALIBRATED):
        model(**batch)
    calibration = {attention: torch.cat(seen).double() for attention, seen in inputs.items()}
    scored = chunks(data, "validation", tokenizer, SCORED)
    case = {"model": model.config.model_type, "folder": str(folder)}
    for share, way in ((1.0, "dense"), *product(SHARES, WAYS)):
        for attention, x in calibration.items() if way != "dense" else ():
            narrow_(attention, x, way, share)
        append_record(records, {**case, "way": way, "share": share, "perplexity": perplexity(model, scored)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "records" / "qk_norm.jsonl")
    args = parser.parse_args()
    for folder in args.models:
        measure(folder, args.data_dir, args.records)
    for kind, rows in pd.DataFrame(read_records(args.records)).groupby("model"):
        figures = rows.pivot_table(index="folder", columns=["share", "way"], values="perplexity")
        print(f"\n{kind}, {len(figures)} models, dense {figures[1.0, 'dense'].mean():.2f}")
        for share, way in product(SHARES, WAYS):
            column = figures[share, way]
            print(f"{share:.3f}  {way:16} {column.mean():.2f} ({interval(column - figures[share, WAYS[0]])})")


if __name__ == "__main__":
    main()
