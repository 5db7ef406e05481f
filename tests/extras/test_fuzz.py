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
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from collab_compress_cli import analyze, compress
from collab_compress_glue_runs.commands import results
from collab_compress_glue_runs.commands import run as recipes
from safetensors.torch import load_file, save_file
from tiny_words import bert_config, sentences, word_tokenizer, write_mrpc
from transformers import BertForSequenceClassification

ROOT = Path(__file__).parents[2]
SECONDS = 60  # for one case; a command that hangs fails
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


@dataclass(frozen=True)
class Case:
    """Describe a command line, what is damaged before it, and words that its error must contain."""

    command: str
    arguments: tuple[str, ...]
    words: str
    spoil: tuple[Callable[[], object], ...] = field(default=())


CASES: dict[str, Case] = {}


def add(command: str, line: str | list[str], words: str, *spoil: Callable[[], object]) -> None:
    arguments = tuple(line.split() if isinstance(line, str) else line)
    name = f"{len(CASES):03}-{command}-{'-'.join(arguments)[:40]}".replace("/", "|").replace("\0", "NUL")
    CASES[name] = Case(command, arguments, words, spoil)


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
    "model": "nothing to do: pass --dk, --dv or --dff N",
    "model --dk": "Missing value for argument '--dk'",
    "model --dk 1.5": "--dk: expected INT, got '1.5'",
    f"model --dk {10**30}": "got a number of 31 digits; expected at most 30",
    "model extra --dk 8": "Unrecognized options: extra",
    "model --dk 8 --sweeps 0": "sweeps is 0",
    "model --dk 8 --sweeps many": "--sweeps: expected INT, got 'many'",
    "model --dk 8 --damping=-1": "damping is -1",
    "model --dk 8 --damping nan": "damping is nan",
    "model --dk 8 --damping some": "--damping",
    "model --dk 8 --seed 1.5": "--seed",
    "model --dk 8 --device cuda:99": "device 'cuda:99' cannot be used",
    "model --dk 8 --device meta": "device 'meta' cannot be used",
    "model --dk 8 --calibration model": "cannot read calibration texts from model",
    "model --dk 8 --calibration /dev/null": "cannot read calibration texts from /dev/null: expected a file",
    "model --mix --calibration none": "--calibration belongs to a conversion",
    "model --mix --dk 0": "dk is 0",
    "nothing --dk 8": "nothing is no local directory, the hub cannot be reached",
    "~nouser/x --dk 8": "~nouser/x is not a directory",
    f"{LONG} --dk 8": f"{LONG} is neither a directory nor a model on the hub",
    f"./{LONG} --dk 8": "is not a directory",
    "texts.txt --dk 8": "texts.txt is not a directory",
    "data --dk 8": "data has no config.json",
    "model/config.json --dk 8": "model/config.json is not a directory",
}.items():
    add("collab-compress", line, words)
for arguments, words in (
    (["model", "--dk", ""], "--dk: expected INT, got ''"),
    (["", "--dk", "8"], ". has no config.json"),
    (["mod\0el", "--dk", "8"], "expected UTF-8 text without NUL characters"),
    (["model", "--dk", "8", "--modules", ""], "matches ''"),
    (["model", "--dk", "8", "--device", ""], "device '' cannot be used"),
    (["model", "--dk", "8", "--calibration", ""], "calibration '' names no file"),
):
    add("collab-compress", arguments, words)
add("collab-compress", "model --dk 8 --calibration t", "t has no text", write("t", " \n\n"))
add(
    "collab-compress", "model --dk 8 --calibration t", "cannot read calibration texts from t", write("t", b"a \xff\n")
)

# Where it writes.
LINKS = (
    lambda: Path("link").symlink_to("texts.txt"),
    lambda: Path("dangling").symlink_to("nowhere"),
    lambda: Path("circle").symlink_to("circle"),
    lambda: os.mkfifo("pipe"),
)
for place in ("texts.txt", "link", "dangling", "circle", "pipe", "/dev/null", "/dev/full", "model/config.json"):
    add("collab-compress", f"model --dk 8 --output {place}", f"{place} exists; choose another output", *LINKS)
for place in ("dangling", "circle", "/dev/full"):
    add("collab-compress", f"model --dk 8 --json {place}", f"{place} exists; choose another output", *LINKS)
