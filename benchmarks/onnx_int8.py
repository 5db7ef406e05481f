"""MiniLM in ONNX Runtime, dense and at half of everything, in float32 and int8: time, size and quality in one run.

    python benchmarks/onnx_int8.py --data-dir DIR [--shapes 32x1 128x8] [--threads 2 --wall] [--records FILE]

DIR holds the GLUE tasks in their original TSV layout: 512 unlabelled pairs of STS-B's training rows calibrate the
conversion, and the dev rows score each of the four by the Spearman correlation of embeddings (×100). int8 is dynamic
quantization, weights channel by channel. ONNX Runtime's fusion of sums with layer norms is left out, because all four
are faster without it; --fused keeps it. They take turns; a row is the median of its time over a baseline's.
"""

import argparse
import copy
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from quality import Embeddings, Row, calibration_data, smaller_model
from speed import Session, minilm, token_batch
from timing import add_timing_arguments, paired_times, print_row, ratio
from torch import Tensor
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

HALF = "per-head dk=192 dv=192 dff=768 equal"
SLOWER = ("SkipLayerNormFusion",)
PAIRS = (  # what is timed, over what
    ("ours", "dense"),
    ("dense int8", "dense"),
    ("ours int8", "dense"),
    ("ours int8", "dense int8"),
)


class Encoder:
    """A session that is called as the encoder that it was exported from."""

    def __init__(self, session: Any, config: Any) -> None:
        self.session, self.config = session, config

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **_: Tensor) -> Any:
        outputs = self.session(input_ids=input_ids, attention_mask=attention_mask)
        return SimpleNamespace(last_hidden_state=torch.from_numpy(outputs[0]))


def half(task: Any, dense: Any, tokenizer: Any) -> Any:
    """Return MiniLM at half of its queries, keys, values and feed-forward width."""
    batches = calibration_data("text", task, dense, tokenizer, seed=0)
    return smaller_model(Row.parse(HALF), dense, tokenizer, batches, task, seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=["32x1", "128x8"], help="tokens x sequences")
    parser.add_argument("--fused", action="store_true", help="keep all of ONNX Runtime's fusions")
    add_timing_arguments(parser, seconds=60)
    args = parser.parse_args()
    disable_progress_bar()
    set_verbosity_error()
    torch.set_num_threads(args.threads)
    task = Embeddings(args.data_dir)
    dense, tokenizer = minilm("eager"), task.load()[1]
    models = {"dense": dense, "ours": half(task, dense, tokenizer)}
    sessions, without = {}, () if args.fused else SLOWER
    with tempfile.TemporaryDirectory() as folder:
        for name, model in models.items():
            for suffix in ("", " int8"):
                exported = copy.deepcopy(model)
                sessions[name + suffix] = Session(exported, Path(folder), args.threads, bool(suffix), without)
    scores = {name: task.score(Encoder(session, dense.config), tokenizer) for name, session in sessions.items()}
    for name, session in sessions.items():
        print(f"{name:12} {session.size / 2**20:6.1f} MiB  STS-B {scores[name]:.2f}", flush=True)
    for shape in args.shapes:
        length, batch = map(int, shape.split("x"))
        times = paired_times(
            {name: partial(each, **token_batch(batch, length)) for name, each in sessions.items()}, args
        )
        for name, baseline in PAIRS:
            size = sessions[name].size / sessions[baseline].size
            figures = {**ratio(times, name, baseline), "size": size, "score": scores[name]}
            cell = {"onnx fused T" if args.fused else "onnx T": length, "batch": batch, "over": baseline}
            print_row(cell, name, figures, args)


if __name__ == "__main__":
    main()
