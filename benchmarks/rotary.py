"""Perplexity against key cache for a small Llama trained on the Penn Treebank: shared rotary heads and their rivals.

    python benchmarks/rotary.py --data-dir DIR --model DIR [--heads 6 4 2] [--recover 150]

Trains the model first where `--model` holds none (4 layers of width 128, 8 heads of 16, the 2,000 commonest words as
tokens; minutes on two cores). Then, nothing retrained unless `--recover` says so, for keys of so many heads, not 8:

- shared: ours, calibrated on random tokens, and on the training text;
- equal: the same, each frequency with equally many channels;
- pooled: key heads averaged in groups, as grouped-query attention is made from heads of their own;
- dropped: of each layer's channel pairs the strongest ones, over all heads and frequencies.
"""

import argparse
import copy
import gzip
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from collab_compress import Compression, compress
from collab_compress.architectures import FAMILIES, find_dense_attention
from collab_compress.attention import RotaryScores
from collab_compress.calibration import gather_moments
from collab_compress.conversion import plan, recover_
from collab_compress.factorization import factorize_rotary

LENGTH, BATCH, WORDS = 64, 32, 2000
HEADS, WIDTH = 8, 16


def tokens_of(folder: Path) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Training and validation text as ids, and how many there are."""
    texts = {}
    for split in ("train", "valid"):
        with gzip.open(folder / "ptb" / f"ptb.{split}.txt.gz", "rt", encoding="utf-8") as file:
            texts[split] = file.read().replace("\n", " </s> ").split()
    words = [word for word, _ in Counter(texts["train"]).most_common(WORDS)]
    ids = {word: place for place, word in enumerate(words)}
    train, valid = (torch.tensor([ids.get(word, ids["<unk>"]) for word in texts[split]]) for split in texts)
    return train, valid, len(words)


def blocks(ids: torch.Tensor) -> torch.Tensor:
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def trained(train: torch.Tensor, size: int, steps: int) -> LlamaForCausalLM:
    """Train a model from nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size, hidden_size=HEADS * WIDTH, num_hidden_layers=4, num_attention_heads=HEADS,
        intermediate_size=384, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    rows, started = blocks(train), time.perf_counter()
    for step in range(steps):
        batch = rows[torch.randint(len(rows), (BATCH,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - started:.0f} s", flush=True)
    return model.eval()


@torch.no_grad()
def perplexity(model: PreTrainedModel, ids: torch.Tensor) -> float:
    losses = [model(input_ids=rows, labels=rows).loss for rows in blocks(ids).split(BATCH)[:-1]]
    return float(torch.stack(losses).mean().exp())


def pooled_(model: LlamaForCausalLM, heads: int) -> LlamaForCausalLM:
    """Average key heads in groups, in place; 8 must be a multiple of how many are left."""
    with torch.no_grad():
        for site in find_dense_attention(model, FAMILIES):
            keys = site.key.weight.view(heads, HEADS // heads, WIDTH, -1)
            keys.copy_(keys.mean(1, keepdim=True).expand_as(keys))
    return model


def dropped_(model: LlamaForCausalLM, heads: int, batches: list[dict[str, torch.Tensor]]) -> LlamaForCausalLM:
    """Keep the strongest channel pairs of each layer, in place: zero queries are as good as no keys."""
    sites = find_dense_attention(model, FAMILIES)
    for site, moments in zip(sites, gather_moments(model, sites, batches), strict=True):
        form = RotaryScores.of(site, WIDTH, content_bias=False)
        root = torch.linalg.cholesky(moments[0].second + 1e-6 * torch.eye(moments[0].width)).mT.to(torch.complex128)
        query, key = (root @ form.channels_of(each, None) for each in (site.query_heads(), site.key_heads()))
        strength = query.norm(dim=1) * key.norm(dim=1)  # (H, d/2)
        least = strength.flatten().sort(descending=True).values[heads * WIDTH // 2 - 1]
        kept = (strength >= least).repeat(1, 2).flatten()  # both channels of a pair
        with torch.no_grad():
            site.query.weight[~kept] = 0
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--heads", type=int, nargs="+", default=[6, 4, 3, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--recover", type=int, default=0)
    given = parser.parse_args()
    train, valid, size = tokens_of(given.data_dir)
    if not (given.model / "config.json").is_file():
        trained(train, size, given.steps).save_pretrained(given.model)
    dense = LlamaForCausalLM.from_pretrained(given.model).eval()
    generator = torch.Generator().manual_seed(0)
    random = [{"input_ids": torch.randint(size, (16, LENGTH), generator=generator)} for _ in range(8)]
    text = [{"input_ids": rows} for rows in blocks(train)[:128].split(16)]
    print(f"dense: keys {HEADS * WIDTH} a token, perplexity {perplexity(dense, valid):.1f}", flush=True)
    for heads in given.heads:
        found = {}
        for name, batches, equal in (("random", random, False), ("text", text, False), ("equal", text, True)):
            model = copy.deepcopy(dense)
            plan.factorize_rotary = partial(factorize_rotary, equal=equal)
            compress(model, Compression(dk=heads * WIDTH), calibration=batches)
            found[name] = perplexity(model, valid)
            if given.recover and name == "text":
                rows = [{"input_ids": each} for each in blocks(train)[: 16 * given.recover].split(16)]
                recover_(model, dense, None, rows, steps=given.recover, disable_tqdm=True)
                found["recovered"] = perplexity(model, valid)
        if HEADS % heads == 0:
            found["pooled"] = perplexity(pooled_(copy.deepcopy(dense), heads), valid)
        found["dropped"] = perplexity(dropped_(copy.deepcopy(dense), heads, text), valid)
        told = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
        print(f"{heads} heads: keys {heads * WIDTH} a token, perplexity {told}", flush=True)


if __name__ == "__main__":
    main()
