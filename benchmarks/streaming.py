"""Memory and throughput of training on large corpora on disk, on this CPU.

A corpus of generated sentences and their reversed words is written to a temporary folder, read into the cache of
`datasets` there and tokenized by `--num-proc` processes; then a small translation model trains for a few steps, all
as a recipe with `num_proc` and `batch_tokens` does it. Each number of rows has its own process. Memory is the peak of
the process's anonymous memory after imports and in each part, without mapped files, which the system drops when it
needs room. Throughput is by CPU seconds, workers included, so it is that of one core on a busy machine too. With
`--in-memory` the data are held in memory.

Examples:
    python benchmarks/streaming.py --rows 125000 500000 2000000
    python benchmarks/streaming.py --rows 125000 500000 --in-memory --tokenizer word --steps 5
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from timing import fresh_process, resident_bytes

WORDS, SHORTEST, LONGEST, HELD_OUT = 5000, 3, 9, 100


def write_corpus(folder: Path, rows: int) -> None:
    """Write parallel files of random sentences, in which some words are much more frequent than others."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(WORDS)]
    for split, count in (("train", rows), ("valid", HELD_OUT), ("test", HELD_OUT)):
        with (folder / f"{split}.aa").open("w") as source, (folder / f"{split}.bb").open("w") as target:
            for _ in range(count):
                drawn = [words[int(WORDS * draw.random() ** 3)] for _ in range(draw.randint(SHORTEST, LONGEST))]
                source.write(" ".join(drawn) + "\n")
                target.write(" ".join(drawn[::-1]) + "\n")


def own_memory() -> float:
    """Return the anonymous memory of this process, in MiB."""
    return resident_bytes("RssAnon") / 2**20


class Meter:
    """Measures the CPU seconds and the peak memory of each part."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, float]] = {"imported": {"MiB": own_memory()}}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the block."""
        done, highest, before = Event(), [own_memory()], sum(os.times()[:4])

        def watch() -> None:
            while not done.wait(0.05):
                highest.append(max(highest.pop(), own_memory()))

        watcher = Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
        self.parts[name] = {"MiB": max(highest[0], own_memory()), "seconds": sum(os.times()[:4]) - before}


def measure(rows: int, steps: int, tokens: int, num_proc: int | None, kind: str) -> dict[str, dict[str, float]]:
    """Load, tokenize and train; return the memory, CPU seconds and tokens per CPU second of each part."""
    import torch

    from collab_compress.experiments.batches import row_lengths
    from collab_compress.experiments.recipe import Recipe, parse
    from collab_compress.experiments.tuning import fine_tune
    from collab_compress.experiments.untrained import make_fresh
    from collab_compress.experiments.workload import Translation, load_tokenizer

    torch.set_num_threads(1)
    folder = Path(os.environ["HF_DATASETS_CACHE"]).parent
    write_corpus(folder, rows)
    meter = Meter()
    data = {"task": "parallel", "data_dir": folder, "num_proc": num_proc, "max_length": 64}
    data["translation"] = {"source": "aa", "target": "bb"}
    fresh = {"layers": 1, "width": 64, "heads": 4, "tokenizer": kind, "vocab_size": 2000}
    tuning = {"max_steps": steps, "batch_tokens": tokens, "learning_rate": 1e-3}
    tuning["arguments"] = {"save_strategy": "no", "logging_steps": steps}
    settings = {"output": folder / "out", "trackers": [], "progress": False, "fresh": fresh, "tuning": tuning}
    recipe = parse(Recipe, {**data, **settings}, "the benchmark")
    with meter.part("read"):
        workload = Translation(recipe)
    with meter.part("vocabulary"):
        make_fresh(recipe.fresh, workload.task, workload.model_class, workload.texts["train"], 0, folder / "start")
        workload.tokenizer = load_tokenizer(folder / "start")
    with meter.part("tokenize"):
        workload.encode_splits()
    train = workload.data["train"]
    lengths = row_lengths(train, "input_ids") + row_lengths(train, "labels")
    model = workload.load_model(folder / "start")
    with meter.part("train"):
        fine_tune(workload, model, recipe.tuning, folder / "tuned")
    total = int(lengths.sum())
    for part, count in (("tokenize", total), ("train", steps * tokens)):
        meter.parts[part]["tokens"] = count / meter.parts[part]["seconds"]
    return meter.parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[125_000, 500_000, 2_000_000])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step")
    parser.add_argument("--num-proc", type=int, default=1)
    parser.add_argument("--tokenizer", default="bpe", choices=["bpe", "word"])
    parser.add_argument("--in-memory", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        parts = measure(
            args.rows[0], args.steps, args.tokens, None if args.in_memory else args.num_proc, args.tokenizer
        )
        print(json.dumps(parts))
        return
    print(
        "| rows | imported, MiB | read | vocabulary | tokenize | train | tokens a core-second, tokenized | trained |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for rows in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            arguments = *sys.argv[1:], "--measure", f"--rows={rows}"
            parts = json.loads(fresh_process(__file__, *arguments, HF_DATASETS_CACHE=f"{folder}/cache"))
        memory = " | ".join(f"{part['MiB']:.0f}" for part in parts.values())
        print(
            f"| {rows:,} | {memory} | {parts['tokenize']['tokens']:,.0f} | {parts['train']['tokens']:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
