"""Time of one token beside a key cache: converted decoders over dense ones, random weights, this CPU.

Dense and converted models take turns in random order; after each token the cache is cut back to its length. A row is
the median (and quartiles) of converted/dense. Processor time of one thread is the default, for machines that others
use too. The language model's head is left out, as it is the same in all; with it all ratios are nearer to 1.

Examples:
    python benchmarks/decoding.py
    python benchmarks/decoding.py --shapes gpt2 --lengths 128 --seconds 5
    python benchmarks/decoding.py --threads 2 --wall
"""

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from latency import over_dense, paired_seconds, shown
from transformers import DynamicCache, GPT2Config, GPT2Model, LlamaConfig, LlamaModel, StaticCache
from transformers.utils.logging import disable_progress_bar

from collab_compress import Compression, compress

LENGTHS, LAYERS, ROOM = (128, 1024, 4096), 4, 8192


def gpt2() -> Any:
    """GPT-2's width: D = 768, 12 heads of 64."""
    return GPT2Model(
        GPT2Config(n_layer=LAYERS, n_positions=ROOM, vocab_size=1000, bos_token_id=0, eos_token_id=1)
    ).eval()


def llama(groups: int) -> Callable[[], Any]:
    """D = 1024, 16 heads of 64, some of which share keys and values."""

    def build() -> Any:
        config = LlamaConfig(
            hidden_size=1024, num_attention_heads=16, num_key_value_heads=groups, intermediate_size=2816,
            num_hidden_layers=LAYERS, vocab_size=1000, max_position_embeddings=ROOM,
        )  # fmt: skip
        return LlamaModel(config).eval()

    return build


def half(keys: int, values: int) -> dict[str, Compression]:
    """Half of the keys, of the values, of both; where there are two forms, in both."""
    return {
        "dk": Compression(dk=keys // 2, sweeps=1),
        "dv": Compression(dv=values // 2),
        "dk dv": Compression(dk=keys // 2, dv=values // 2, sweeps=1),
    }


SHAPES: dict[str, tuple[Callable[[], Any], dict[str, Compression]]] = {
    "gpt2": (gpt2, {
        **half(768, 768),
        "per-head dk": Compression(dk=384, form="per-head"),
        "per-head dk dv": Compression(dk=384, dv=384, form="per-head"),
    }),
    "llama": (llama(16), half(1024, 1024)),
    "llama, 4 key heads": (llama(4), half(256, 256)),
}  # fmt: skip


def token(model: Any, length: int, static: bool) -> Callable[[], None]:
    """Make a function that decodes one token beside a cache of so many."""
    past = StaticCache(model.config, max_cache_len=length + 1) if static else DynamicCache(config=model.config)
    generator = torch.Generator().manual_seed(0)
    for start in range(0, length, 512):
        ids = torch.randint(0, 1000, (1, min(512, length - start)), generator=generator)
        model(ids, past_key_values=past)
    last = torch.tensor([[7]])

    def step() -> None:
        model(last, past_key_values=past)
        if static:
            for layer in past.layers:
                layer.cumulative_length.sub_(1)
        else:
            past.crop(-1)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", help="names of conversions; all if not given")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="of the cache")
    parser.add_argument("--seconds", type=float, default=10, help="for each shape and length, all rows together")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wall", action="store_true", help="wall time, for several threads on a quiet machine")
    parser.add_argument("--static", action="store_true", help="caches of fixed size, where keys and values fit them")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    clock = perf_counter if arguments.wall else process_time
    print(f"{arguments.threads} threads; a token, converted / dense, median [quartiles]; below 1 is faster")
    rows = []
    for shape in arguments.shapes:
        torch.manual_seed(0)
        dense = SHAPES[shape][0]()
        models = {"dense": dense, "dense again": copy.deepcopy(dense)}
        for name, compression in SHAPES[shape][1].items():
            if not arguments.rows or name in arguments.rows:
                models[name] = copy.deepcopy(dense)
                compress(models[name], compression, calibration=None)
        for length in arguments.lengths:
            with torch.inference_mode():
                steps = {name: token(model, length, arguments.static) for name, model in models.items()}
                times = paired_seconds(steps, {}, arguments.seconds, clock)
            for name in list(models)[1:]:
                found = over_dense(times, name)
                rows.append({"shape": shape, "cache": length, "row": name, **found})
                line = f"{shape:20} {length:5} {name:16} {shown(found)} {found['dense_ms']:7.1f} ms"
                print(line, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
