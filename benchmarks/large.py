"""Time and memory that it takes to convert a model of BERT-large's shape: 24 layers, 1024 wide, 16 heads.

Weights are random but for queries and keys, whose heads have MiniLM's singular values. The process builds the model,
resets its peak resident size (Linux: /proc/self/clear_refs) and converts; what is reported is the peak beyond the
model. `--at-once` gathers the moments of all modules in one pass over the calibration data instead of in groups.

    python benchmarks/large.py
    python benchmarks/large.py --at-once
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from factorization import minilm_heads, resident, spectrum_heads
from transformers import BertConfig, BertModel

from collab_compress import Compression, compress
from collab_compress.conversion import plan


def large_model(layers: int, width: int, heads: int) -> BertModel:
    """Build a model whose queries and keys can be shared about as well as MiniLM's."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width
    )
    model = BertModel(config).eval()
    query, key = spectrum_heads(minilm_heads(), heads, width, width // heads)
    for layer in model.encoder.layer:
        for projection, parts in ((layer.attention.self.query, query), (layer.attention.self.key, key)):
            projection.weight.data.copy_(parts.transpose(1, 2).flatten(0, 1))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dk", type=int, default=384)
    parser.add_argument("--at-once", action="store_true")
    arguments = parser.parse_args()
    model = large_model(arguments.layers, arguments.width, arguments.heads)
    if arguments.at_once:
        plan.STATISTICS_BYTES = sys.maxsize
    ids = torch.randint(1000, 30000, (128, 64), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(16)]
    with torch.no_grad():
        model(**batches[0])  # thread pools and work spaces of a plain pass are not the conversion's
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    report = compress(model, Compression(dk=arguments.dk), batches)
    peak = resident("VmHWM")
    size = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
    dense = report.parameters_before * 4 / 2**20
    statistics = 8 * arguments.width**2 / 2**20
    print(f"model {dense:,.0f} MiB dense, {size:,.0f} MiB converted; one module's statistics {statistics:,.0f} MiB")
    print(f"peak beyond the dense model: {(peak - before) / 2**20:,.0f} MiB ({(peak - before) / 2**20 / dense:.0%})")
    decomposing = sum(module.seconds for module in report.modules)
    print(f"{report.seconds:,.0f} s, of which {decomposing:,.0f} s decomposing; {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
