"""Others' yardsticks, played by modules that are as theirs are; tests/extras has them themselves."""

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from collab_compress_cli import evaluate as command
from scipy.io import wavfile
from tiny_words import word_tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from collab_compress import Compression, compress
from collab_compress.errors import CheckpointError, DataError
from collab_compress.yardsticks import Score, lm_eval_scores, mteb_scores, read_recordings, word_error_rate


@pytest.fixture
def run(capsys):
    def run_command(*arguments):
        """Run the command; returns exit code, standard output, standard error."""
        try:
            command.main([str(each) for each in arguments])
            code = 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run_command


def module(monkeypatch, name, **content):
    """Install a module for the time of a test."""
    made = ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def mteb(monkeypatch):
    """MTEB with one task, which scores a model by the length of what it makes of a text."""
    asked = []

    def get_task(name):
        if name != "Local":
            raise KeyError(f"KeyError: '{name}' not found. Did you mean: Local?")
        return SimpleNamespace(metadata=SimpleNamespace(name=name, main_score="cosine_spearman"))

    def evaluate(model, task, **options):
        asked.append(options)
        size = len(model.encode(["a text"])[0]) / 1000
        return SimpleNamespace(task_results=[SimpleNamespace(get_score=lambda: size)])

    module(monkeypatch, "mteb", get_task=get_task, evaluate=evaluate)
    return asked


@pytest.fixture
def lm_eval(monkeypatch):
    """The harness with one task; what it is given is kept."""
    asked = {}

    def model(**options):
        asked["model"] = options
        return "harnessed"

    def simple_evaluate(model, **options):
        asked["evaluate"] = {**options, "model": model}
        metrics = {
            "alias": "after",
            "acc,none": 0.25,
            "acc_stderr,none": 0.0625,
            "exact,strict": 1,
            "exact_stderr,strict": "N/A",
        }
        return {"results": {"after": metrics}, "groups": {"all": {"acc,none": 0.5, "acc_stderr,none": "N/A"}}}

    manager = SimpleNamespace(all_tasks=["after", "piqa"])
    harness = module(monkeypatch, "lm_eval", simple_evaluate=simple_evaluate)
    module(monkeypatch, "lm_eval.models")
    module(monkeypatch, "lm_eval.models.huggingface", HFLM=model)
    module(
        monkeypatch, "lm_eval.tasks", TaskManager=lambda include_path: asked.update(include=include_path) or manager
    )
    return asked, harness


def errors(wanted, found):
    """The fewest words to put in, leave out or change: row by row."""
    before = list(range(len(found) + 1))
    for row, word in enumerate(wanted, start=1):
        now = [row]
        for place, other in enumerate(found, start=1):
            now.append(min(before[place] + 1, now[-1] + 1, before[place - 1] + (word != other)))
        before = now
    return before[-1]


