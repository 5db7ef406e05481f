"""Bad command lines and bad files: one line on standard error, exit code 2, and nothing changed on disk.

Each case starts from the same small folder, spoils something, and runs a command in this process while somebody
answers yes to whatever is asked. Its error is compared with what the person needs to know.
"""

import io
import json
import os
import pickle
import random
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from collab_compress_cli import analyze, compress
from collab_compress_glue_runs.commands import results
from collab_compress_glue_runs.commands import run as recipes
from commands import ran
from safetensors.torch import load_file, save_file
from tiny_words import bert_config, sentences, word_tokenizer, write_mrpc
from transformers import BertForSequenceClassification

ROOT = Path(__file__).parents[2]
LONG, DEEP = "x" * 300, 100_000
BROKEN = ("{", "[]", "null", "3", "[" * DEEP)  # invalid JSON, or JSON that is no object
EVIL = """
import pathlib
pathlib.Path("executed").write_text("by the command")
from transformers import BertConfig, BertModel, BertTokenizer
class Config(BertConfig): model_type = "evil"
class Model(BertModel): config_class = Config
class Tokenizer(BertTokenizer): pass
class Processor(BertTokenizer): pass
"""


class Payload:
    """Hold the code that unpickling it would run."""

    def __reduce__(self):
        return (os.system, ("touch executed",))


CASES: dict[str, tuple[str, list[str], str, tuple[Callable[[], object], ...]]] = {}
"""Name of a case → its command, the arguments, words of the error, and what damages the folder before."""


def add(command: str, line: str | list[str], words: str, *spoil: Callable[[], object]) -> None:
    arguments = line.split() if isinstance(line, str) else line
    name = f"{len(CASES):03}-{command}-{'-'.join(arguments)[:40]}".replace("/", "|").replace("\0", "NUL")
    CASES[name] = (command, arguments, words, spoil)


def spoilt(words: str, *spoil: Callable[[], object]) -> None:
    """Add a usual command line on a spoilt folder."""
    add("collab-compress", "model --dk 8", words, *spoil)


def write(path: str, value: object) -> Callable[[], object]:
    """Write text, bytes, or JSON of anything else."""

    def spoil() -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(value, bytes):
            Path(path).write_bytes(value)
        else:
            Path(path).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")

    return spoil


def change(path: str, **entries: object) -> Callable[[], object]:
    """Set entries of a JSON file; None takes one out."""

    def spoil() -> None:
        content = {**json.loads(Path(path).read_text(encoding="utf-8")), **entries}
        Path(path).write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    return spoil


def weights(alter: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[], object]:
    def spoil() -> None:
        tensors = load_file("model/model.safetensors")
        alter(tensors)
        save_file(tensors, "model/model.safetensors", metadata={"format": "pt"})

    return spoil


def remove(path: str) -> Callable[[], object]:
    return lambda: Path(path).unlink()


def indexed(weight_map: object, **more: object) -> tuple[Callable[[], object], ...]:
    """Name the weights' files by an index."""
    index = {"metadata": {}, "weight_map": weight_map, **more}
    moved = [lambda: Path("model/model.safetensors").rename("other.safetensors")]
    return (*moved, write("model/model.safetensors.index.json", index))


def pickled(path: str) -> Callable[[], object]:
    return write(path, pickle.dumps(Payload()))


# The command line of collab-compress.
for line, words in {
    "": "missing MODEL",
    "model --dk": "Missing value for argument '--dk'",
    "model extra --dk 8": "Unrecognized options: extra",
    "model --dk 8 --damping nan": "damping is nan",
    "model --dk 8 --device meta": "device 'meta' cannot be used",
    "model --dk 8 --calibration model": "cannot read calibration texts from model",
    "nothing --dk 8": "nothing is no local directory, the hub cannot be reached",
    "~nouser/x --dk 8": "~nouser/x is not a directory",
    f"{LONG} --dk 8": f"{LONG} is neither a directory nor a model on the hub",
    "data --dk 8": "data has no config.json",
    "model/config.json --dk 8": "model/config.json is not a directory",
}.items():
    add("collab-compress", line, words)
for arguments, words in (
    (["model", "--dk", ""], "--dk: expected INT, got ''"),
    (["", "--dk", "8"], ". has no config.json"),
    (["mod\0el", "--dk", "8"], "expected UTF-8 text without NUL characters"),
    (["model", "--dk", "8", "--modules", ""], "matches ''"),
    (["model", "--dk", "8", "--calibration", ""], "calibration '' names no file"),
):
    add("collab-compress", arguments, words)

