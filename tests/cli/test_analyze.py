"""The command `collab-analyze`, as a person types it."""

import json
import shutil

import pytest
import torch
from collab_compress_cli import start
from commands import ran
from tiny_words import bert_config, sentences, word_tokenizer, write_mrpc
from transformers import BertForSequenceClassification, MarianConfig, MarianModel

from collab_compress import Compression, Solver, compress
from collab_compress.options import SECTION_NAMES

QUICK = ("--rounds", 2, "--lengths", 4, "--head-sequences", 2, "--input-sequences", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny classifier, its conversion, a translator, sentences, pairs, and a task."""
    folder, tokenizer = tmp_path_factory.mktemp("analyze"), word_tokenizer()
    torch.manual_seed(0)
    model = BertForSequenceClassification(bert_config(tokenizer))
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 24, "max_position_embeddings": 40}
    tokens = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0, "forced_eos_token_id": 3}
    translator = MarianModel(MarianConfig(vocab_size=len(tokenizer), **heads, **layers, **tokens))
    for name, saved in (("dense", model), ("translator", translator)):
        saved.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    compress(model, Compression(dk=9, solver=Solver(sweeps=2)), calibration=None)
    model.save_pretrained(folder / "converted")
    tokenizer.save_pretrained(folder / "converted")
    lines = sentences(12)
    (folder / "sentences.txt").write_text("\n".join(lines) + "\n")
    (folder / "pairs.txt").write_text("".join(f"{line}\t{line.upper()}\n" for line in lines))
    (folder / "empty.txt").write_text("\n  \n")
    write_mrpc(folder / "data/MRPC/dev.tsv", ((lines[row], lines[-row]) for row in range(8)))
    (folder / "data/MRPC/train.tsv").write_text("what is not needed is not read\n")
    return folder


@pytest.fixture
def run(folder, tmp_path, capsys, monkeypatch):
    def run_command(*arguments):
        """Run the command in the folder of the models; return exit code and both outputs."""
        monkeypatch.chdir(folder)
        output = () if "--output" in arguments else ("--output", tmp_path / "heads")
        return ran(start.analyze, (*arguments, *output), capsys)

    return run_command


@pytest.fixture
def measured(succeeds, tmp_path):
    def measure(*arguments):
        """Run the command; return what it prints, and the JSON numbers."""
        printed = succeeds(*arguments, *QUICK)
        return printed, json.loads((tmp_path / "heads" / "numbers.json").read_text(encoding="utf-8"))

    return measure


def test_a_converted_model_against_the_dense_one(measured, tmp_path):
    printed, numbers = measured("converted", "--against", "dense", "--data", "sentences.txt")
    assert printed.rstrip().endswith(f"Page: {tmp_path / 'heads' / 'index.html'}")
    assert set(numbers["sections"]) == set(SECTION_NAMES)
    highlights = [line for section in numbers["sections"].values() for line in section["highlights"]]
    assert len(highlights) > 5
    assert all(line in printed for line in highlights)
    assert "\nLayers as converted have " in printed
    assert numbers["facts"]["model"].startswith("converted, BertForSequenceClassification, converted, ")
    assert numbers["facts"]["data"] == "sentences of sentences.txt: 12 sequences"
    assert numbers["facts"]["against"].startswith("dense, BertForSequenceClassification")
    rows = numbers["sections"]["cost"]["tables"]["modules"]["rows"]
    assert [row["width"] for row in rows] == [9, 9, None, None, None, None]


def test_widths_of_a_whole_layer(measured):
    sections = ("--sections", "widths", "cost", "--dff", 20)
    printed, numbers = measured("dense", "--data", "sentences.txt", *sections)
    rows = numbers["sections"]["cost"]["tables"]["modules"]["rows"]
    assert [row["width"] for row in rows if row["part"] == "feed-forward blocks"] == [20, 20]
    names = [row["module"] for row in numbers["sections"]["widths"]["tables"]["dff"]["rows"]]
    assert names == [f"bert.encoder.layer.{layer}.output.dense" for layer in (0, 1)]
    assert "dff = 20; " in numbers["sections"]["cost"]["reading"]
    assert "\nLayers with dk = 8, dff = 20 have " in printed
    assert "\nAttention with dk = 8 " in printed  # takes so long, or was timed beside other work


def test_the_page_has_a_default_place(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for expected in (0, 2):  # a second page does not replace the first
        code, _, error = ran(
            start.analyze, (folder / "dense", "--sections", "widths", "--sentences", 3, *QUICK), capsys
        )
        assert code == expected, error
    assert error == "collab-analyze: dense-heads exists; choose another output or remove it\n"
    assert (tmp_path / "dense-heads" / "index.html").is_file()


def test_folders_of_the_same_name_are_distinguished(measured, folder):
    """`collab-run` leaves its models in folders that are all called `model`."""
    for stage, name in (("tuned", "dense"), ("dk9", "converted")):
        shutil.copytree(folder / name, folder / "out" / stage / "model", dirs_exist_ok=True)
    _, numbers = measured("out/dk9/model", "--against", "out/tuned/model", "--sections", "mixing")
    assert numbers["facts"]["model"].startswith("out/dk9/model, ")
    assert numbers["facts"]["against"].startswith("out/tuned/model, ")


def test_random_tokens_and_chosen_sections(measured):
    printed, numbers = measured("dense", "--sections", "widths", "mixing", "--sentences", 3)
    assert numbers["facts"]["data"].startswith("random tokens: 3 sequences")
    assert set(numbers["sections"]) == {"widths"}
    assert "Not shown: mixing: heads of a dense model" in printed


def test_for_programs(measured, tmp_path):
    copy = tmp_path / "new" / "copy.json"
    printed, numbers = measured("dense", "--sections", "widths", "--sentences", 3, "--quiet", "--json", copy)
    assert printed == ""
    assert json.loads(copy.read_text(encoding="utf-8")) == numbers


def test_a_task_scores_heads(measured):
    printed, numbers = measured("dense", "--task", "mrpc", "--data-dir", "data", "--sections", "dominance")
    pruning = numbers["sections"]["dominance"]["tables"]["pruning"]
    assert len(pruning["rows"]) == 11
    assert all(0 <= row["accuracy and f1 on 4 rows of mrpc"] <= 100 for row in pruning["rows"])
    assert numbers["facts"]["data"].startswith("rows of mrpc, validation: 8 sequences")
    assert "the accuracy and f1 on 4 rows of mrpc is" in printed


def test_a_translator_reads_pairs(measured):
    _, numbers = measured("translator", "--data", "pairs.txt", "--sections", "attention_maps", "diversity")
    maps = numbers["sections"]["attention_maps"]["pictures"][0]["maps"]
    assert [title for title in maps if title.endswith(" 0")] == ["encoder 0 · 0", "decoder 0 · 0", "cross 0 · 0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dense", "--data", "missing.txt"], "cannot read"),
        (["dense", "--data", "empty.txt"], "empty.txt has no texts; all 2 are blank"),
        (["dense", "--against", "./nothing"], "nothing is not a directory"),
        (["translator", "--data", "sentences.txt"], "is no pair; an encoder–decoder reads a source and a target"),
        (["dense", "--data", "sentences.txt", "--task", "mrpc"], "give one of them"),
        (["dense", "--data-dir", "data"], "give --task NAME too"),
        (["dense", "--task", "mrpd"], "unknown task 'mrpd'"),
        (["dense", "--task", "mrpc", "--data-dir", "data/nothing"], "data/nothing"),
        (["translator", "--task", "mrpc", "--data-dir", "data"], "MarianModel does not answer mrpc"),
        (["dense", "--task", "multi30k", "--data-dir", "data/nothing"], "multi30k is translation, on which single"),
        (["dense", "--seed", str(2**64)], "seed is 18446744073709551616; expected at most 4,294,967,295"),
        (["dense", "--json", "dense/numbers.json"], "lies in"),
        (["dense", "--against", "converted", "--device", "cuda:99"], "device 'cuda:99' cannot be used"),
        (["dense", "--output", "dense"], "dense exists; choose another output"),
        (["dense", "--output", "dense/heads"], "dense/heads lies in dense"),
        (["dense", "--against", "converted", "--output", "converted/heads"], "converted/heads lies in"),
        (["dense", "--json", "new", "--output", "new"], "--output and --json are both new"),
        (["dense", "--sections"], "unknown section none"),
        (["dense", "--sentences", "0"], "expected at least 1"),
        (["dense", "--sections", "cost", "--dff", "9999"], "neurons, and dff is 9999; pass up to"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(fails, arguments, message):
    error = fails(*arguments)
    assert error.startswith("collab-analyze: ")
    assert message in error