@pytest.fixture
def jiwer(monkeypatch):
    def wer(reference, hypothesis):
        pairs = [(one.split(), other.split()) for one, other in zip(reference, hypothesis, strict=True)]
        return sum(errors(*pair) for pair in pairs) / sum(len(wanted) for wanted, _ in pairs)

    module(monkeypatch, "jiwer", wer=wer)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A tiny converted decoder, and its tokenizer, which ends every text."""
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_embd=24, n_head=3, n_layer=1, n_positions=40, bos_token_id=2, eos_token_id=3,
        )
    ).eval()  # fmt: skip
    compress(model, Compression(dk=6), calibration=None)
    folder = tmp_path_factory.mktemp("models") / "decoder"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def listener(tmp_path_factory):
    """A tiny converted Whisper that hears a second at once, with its processor."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "listener"
    folder.mkdir()
    (folder / "normalizer.json").write_text(json.dumps({"colour": "color"}))
    words = [*sorted(ByteLevel.alphabet()), "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = WhisperTokenizer(vocab=vocabulary, merges=[], normalizer_file=str(folder / "normalizer.json"))
    config = WhisperConfig(
        vocab_size=len(tokenizer), d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=3,
        decoder_attention_heads=3, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=50,
        max_target_positions=20, init_std=0.4, pad_token_id=256, bos_token_id=256, eos_token_id=256,
        decoder_start_token_id=256, begin_suppress_tokens=None, max_length=12,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    model.generation_config.max_length = 12
    compress(model, Compression(dk=6, kinds=("encoder", "decoder")), calibration=None)
    model.save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(feature_size=8, chunk_length=1), tokenizer).save_pretrained(folder)
    (folder / "normalizer.json").write_text(json.dumps({"colour": "color"}))
    return folder


@pytest.fixture
def recordings(tmp_path):
    """Sounds of three kinds of samples, and what is said in them."""
    folder, generator = tmp_path / "recordings", np.random.default_rng(0)
    (folder / "inner").mkdir(parents=True)
    for name, rate, samples, text in (
        ("one", 16_000, generator.normal(size=12_000).astype(np.float32) / 9, "Mr. Brown's colour, isn't it?"),
        ("two", 8_000, generator.integers(-9999, 9999, (4_000, 2)).astype(np.int16), "Twenty-two words"),
        ("inner/three", 22_050, generator.integers(0, 256, 11_025).astype(np.uint8), "um, the third"),
    ):
        wavfile.write(folder / f"{name}.wav", rate, samples)
        (folder / f"{name}.txt").write_text(f"{text}\n", encoding="utf-8")
    return folder


def test_mteb(mteb, run, minilm_path, tmp_path):
    code, printed, error = run(minilm_path, "--mteb", "Local", "--json", tmp_path / "out.json", "--batch-size", 4)
    assert (code, error) == (0, "")
    assert printed.splitlines()[1].split() == ["Local", "cosine_spearman", "0.3840"]
    [options] = mteb
    assert options["encode_kwargs"] == {"batch_size": 4}
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["yardstick"] == "mteb"
    assert record["scores"] == [{"task": "Local", "metric": "cosine_spearman", "value": 0.384, "error": None}]


def test_mteb_without_the_task_or_its_data(mteb, monkeypatch):
    with pytest.raises(DataError, match=r"mteb has no task 'Elsewhere': .*Did you mean: Local"):
        mteb_scores(None, ["Elsewhere"])

    def evaluate(*_, **__):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(sys.modules["mteb"], "evaluate", evaluate)
    with pytest.raises(
        DataError, match="mteb cannot run Local: Couldn't reach the hub; its data are on the hub, which"
    ):
        mteb_scores(None, ["Local"])


def test_how_it_pools_is_not_guessed(mteb, run, decoder):
    code, _, error = run(decoder, "--mteb", "Local")
    assert code == 2
    assert "has no modules.json, so how it pools is not known" in error


def test_lm_eval(lm_eval, run, decoder, tmp_path):
    asked, _ = lm_eval
    options = ("--shots", 2, "--limit", 9, "--include", tmp_path, "--batch-size", 4, "--json", tmp_path / "out.json")
    code, printed, error = run(decoder, "--lm-eval", "after", *options)
    assert (code, error) == (0, "")
    assert [line.split() for line in printed.splitlines()[1:]] == [
        ["after", "acc", "0.2500", "0.0625"], ["after", "exact", "(strict)", "1.0000"], ["all", "acc", "0.5000"],
    ]  # fmt: skip
    assert asked["model"]["pretrained"].transformer.h[0].attn.score_form
    assert asked["model"]["batch_size"] == 4
    assert asked["model"]["add_bos_token"] is False  # its tokenizer ends every text
    assert asked["include"] == str(tmp_path)
    given = asked["evaluate"]
    assert (given["model"], given["tasks"], given["num_fewshot"], given["limit"]) == ("harnessed", ["after"], 2, 9)
    record = json.loads((tmp_path / "out.json").read_text())
    assert (record["shots"], record["limit"], len(record["scores"])) == (2, 9, 3)


def test_lm_eval_without_the_task_its_data_or_a_decoder(lm_eval, monkeypatch, minilm_path):
    _, harness = lm_eval
    tokenizer = word_tokenizer()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=6, n_head=1, n_layer=1, n_positions=8))
    with pytest.raises(DataError, match=r"lm_eval has no task 'pika'; did you mean piqa\?"):
        lm_eval_scores(model, tokenizer, ["pika"])

    def simple_evaluate(*_, **__):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(harness, "simple_evaluate", simple_evaluate)
    with pytest.raises(DataError, match="lm_eval cannot run after: Couldn't reach the hub; its data are on the hub"):
        lm_eval_scores(model, tokenizer, ["after"])
    with pytest.raises(DataError, match="GPT2LMHeadModel has no tokenizer; lm_eval takes a decoder"):
        lm_eval_scores(model, None, ["after"])
    encoder = BertModel(BertConfig(hidden_size=6, num_attention_heads=1, num_hidden_layers=1, intermediate_size=6))
    with pytest.raises(DataError, match="BertModel predicts no tokens; lm_eval takes a decoder"):
        lm_eval_scores(encoder, tokenizer, ["after"])


def test_word_error_rate(jiwer, run, listener, recordings, tmp_path):
    code, printed, error = run(listener, "--asr", recordings, "--json", tmp_path / "out.json", "--batch-size", 2)
    assert (code, error) == (0, "")
    model = WhisperForConditionalGeneration.from_pretrained(listener).eval()
    processor = WhisperProcessor.from_pretrained(listener)
    record, wrong, words = json.loads((tmp_path / "out.json").read_text()), 0, 0
    assert list(record["transcripts"]) == ["inner/three", "one", "two"]
    for name, (samples, said) in read_recordings(recordings).items():  # one by one
        heard = processor(samples, sampling_rate=16_000, return_tensors="pt")
        tokens = model.generate(heard["input_features"])
        assert record["transcripts"][name] == processor.decode(tokens[0], skip_special_tokens=True)
        wanted = processor.tokenizer.normalize(said).split()
        wrong += errors(wanted, processor.tokenizer.normalize(record["transcripts"][name]).split())
        words += len(wanted)
    assert record["scores"] == [
        {"task": "recordings", "metric": "wer", "value": pytest.approx(100 * wrong / words), "error": None}
    ]
    assert words == 7 + 2 + 2  # mister brown is color is not it; 22 words; the 3rd
    assert f"{100 * wrong / words:.4f}" in printed