# Where it writes.
LINKS = (
    lambda: Path("dangling").symlink_to("nowhere"),
    lambda: Path("circle").symlink_to("circle"),
    lambda: os.mkfifo("pipe"),
)
for place, words in {
    "dangling": "dangling exists; choose another output",
    "pipe": "pipe exists; choose another output",
    "/dev/full": "/dev/full exists; choose another output",
    "nope/../model": "exists",
    "model/../model/out": "lies in model",
    "circle/out": "cannot write circle/out",
    LONG: "File name too long",
}.items():
    add("collab-compress", f"model --dk 8 --output {place}", words, *LINKS)
spoilt("model-dk8 exists", lambda: Path("model-dk8").mkdir())

# config.json
for text in (*BROKEN, b"\xff\xfe{"):
    spoilt("config.json", write("model/config.json", text))
spoilt("model_type", write("model/config.json", "{}"))
ROBERTA = "names BertForSequenceClassification, which takes a BertConfig, but describes a roberta"
OWN_FOLDER = "only safetensors in the model's own folder"
WRONG_KIND = "a setting has a value of the wrong kind"
for entry, cases in {
    "attn_implementation": {name: f"attn_implementation is {name!r}" for name in ("flash_attention_2", "magic", 3)},
    "dtype": {3: "", "float99": "float99"},
    "hidden_act": {"magic": "magic", 3: "hidden_act"},
    "hidden_size": {"x": "hidden_size", None: "hidden_size", -3: "", 0: "", 25: "25", 48: "has shape"},
    "layer_norm_eps": {"x": "layer_norm_eps"},
    "max_position_embeddings": {3: "has shape"},
    "model_type": {...: "model_type", "odd": "odd", 3: "config.json", None: "config.json", "t5": "config.json"},
    "num_attention_heads": {0: "", -1: "", 7: "7", "3": "num_attention_heads", None: "num_attention_heads"},
    "num_hidden_layers": {"x": "num_hidden_layers", 3: "lacks weights"},
    "quantization_config": {3: f"config.json: {WRONG_KIND}"},
    "transformers_weights": dict.fromkeys(("../other.safetensors", 3), OWN_FOLDER),
    "vocab_size": {-1: "", 7: "has shape", 2.5: "vocab_size"},
}.items():
    for value, words in cases.items():
        spoilt(words, change("model/config.json", **{entry: value}))
for name, words in {
    "BertTokenizer": "needs the class BertTokenizer, which is no model of Transformers",
    "pipeline": "needs the class pipeline, which is no model",
    "": "which is no model",
    "T5Model": "names T5Model, which takes a T5Config, but describes a bert",
    "PreTrainedModel": "PreTrainedModel",
}.items():
    spoilt(words, change("model/config.json", architectures=[name]))
OURS = {"quant_method": "collab_compress"}
for words, entries in (
    ("config.json", {"model_type": ["bert"]}),
    (ROBERTA, {"model_type": "roberta"}),
    ("architectures", {"architectures": [3]}),
    ("has no place for 16 tensors, such as bert.encoder.layer.1.", {"num_hidden_layers": 1}),
    ("", {"dtype": [1]}),
    (WRONG_KIND, {"id2label": ["a"]}),
    ("config.json", {"id2label": {"a": "b"}}),
    ("already converted", {"quantization_config": {**OURS, "version": 1, "edits": []}}),
    ("quantized", {"quantization_config": {}}),
    (f"config.json: {WRONG_KIND}", {"quantization_config": []}),
):
    spoilt(words, change("model/config.json", **entries))

