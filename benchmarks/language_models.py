"""Perplexity of a language model with narrower feed-forward blocks and values, by what they are calibrated on.

    collab-run glue_runs/recipes/llama-ptb.yaml data_dir=DIR output=llama
    python benchmarks/language_models.py llama/tuned/model --data-dir DIR

DIR holds the Penn Treebank. Blocks keep 3/4, 1/2 and 1/3 of their neurons, alone or with half of the values. They are
calibrated on 512 stretches of 64 tokens: of the training texts, random, or written by the model itself. Perplexity
is that of the first 1,000 stretches of the validation texts.
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from collab_compress import Compression, compress
from collab_compress.calibration import Batch, calibration_batches
from collab_compress.tasks import load_task

LENGTH, CALIBRATED, SCORED, TOGETHER = 64, 512, 1000, 16
SHARES = {"3/4": 3 / 4, "1/2": 1 / 2, "1/3": 1 / 3}


def stretches(data: Path, split: str, tokenizer: Any, count: int) -> list[Batch]:
    """Return the first stretches of a split, its texts end to end."""
    texts = load_task("ptb", data, splits=[split])[split]["text"]
    tokens = torch.cat([torch.tensor(each) for each in tokenizer(list(texts))["input_ids"]])
    rows = tokens[: count * LENGTH].view(-1, LENGTH)
    return [{"input_ids": part} for part in rows.split(TOGETHER)]


@torch.no_grad()
def perplexity(model: Any, batches: list[Batch]) -> float:
    """Return the exponential of the mean loss over all tokens but the first of each stretch."""
    losses: list[Tensor] = []
    for batch in batches:
        logits = model(**batch).logits[:, :-1].flatten(0, 1)
        losses.append(cross_entropy(logits, batch["input_ids"][:, 1:].flatten(), reduction="none"))
    return float(torch.cat(losses).mean().exp())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data-dir", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dense = AutoModelForCausalLM.from_pretrained(args.model).eval()
    scored = stretches(args.data_dir, "validation", tokenizer, SCORED)
    options: dict[str, int] = {"sequences": CALIBRATED, "length": LENGTH}
    data = {
        "texts": stretches(args.data_dir, "train", tokenizer, CALIBRATED),
        "random tokens": calibration_batches("synthetic", dense, tokenizer, **options),
        "its own texts": calibration_batches("generated", dense, tokenizer, **options),
    }
    print(f"dense: {perplexity(dense, scored):.2f}")
    config = dense.config
    neurons = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    values = heads * (config.hidden_size // config.num_attention_heads)
    found = []
    for kind, batches in data.items():
        for name, share in SHARES.items():
            for dv in (None, values // 2):
                model = copy.deepcopy(dense)
                compress(model, Compression(dff=int(share * neurons), dv=dv), batches)
                row = {"calibrated on": kind, "neurons": name, "values": "all" if dv is None else "1/2"}
                found.append({**row, "perplexity": perplexity(model, scored)})
                print(found[-1], flush=True)
    table = pd.DataFrame(found).pivot(index="calibrated on", columns=["values", "neurons"], values="perplexity")
    print(table.round(2).to_string())


if __name__ == "__main__":
    main()