for place, words in {
    "model": "model exists",
    "circle/report.json": "circle is not a directory",
    "model/report.json": "model/report.json lies in model",
    "model/1_Pooling/report.json": "lies in model",
    "out/report.json": "lies in --output out",
    LONG: "File name too long",
}.items():
    add("collab-compress", f"model --dk 8 --output out --json {place}", words, *LINKS)
for place, words in {
    "model": "model exists",
    ".": "exists",
    "..": "exists",
    "/": "/ exists",
    "nope/..": "nope/.. exists",
    "nope/../model": "exists",
    "model/out": "model/out lies in model",
    "model/1_Pooling/out": "model/1_Pooling/out lies in model",
    "model/../model/out": "lies in model",
    "texts.txt/out": "texts.txt is not a directory",
    "circle/out": "cannot write circle/out",
    "/dev/null/out": "/dev/null is not a directory",
    LONG: "File name too long",
}.items():
    add("collab-compress", f"model --dk 8 --output {place}", words, *LINKS)
add("collab-compress", "model --dk 8 --calibration texts.txt --json texts.txt", "texts.txt exists")
add("collab-compress", ["model", "--dk", "8", "--output", "a\0b"], "expected UTF-8 text without NUL characters")
spoilt("model-dk8 exists", lambda: Path("model-dk8").mkdir())

# config.json
for text in (*BROKEN, "", '"x"', b"\xff\xfe{"):
    spoilt("config.json", write("model/config.json", text))
spoilt("model_type", write("model/config.json", "{}"))
ROBERTA = "names BertForSequenceClassification, which takes a BertConfig, but describes a roberta"
OWN_FOLDER = "only safetensors in the model's own folder"
WRONG_KIND = "a setting has a value of the wrong kind"
for entry, cases in {
    "attn_implementation": {
        name: f"attn_implementation is {name!r}" for name in ("flash_attention_2", "magic", "a/b", 3)
    },
    "dtype": {3: "", "float99": "float99"},
    "hidden_act": {"magic": "magic", 3: "hidden_act"},
    "hidden_size": {"x": "hidden_size", None: "hidden_size", -3: "", 0: "", 25: "25", 48: "has shape"},
    "layer_norm_eps": {"x": "layer_norm_eps"},
    "max_position_embeddings": {3: "has shape"},
    "model_type": {...: "model_type", "odd": "odd", 3: "config.json", None: "config.json", "t5": "config.json"},
    "num_attention_heads": {0: "", -1: "", 7: "7", "3": "num_attention_heads", None: "num_attention_heads"},
    "num_hidden_layers": {"x": "num_hidden_layers", 3: "lacks weights"},
    "quantization_config": {3: f"config.json: {WRONG_KIND}"},
    "transformers_weights": dict.fromkeys(("../other.safetensors", "/other.safetensors", "a.bin", 3), OWN_FOLDER),
    "vocab_size": {-1: "", 7: "has shape", 2.5: "vocab_size"},
}.items():
    for value, words in cases.items():
        spoilt(words, change("model/config.json", **{entry: value}))
for name, words in {
    "BertTokenizer": "needs the class BertTokenizer, which is no model of Transformers",
    "pipeline": "needs the class pipeline, which is no model",
    "Trainer": "needs the class Trainer, which is no model",
    "utils": "needs the class utils, which is no model",
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
    ("architectures", {"architectures": {"BertModel": 1}}),
    ("architectures", {"architectures": "BertModel"}),
    ("has no place for 16 tensors, such as bert.encoder.layer.1.", {"num_hidden_layers": 1}),
    ("", {"dtype": [1]}),
    (WRONG_KIND, {"id2label": ["a"]}),
    ("config.json", {"id2label": {"a": "b"}}),
    ("already converted", {"quantization_config": {**OURS, "version": 1, "edits": []}}),
    ("already converted", {"quantization_config": {**OURS, "version": 99}}),
    ("already converted", {"quantization_config": {**OURS, "edits": [3]}}),
    ("quantized", {"quantization_config": {}}),
    (f"config.json: {WRONG_KIND}", {"quantization_config": []}),
):
    spoilt(words, change("model/config.json", **entries))