# Code of a model's own.
HAS_CODE = write("model/evil.py", EVIL)
NAMES_CODE = {"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}, "architectures": ["Model"]}
EVIL_CONFIG = change("model/config.json", model_type="evil", **NAMES_CODE)
PROCESSOR = {"processor_class": "Evil", "auto_map": {"AutoProcessor": "evil.Processor"}}
add("collab-analyze", "model --output out", "which is not run", HAS_CODE, EVIL_CONFIG)
spoilt("is not run", HAS_CODE, change("model/config.json", **NAMES_CODE))
spoilt("which is not run", HAS_CODE, write("model/processor_config.json", PROCESSOR))

# Weights.
STORED = "model/model.safetensors"
for spoil in (
    remove(STORED),
    write(STORED, random.Random(0).randbytes(1000)),
    pickled(STORED),
    lambda: os.truncate(STORED, Path(STORED).stat().st_size - 100),
):
    spoilt("cannot load weights from model", spoil)
for value in (None, [1], {}):
    spoilt("weight_map", *indexed(value))
QUERY = "bert.encoder.layer.0.attention.self.query.weight"
spoilt("cannot load weights", *indexed({QUERY: "nowhere.safetensors"}))
for text in ("[]", "[" * DEEP):
    spoilt("model.safetensors.index.json", remove(STORED), write(f"{STORED}.index.json", text))

# Tokenizers.
for name in ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"):
    for text in ("{", "[]"):
        spoilt("cannot load the tokenizer in model", write(f"model/{name}", text))

# Folders of sentence-transformers.
for value in (3, ["x"], "[" * DEEP):
    spoilt("modules.json", write("model/modules.json", value))

# collab-analyze; tests/cli/test_analyze.py has its options by themselves
for line, words in {
    "": "missing",
    "model": "missing --output DIR",
    "model --output": "Missing value for argument '--output'",
    "model --output nope/..": "nope/.. exists",
    "nowhere/at/all --output out": "nowhere/at/all",
    "model --output out --sections": "unknown section none",
}.items():
    add("collab-analyze", line, words)

# collab-results
for line, words in {
    "data": "data",
    "records --format odd": "invalid choice 'odd'",
    "records --output pipe": "pipe exists",
    "records --output texts.txt/table.md": "texts.txt is not a directory",
    "--against": "Missing value for argument '--against'",
}.items():
    add("collab-results", line, words, *LINKS)
RECORD = "records/mrpc/plain/seed0/tuned/result.json"


def a_record():
    return json.loads((ROOT / "glue_runs" / "records" / "glue.jsonl").read_text().partition("\n")[0])


for text in (*BROKEN, b"\xff\xfe"):
    add("collab-results", "records", "result.json", write(RECORD, text))
add("collab-results", "records", "result.json", change(RECORD, score=10**400))

# Experiments.
GIVEN = "task=mrpc model=model data_dir=data output=out progress=false"
for line, words in {
    f"{GIVEN} output=texts.txt": "texts.txt",
    f"{GIVEN} output=mine": "mine",
    "bytes.yaml": "bytes.yaml",
    "model": "model",
    "--task": "task",
}.items():
    add(
        "collab-run",
        line,
        words,
        write("bytes.yaml", b"\xff\xfe\x00"),
        write("mine/start/notes.txt", "mine"),
    )


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier with its tokenizer, texts, a task, and a record of an experiment."""
    folder, tokenizer = tmp_path_factory.mktemp("pristine"), word_tokenizer()
    torch.manual_seed(0)
    BertForSequenceClassification(bert_config(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / "special_tokens_map.json").write_text("{}")
    (folder / "model" / "1_Pooling").mkdir()
    (folder / "model" / "1_Pooling" / "config.json").write_text("{}")
    lines = sentences(12)
    (folder / "texts.txt").write_text("\n".join(lines) + "\n")
    for name in ("train.tsv", "dev.tsv"):
        write_mrpc(folder / "data/MRPC" / name, ((lines[row], lines[-row]) for row in range(8)))
    (folder / RECORD).parent.mkdir(parents=True)
    (folder / RECORD).write_text(json.dumps(a_record()))
    return folder


def contents(folder: Path) -> dict[str, object]:
    """Map every path in a folder to the bytes of a file, the target of a link, or the kind of anything else."""
    result: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            result[str(path)] = os.readlink(path)
        else:
            result[str(path)] = path.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)
    return result


COMMANDS = {
    "collab-compress": compress,
    "collab-analyze": analyze,
    "collab-results": results,
    "collab-run": recipes,
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_nothing_changed(
    name: str, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (command, arguments, words, spoil), folder = CASES[name], tmp_path / "work"
    shutil.copytree(pristine, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n" * 1000))
    for damage in spoil:
        damage()
    before = contents(tmp_path)
    code, output, error = ran(COMMANDS[command].main, arguments, capfd)
    assert contents(tmp_path) == before
    lines = [line for line in error.splitlines() if line.strip()]
    assert len(lines) == 1, error
    assert words in lines[0]
    assert "Traceback" not in output + error
    assert code == 2
    assert output == ""