def test_what_is_said_counts_as_whisper_writes_it(jiwer, listener):
    tokenizer = WhisperProcessor.from_pretrained(listener).tokenizer
    assert word_error_rate(["the COLOR, um, of 22"], ["The colour of twenty-two"], tokenizer) == 0
    assert word_error_rate(["red cat", "dog"], ["red cat runs", "dog"], tokenizer) == 25
    with pytest.raises(DataError, match=r"'\(laughs\)' has no words once it is normalised; take it out"):
        word_error_rate(["a"], ["(laughs)"], tokenizer)
    tokenizer.english_spelling_normalizer = None
    with pytest.raises(CheckpointError, match=r"no English spellings; put the normalizer.json of Whisper beside"):
        word_error_rate(["a"], ["a"], tokenizer)


def test_recordings_are_mono_at_the_rate_that_whisper_hears(recordings):
    found = read_recordings(recordings)
    assert {name: len(samples) for name, (samples, _) in found.items()} == {
        "one": 12_000, "two": 8_000, "inner/three": 8_000
    }  # fmt: skip
    for samples, _ in found.values():
        assert samples.dtype == np.float32
        assert np.abs(samples).max() < 1.6
    _, stereo = wavfile.read(recordings / "two.wav")
    sent = stereo.astype(np.float64).mean(1) / 32768
    spectrum = np.abs(np.fft.rfft(found["two"][0]))[1:1500], np.abs(np.fft.rfft(sent))[1:1500]
    np.testing.assert_allclose(spectrum[0] / 2, spectrum[1], rtol=0.1, atol=0.2)


def test_recordings_that_are_none(run, jiwer, listener, recordings, tmp_path):
    with pytest.raises(DataError, match=r"has no recordings; expected NAME.wav, each with its text in NAME.txt"):
        read_recordings(tmp_path / "elsewhere")
    wavfile.write(recordings / "two.wav", 8_000, np.zeros(9_000, np.int16))
    code, _, error = run(listener, "--asr", recordings)
    assert (code, error) == (2, "collab-evaluate: two is 1.1 seconds long; cut it to 1 at most\n")
    (recordings / "one.txt").unlink()
    with pytest.raises(DataError, match=r"one.wav cannot be read, or one.txt beside it: .*No such file"):
        read_recordings(recordings)
    (recordings / "inner" / "three.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match=r"three.wav cannot be read"):
        read_recordings(recordings)


def test_quiet_hides_what_others_say(lm_eval, run, decoder, monkeypatch):
    _, harness = lm_eval
    told = harness.simple_evaluate

    def simple_evaluate(*arguments, **options):
        print("100%", file=sys.stderr)
        return told(*arguments, **options)

    monkeypatch.setattr(harness, "simple_evaluate", simple_evaluate)
    assert run(decoder, "--lm-eval", "after", "--quiet") == (0, "", "")
    assert run(decoder, "--lm-eval", "after")[2] == "100%\n"


def test_what_does_not_listen(jiwer, run, decoder, recordings):
    code, _, error = run(decoder, "--asr", recordings)
    assert code == 2
    assert "GPT2LMHeadModel writes nothing down; expected WhisperForConditionalGeneration with its processor" in error


@pytest.mark.parametrize(("package", "arguments"), [
    ("mteb", ("--mteb", "STSBenchmark")), ("lm_eval", ("--lm-eval", "piqa")), ("jiwer", ("--asr", ".")),
])  # fmt: skip
def test_what_is_not_installed_is_told(run, monkeypatch, package, arguments):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(command, "load_source", None)  # before anything is loaded
    code, _, error = run("minilm", *arguments)
    assert code == 2
    assert error == f"collab-evaluate: {package} is not installed; pip install 'collab-compress[eval]'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --mteb TASK, --lm-eval TASK and --asr DIR"),
        (("--mteb", "A", "--asr", "."), "give one of --mteb TASK"),
        (("--mteb", "A", "--limit", "3"), "--limit is for --lm-eval; leave it out"),
        (("--lm-eval", "A", "--limit", "0"), "--limit 0: expected at least 1"),
        (("--asr", ".", "--batch-size", "0"), "--batch-size 0: expected at least 1"),
        (
            ("--lm-eval", "A", "--include", "nosuch"),
            "--include nosuch: expected a folder of the harness's YAML files",
        ),
    ],
)
def test_arguments_that_do_not_go_together(run, arguments, message):
    code, _, error = run("minilm", *arguments)
    assert code == 2
    assert message in error


def test_a_score_is_plain():
    assert Score("task", "metric", 1.0) == Score("task", "metric", 1.0, None)