# Code of a model's own.
HAS_CODE = write("model/evil.py", EVIL)
NAMES_CODE = {"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}, "architectures": ["Model"]}
EVIL_CONFIG = change("model/config.json", model_type="evil", **NAMES_CODE)
PROCESSOR = {"processor_class": "Evil", "auto_map": {"AutoProcessor": "evil.Processor"}}
TOKENIZER = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
spoilt("which is not run", HAS_CODE, EVIL_CONFIG)
add("collab-analyze", "model --output out", "which is not run", HAS_CODE, EVIL_CONFIG)
spoilt("is not run", HAS_CODE, change("model/config.json", **NAMES_CODE))
spoilt("which is not run", HAS_CODE, write("model/processor_config.json", PROCESSOR))
NO_TOKENIZER = (remove("model/tokenizer.json"), write("model/vocab.txt", "[UNK]\n"))
EVIL_TOKENIZER = write("model/tokenizer_config.json", TOKENIZER)
spoilt("cannot load the tokenizer in model", HAS_CODE, *NO_TOKENIZER, EVIL_TOKENIZER)

# Weights.
STORED = "model/model.safetensors"
for spoil in (
    remove(STORED),
    write(STORED, b""),
    write(STORED, random.Random(0).randbytes(1000)),
    write(STORED, b"\xff" * 8 + b"{}"),
    write(STORED, "version https://git-lfs\n"),
    pickled(STORED),
    lambda: os.truncate(STORED, 5000),
    lambda: os.truncate(STORED, Path(STORED).stat().st_size - 100),
):
    spoilt("cannot load weights from model", spoil)
spoilt("holds pickled weights", remove(STORED), pickled("model/pytorch_model.bin"))
QUERY = "bert.encoder.layer.0.attention.self.query.weight"
SHAPES = f"{QUERY} has shape (24, 23), the config makes it (24, 24)"
spoilt(SHAPES, weights(lambda w: w.update({QUERY: torch.zeros(24, 23)})))
spoilt("adapter", write("model/adapter_config.json", {"base_model_name_or_path": "x"}))
for value in (None, [], [1], 3, {}, "x"):
    spoilt("weight_map", *indexed(value))
OUTSIDE = ("../other.safetensors", "/other.safetensors", "a/../../other.safetensors", "C:\\other.safetensors")
for shard in (3, None, "pytorch_model.bin", "..\\other.safetensors", "", *OUTSIDE):
    spoilt(f"{OWN_FOLDER} are read", *indexed({QUERY: shard}), pickled("model/pytorch_model.bin"))
spoilt("cannot load weights", *indexed({QUERY: "nowhere.safetensors"}))
for text in ("[]", "{", "3", "[" * DEEP):
    spoilt("model.safetensors.index.json", remove(STORED), write(f"{STORED}.index.json", text))

# Tokenizers.
for name in ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"):
    for text in ("{", "[]"):
        spoilt("cannot load the tokenizer in model", write(f"model/{name}", text))
spoilt("calibration 'none'", lambda: [path.unlink() for path in Path("model").glob("*token*")])

# Folders of sentence-transformers.
for value in ("{", 3, None, ["x"], "[" * DEEP):
    spoilt("modules.json", write("model/modules.json", value))
for path in (5, None, ["1_Pooling"], ".", "..", "/etc", "1_Pooling/../.."):
    spoilt(f"names {path!r}", write("model/modules.json", [{"path": path}]))
DENSE = (pickled("model/2_Dense/pytorch_model.bin"), write("model/modules.json", [{"path": "2_Dense"}]))
spoilt("weights that are no safetensors", *DENSE)

# collab-analyze; tests/cli/test_analyze.py has its options by themselves
for line, words in {
    "": "missing",
    "model": "missing --output DIR",
    "model --output": "Missing value for argument '--output'",
    "model --output model": "model exists",
    "model --output texts.txt": "texts.txt exists",
    "model --output model/heads": "model/heads lies in model",
    "model --output nope/..": "nope/.. exists",
    "model --output out --against ./nowhere": "./nowhere is not a directory",
    "nowhere/at/all --output out": "nowhere/at/all",
    "model --output out --rounds 1.5": "--rounds",
    "model --output out --sections": "unknown section none",
    "model --output out --length=-1": "expected at least 1",
    "model --output out --seed abc": "--seed",
    "model --output out --device cuda:99": "device 'cuda:99' cannot be used",
    "model --output out --colour red": "Unrecognized options: --colour",
}.items():
    add("collab-analyze", line, words)

# collab-results
for line, words in {
    "": "no results: give a folder",
    "nowhere": "nowhere",
    "data": "data",
    "records other": "other is no folder",
    "records --format odd": "invalid choice 'odd'",
    "records --output texts.txt": "texts.txt exists",
    "records --output data": "data exists",
    "records --output link": "link exists",
    "records --output pipe": "pipe exists",
    "records --output /dev/full": "/dev/full exists",
    "records --output nope/..": "nope/.. exists",
    "records --output texts.txt/table.md": "texts.txt is not a directory",
    "--against": "Missing value for argument '--against'",
}.items():
    add("collab-results", line, words, *LINKS)
RECORD = "records/mrpc/plain/seed0/tuned/result.json"


def a_record():
    return json.loads((ROOT / "glue_runs" / "records" / "glue.jsonl").read_text().partition("\n")[0])


for text in (*BROKEN, "", b"\xff\xfe"):
    add("collab-results", "records", "result.json", write(RECORD, text))
for entries in ({"score": 10**400}, {"score": "high"}, {"task": 3}, {"recipe": []}):
    add("collab-results", "records", "result.json", change(RECORD, **entries))
for entries in ({"model": 3}, {"model": ["minilm"]}, {"translation": "de-en"}):
    described = {**a_record()["recipe"], **entries}
    add("collab-results", "records", "result.json", change(RECORD, recipe=described))

# Experiments.
GIVEN = "task=mrpc model=model data_dir=data output=out progress=false"
for line, words in {
    f"{GIVEN} colour=red": "colour",
    f"{GIVEN} task=odd": "odd",
    f"{GIVEN} model=./nowhere": "nowhere",
    f"{GIVEN} data_dir=nowhere": "nowhere",
    f"{GIVEN} max_length=0": "max_length is 0",
    f"{GIVEN} tuning.arguments.colour=red": "colour",
    f"{GIVEN} tuning.arguments.per_device_eval_batch_size=0 max_length=24": "batch_size",
    f"{GIVEN} trackers=odd": "odd",
    f"{GIVEN} output=texts.txt": "texts.txt",
    f"{GIVEN} output=mine": "mine",
    "nowhere.yaml": "nowhere.yaml",
    "list.yaml": "list.yaml",
    "broken.yaml": "broken.yaml",
    "bytes.yaml": "bytes.yaml",
    "model": "model",
    "--task": "task",
}.items():
    add(
        "collab-run",
        line,
        words,
        write("list.yaml", "- 1\n- 2\n"),
        write("broken.yaml", "a: [1\nb: {"),
        write("bytes.yaml", b"\xff\xfe\x00"),
        write("mine/start/notes.txt", "mine"),
        write("mine/given/checkpoints/notes.txt", "mine"),
    )
add("collab-run", GIVEN, "out/given exists and no experiment made it", write("out/given/recipe.json", "[]"))
add("collab-run", f"{GIVEN} output=mine", "mine", write("mine/given/result.json", "{}"))


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


@pytest.fixture
def limited() -> Iterator[None]:
    """Fail a command that does not end."""

    def fail(*_: object) -> None:
        pytest.fail(f"still running after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def run(case: Case) -> int | str | None:
    commands = {
        "collab-compress": compress,
        "collab-analyze": analyze,
        "collab-results": results,
        "collab-run": recipes,
    }
    try:
        commands[case.command].main(list(case.arguments))
    except SystemExit as stop:
        if isinstance(stop.code, str):  # as Python does where it ends
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code
    return 0


def test_there_are_many_cases() -> None:
    assert len(CASES) >= 200


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("name", CASES)
def test_one_line_and_nothing_changed(
    name: str, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    case, folder = CASES[name], tmp_path / "work"
    shutil.copytree(pristine, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n" * 1000))
    for spoil in case.spoil:
        spoil()
    before = contents(tmp_path)
    code = run(case)
    output, error = capfd.readouterr()
    assert contents(tmp_path) == before
    lines = [line for line in error.splitlines() if line.strip()]
    assert len(lines) == 1, error
    assert case.words in lines[0]
    assert "Traceback" not in output + error
    assert code == 2
    assert output == ""
