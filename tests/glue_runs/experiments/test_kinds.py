"""Untrained translation, language and classification models: scores against loops over the files."""

import json
import math
from statistics import mean

import numpy as np
import pytest
import sacrebleu
import torch
from collab_compress_glue_runs.experiments import protocol, read_recipe, run
from collab_compress_glue_runs.experiments.workload import Classification, LanguageModel, Translation
from collab_compress_glue_runs.metrics import load_metric
from collab_compress_glue_runs.tasks import encode_masked_language_model, load_task
from tiny_recipes import TUNING, fresh_recipe, trained
from tiny_words import bert_config, word_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    EvalPrediction,
    GPT2Config,
    T5Config,
)

from collab_compress.errors import DataError, RecipeError
from collab_compress.training import HeadSeq2SeqTrainer

LANGUAGES = "translation={source: aa, target: bb, beams: 3, length_penalty: 0.6, max_length: 12}"


def translation(data_dir, output, *settings):
    return fresh_recipe(output, "task=parallel", f"data_dir={data_dir}", LANGUAGES, "fresh.layers=1", *settings)


def test_translation(sentences, tmp_path):
    records = run(translation(sentences, tmp_path / "out", "compression.dk=12", f"again={TUNING}"))
    assert [record["stage"] for record in records] == ["tuned", "dk12", "dk12-again"]
    test = load_task("parallel", sentences, source="aa", target="bb")["test"]
    for record in records[::2]:
        folder = tmp_path / "out" / record["stage"]
        written = (folder / "test.txt").read_text().splitlines()
        assert len(written) == 4
        assert record["score"] == record["metrics"]["test"]["bleu"]
        assert "bleu_compounds_split" not in record["metrics"]["test"]  # this is not German
        assert record["score"] == sacrebleu.corpus_bleu(written, [list(test["target"])]).score
        outcomes = np.load(folder / "test.examples.npz")
        assert (folder / "test.ref.txt").read_text().splitlines() == list(test["target"])
        model, tokenizer = trained(folder, AutoModelForSeq2SeqLM)
        losses = []
        for source, target, line in zip(test["source"], test["target"], written, strict=True):
            ids = tokenizer(source, return_tensors="pt", return_token_type_ids=False)
            output_ids = model.generate(**ids, num_beams=3, length_penalty=0.6, max_length=12)
            assert tokenizer.decode(output_ids[0], skip_special_tokens=True) == line
            labels = tokenizer(text_target=target)["input_ids"]
            before = [model.config.decoder_start_token_id, *labels[:-1]]
            for place, label in enumerate(labels):  # one token after the other
                logits = model(**ids, decoder_input_ids=torch.tensor([before[: place + 1]])).logits[0, -1]
                losses.append(-logits.double().log_softmax(-1)[label].item())
        assert record["metrics"]["test"]["perplexity"] == pytest.approx(math.exp(mean(losses)), rel=1e-4)
        assert outcomes["losses"].sum() == pytest.approx(sum(losses), rel=1e-4)
        assert outcomes["tokens"].sum() == len(losses)


def test_a_translator_is_distilled_without_labels(sentences, tmp_path):
    again = f"again={TUNING}".replace("epochs", "distilled: true, epochs")
    output = tmp_path / "out"
    records = run(translation(sentences, output, "compression.dk=3", "calibration=[none]", again))
    assert [record["stage"] for record in records] == ["tuned", "dk3", "dk3-again"]
    models = [trained(output / record["stage"], AutoModelForSeq2SeqLM) for record in records]
    pairs = load_task("parallel", sentences, source="aa", target="bb")["train"]
    (_, tokenizer), *_ = models
    batch = tokenizer(list(pairs["source"]), text_target=list(pairs["target"]), padding=True, return_tensors="pt")
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        dense, converted, distilled = (model(**batch).logits for model, _ in models)
    assert (distilled - dense).norm() < 0.9 * (converted - dense).norm()


def test_bleu_while_training(sentences, tmp_path, monkeypatch):
    """Each fine-tuning chooses whether BLEU is logged after each epoch; final scores do not use its beams."""
    beams = []

    def watched_predict(trainer, *arguments, **more):
        beams.append((trainer.args.generation_num_beams, trainer.args.generation_max_length))
        return predict(trainer, *arguments, **more)

    predict = HeadSeq2SeqTrainer.predict
    monkeypatch.setattr(HeadSeq2SeqTrainer, "predict", watched_predict)
    evaluation = {"eval_strategy": "epoch", "predict_with_generate": True, "generation_num_beams": 1}
    grouped = {"disable_tqdm": True, "train_sampling_strategy": "group_by_length", **evaluation}
    tuning = {"epochs": 4, "learning_rate": 2e-2, "batch_size": 2, "arguments": grouped}
    again = "again={epochs: 1, batch_size: 8, arguments: {disable_tqdm: true, eval_strategy: epoch}}"
    greedy = ("translation.beams=1", "translation.length_penalty=1.0")
    tuned, more = run(translation(sentences, tmp_path / "out", f"tuning={json.dumps(tuning)}", again, *greedy))
    scores = [line["eval_bleu"] for line in tuned["history"] if "eval_bleu" in line]
    assert len(scores) == 4
    assert scores[-1] == tuned["metrics"]["validation"]["bleu"]
    assert not any("eval_bleu" in line for line in more["history"])
    assert set(beams) == {(None, None)}
    assert tuned["seconds"] > 0


def test_german_without_validation_data(sentences, tmp_path):
    """BLEU with compounds split stands beside the score; none is logged while training."""
    for file in (sentences / "parallel").iterdir():
        if file.name.startswith("val"):
            file.unlink()
        elif file.suffix == ".bb":
            file.rename(file.with_suffix(".de_AT"))
    settings = ("translation.target=de_AT", "tuning.arguments={predict_with_generate: true}")
    [record] = run(translation(sentences, tmp_path / "out", *settings))
    assert not any("eval_bleu" in line for line in record["history"])
    assert record["metrics"].keys() == {"test"}
    metrics = record["metrics"]["test"]
    assert record["score"] == metrics["bleu"]
    written = (tmp_path / "out" / "tuned" / "test.txt").read_text().splitlines()
    references = load_task("parallel", sentences, source="aa", target="de_AT")["test"]["target"]
    expected = load_metric("bleu-compounds-split").compute(predictions=written, references=references)
    assert metrics["bleu_compounds_split"] == expected["bleu_compounds_split"]


def test_language_modelling(text, tmp_path, perplexity_by_token):
    """The score is the perplexity of the text, each token predicted from those before it in its block."""
    settings = ("task=text", f"data_dir={text}", "fresh.tokenizer=word", "fresh.vocab_size=null", "max_length=7")
    [record] = run(fresh_recipe(tmp_path / "out", *settings))
    model, tokenizer = trained(tmp_path / "out" / "tuned", AutoModelForCausalLM)
    expected = perplexity_by_token(model, tokenizer, text / "text" / "test.txt", 6)
    assert record["metrics"]["test"]["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert record["score"] == record["metrics"]["test"]["perplexity"]
    outcomes = np.load(tmp_path / "out" / "tuned" / "test.examples.npz")
    assert math.exp(outcomes["losses"].sum() / outcomes["tokens"].sum()) == pytest.approx(expected, rel=1e-5)
    assert model.config.is_decoder


def test_a_finished_language_model(text, tmp_path, monkeypatch):
    settings = [f"data_dir={text}", "task=text", "max_length=7", "trackers=[]"]
    [record] = run(fresh_recipe(tmp_path / "out", *settings))
    folder = tmp_path / "out" / "tuned" / "model"
    again = [*settings, f"model={folder}", f"output={tmp_path / 'again'}"]
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch --mixed_precision bf16` does
    [scored] = run(read_recipe(overrides=again))
    assert scored["score"] == record["score"]
    assert scored["environment"]["mixed_precision"] == "bf16"
    AutoModelForCausalLM.from_pretrained(folder).half().save_pretrained(tmp_path / "half")
    workload = LanguageModel(fresh_recipe(tmp_path / "more", *settings))
    assert workload.load_model(tmp_path / "half").dtype == torch.float32
    config = AutoConfig.from_pretrained(folder)
    config.is_decoder = False
    config.save_pretrained(folder)
    with pytest.raises(RecipeError, match="model attends to the tokens it should predict; give a decoder"):
        run(read_recipe(overrides=[*again[:-1], f"output={tmp_path / 'seeing'}"]))


def test_masked_language_modelling(text, tmp_path):
    overrides = ("task=text_masked", f"data_dir={text}", "compression.dk=24")
    records = run(fresh_recipe(tmp_path / "out", *overrides))
    assert [record["stage"] for record in records] == ["tuned", "dk24"]
    model, tokenizer = trained(tmp_path / "out" / "tuned", AutoModelForMaskedLM)
    rows = encode_masked_language_model(load_task("text", text)["test"], tokenizer, length=24, seed=0)
    losses = []
    for row in rows:
        labels = torch.tensor([row["labels"]])
        if (labels != -100).any():
            with torch.no_grad():
                logits = model(torch.tensor([row["input_ids"]])).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits, labels[0], reduction="none")[labels[0] != -100])
    expected = torch.cat(losses).mean().exp().item()
    for record in records:
        assert record["score"] == pytest.approx(expected, rel=1e-4)
    assert tokenizer.mask_token_id == 4


def test_a_classifier_without_pretraining(questions, tmp_path):
    settings = ("task=trec", f"data_dir={questions}", "heads.drophead=[{p: 0.2}]", "fresh.lowercase=true")
    [record] = run(fresh_recipe(tmp_path / "out", *settings))
    assert record["metrics"].keys() == {"test"}  # there is no other split with labels
    assert record["score"] == 100 * record["metrics"]["test"]["accuracy"]
    outcomes = np.load(tmp_path / "out" / "tuned" / "test.examples.npz")
    assert record["score"] == 100 * np.mean(outcomes["predictions"] == outcomes["labels"])
    assert outcomes["labels"].tolist() == list(load_task("trec", questions)["test"]["label"])
    model, tokenizer = trained(tmp_path / "out" / "tuned")
    assert model.num_labels == 6
    assert tokenizer("Red")["input_ids"] == tokenizer("red")["input_ids"]
    assert tokenizer("red")["input_ids"][0] == tokenizer.bos_token_id  # the position that the classifier reads


HEADS = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
BART = BartConfig(d_model=24, encoder_layers=1, decoder_layers=2, max_position_embeddings=40, **HEADS)
TINY = {
    "bart": ("sentences", "task=parallel", BART),
    "t5": ("sentences", "task=parallel", T5Config(d_model=24, d_kv=8, num_heads=3, num_layers=1, d_ff=16)),
    "gpt2": ("text", "task=text", GPT2Config(n_embd=24, n_head=3, n_layer=1, n_positions=40)),
    "distilbert": ("questions", "task=trec", DistilBertConfig(dim=24, n_heads=3, n_layers=1, hidden_dim=16)),
}


@pytest.mark.parametrize("name", sorted(TINY))
def test_a_fresh_model_like_another(name, request, tmp_path):
    fixture, task, config = TINY[name]
    config.save_pretrained(tmp_path / name)
    fresh = f"fresh={{config: {tmp_path / name}, vocab_size: 60, attention: {{dk: 12}}}}"
    more = (f"data_dir={request.getfixturevalue(fixture)}", task, fresh, "tuning.epochs=1", "compression=null")
    languages = [LANGUAGES] if fixture == "sentences" else []
    [record] = run(fresh_recipe(tmp_path / "out", *more, *languages))
    assert math.isfinite(record["score"])
    fresh_config = AutoConfig.from_pretrained(tmp_path / "out" / "tuned" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tuned" / "model")
    assert isinstance(fresh_config, type(config))  # guarded where attention is collaborative
    assert (fresh_config.vocab_size, fresh_config.pad_token_id) == (len(tokenizer), tokenizer.pad_token_id)
    assert fresh_config.num_hidden_layers == config.num_hidden_layers
    assert fresh_config.num_labels == (6 if name == "distilbert" else config.num_labels)


SIZES = "hidden_size: 24, num_attention_heads: 3, intermediate_size: 16"


def test_a_fresh_model_of_given_sizes(text, tmp_path):
    fresh = f"fresh={{config: {{model_type: llama, num_hidden_layers: 1, {SIZES}}}, vocab_size: 60}}"
    overrides = ("task=text", f"data_dir={text}", fresh, "compression=null")
    for _ in range(2):  # the second time it is there
        [record] = run(fresh_recipe(tmp_path / "out", *overrides))
    config = AutoConfig.from_pretrained(tmp_path / "out" / "tuned" / "model")
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("llama", 24, 1)
    assert record["recipe"]["fresh"]["config"]["hidden_size"] == 24
    with pytest.raises(RecipeError, match="was made with another fresh"):
        run(fresh_recipe(tmp_path / "out", *overrides, "fresh.config.hidden_size=12"))


def test_outputs_that_are_not_finite_have_no_score(questions, tmp_path):
    workload = Classification(fresh_recipe(tmp_path / "out", "task=trec", f"data_dir={questions}", "progress=false"))
    logits, labels = np.eye(6, dtype=np.float32), np.arange(6)
    assert workload.compute_metrics(EvalPrediction(logits, labels)) == {"accuracy": 1.0}
    logits[1] = np.nan
    metrics = workload.compute_metrics(EvalPrediction(logits, labels))
    assert metrics.keys() == {"accuracy"}
    assert math.isnan(metrics["accuracy"])


def test_chinese_is_scored_by_characters(sentences, tmp_path):
    for file in (sentences / "parallel").glob("*.bb"):
        file.rename(file.with_suffix(".zh"))
    workload = Translation(translation(sentences, tmp_path / "out", "translation.target=zh"))
    chinese = {"predictions": ["我爱猫和狗"], "references": ["我爱猫和鸟"]}
    assert workload.metric.compute(**chinese)["bleu"] > load_metric("bleu").compute(**chinese)["bleu"]


def test_held_out_training_data_choose_the_best_epoch(questions, tmp_path):
    best = "{eval_strategy: epoch, load_best_model_at_end: true, metric_for_best_model: accuracy}"
    settings = ("task=trec", f"data_dir={questions}", "held_out=0.25", f"tuning.arguments={best}")
    (record,) = run(fresh_recipe(tmp_path / "out", *settings))
    assert record["metrics"].keys() == {"validation", "test"}
    chosen = max(line["eval_accuracy"] for line in record["history"] if "eval_accuracy" in line)
    assert record["metrics"]["validation"]["accuracy"] == pytest.approx(chosen)
    split = [Classification(fresh_recipe(tmp_path / "out", *settings, f"seed={seed}")).texts for seed in range(2)]
    whole = load_task("trec", questions)
    texts = [sorted(rows["text"]) for rows in (split[0]["train"], split[0]["validation"], whole["train"])]
    assert (len(texts[0]), len(texts[1])) == (24, 8)
    assert sorted(texts[0] + texts[1]) == texts[2]
    assert split[0]["validation"]["text"] == split[1]["validation"]["text"]
    assert list(split[0]["test"]) == list(whole["test"])


BEST = "tuning.arguments={eval_strategy: epoch, load_best_model_at_end: true, metric_for_best_model: f1}"
LLAMA = "model_type: llama, num_hidden_layers: 1"
FIXTURES = {"task=trec": "questions", "task=text": "text", "task=parallel": "sentences"}


@pytest.mark.parametrize(
    ("task", "setting", "message"),
    [
        ("task=text", "fresh={config: {model_type: lama}}", "config says model_type 'lama'; expected a family"),
        ("task=text", f"fresh={{config: {{{LLAMA}, n_head: 3}}}}", "the config of llama has no field n_head"),
        ("task=text", f"fresh={{config: {{{LLAMA}, hidden_size: wide}}}}", "the config of llama: .*hidden_size"),
        ("task=text", f"fresh={{config: {{{LLAMA}, output_attentions: true}}}}", "no LlamaForCausalLM .*output_att"),
        ("task=text", "fresh={config: {model_type: t5}}", "has no t5 model for language modelling .config."),
        ("task=text", "fresh={config: T5, layers: 2}", "layers is what the config says; leave it or config out"),
        ("task=text", "fresh={config: T5/nosuch}", "the config of .*nosuch cannot be read"),
        ("task=text", "fresh.tokenizer=letters", "unknown kind of tokenizer 'letters'"),
        ("task=text", "attn_implementation=magic", "cannot be loaded for text: .*magic"),
        ("task=text", "tuning=null", "a fresh model is trained first; give tuning"),
        ("task=text", "held_out=0.25", "held_out is 0.25, but there is validation data; leave it out"),
        ("task=trec", "held_out=0.99", "0.99, which leaves no training data; lower it"),
        ("task=trec", BEST, "eval_strategy is epoch, but trec has no validation data; leave it out"),
        ("task=trec", f"held_out=0.25\n{BEST}", "metric_for_best_model is f1, and evaluations have loss, accuracy "),
        ("task=parallel", LANGUAGES.replace("12", "50"), "max_length is 50; the model has 40 positions"),
    ],
)
def test_what_cannot_be_run_is_refused_before_training(task, setting, message, request, tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "fine_tune", lambda *_: pytest.fail("it was trained"))
    TINY["t5"][2].save_pretrained(tmp_path / "t5")
    settings = setting.replace("T5", str(tmp_path / "t5")).split("\n")
    data_dir = request.getfixturevalue(FIXTURES[task])
    with pytest.raises((DataError, RecipeError), match=message):
        run(fresh_recipe(tmp_path / "out", task, f"data_dir={data_dir}", *settings))


@pytest.fixture
def classifier(tmp_path):
    """Return a function that saves a classifier with these classes, and returns it with the folder."""

    def save(*names, **config):
        torch.manual_seed(5)
        tokenizer = word_tokenizer()
        classes = {"num_labels": len(names), "id2label": dict(enumerate(names))}
        classes["label2id"] = {name: number for number, name in enumerate(names)}
        model = BertForSequenceClassification(bert_config(tokenizer, **classes, **config))
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path / "classifier")
        return model, tmp_path / "classifier"

    return save


@pytest.mark.parametrize("names", [("positive", "negative"), ("entailment", "neutral", "contradiction")])
def test_a_model_of_other_classes_is_not_scored_and_gets_a_new_head_for_training(classifier, data_dir, names, caplog):
    model, folder = classifier(*names)
    settings = ("fresh=null", f"model={folder}", "task=mrpc", f"data_dir={data_dir}")
    with pytest.raises(DataError, match=rf"has the classes {names[0]}, {names[1]}.*; mrpc has not_equivalent, equiv"):
        run(fresh_recipe(folder.parent / "scores", *settings, "tuning=null"))
    workload = Classification(fresh_recipe(folder.parent / "out", *settings))
    start = workload.load_model(folder, trained=False)
    assert f"the head of {folder} is of another task; a new one is drawn for mrpc" in caplog.text
    assert start.classifier.weight.shape == (2, 24)
    assert not torch.equal(start.classifier.weight, model.classifier.weight[:2])
    assert 0.3 < start.classifier.weight.detach().std() < 0.5  # as Transformers initializes it
    assert torch.equal(start.bert.pooler.dense.weight, model.bert.pooler.dense.weight)
    assert torch.equal(start.classifier.weight, workload.load_model(folder, trained=False).classifier.weight)
    [record] = run(workload.recipe)
    assert record["stage"] == "tuned"


def test_a_classifier_is_no_start_for_scores_with_its_head(classifier, tmp_path):
    for split in ("train", "dev"):
        (tmp_path / f"{split}.tsv").write_text("sentence1\tsentence2\tscore\nred cat\tdog\t1\ncat\tcat\t5\n")
    _, folder = classifier("positive", "negative")
    settings = ("fresh=null", f"model={folder}", "task=stsb", f"data_dir={tmp_path}")
    with pytest.raises(DataError, match="has the classes positive, negative; stsb has one score"):
        run(fresh_recipe(tmp_path / "scores", *settings, "tuning=null"))
    assert Classification(fresh_recipe(tmp_path / "out", *settings)).load_model(folder, trained=False).num_labels == 1


@pytest.mark.parametrize("names", [("LABEL_0", "LABEL_1"), ("0", "1"), ("Not_Equivalent", "Equivalent")])
def test_classes_without_names_are_the_task_s(classifier, data_dir, names, caplog):
    model, folder = classifier(*names)
    settings = ("fresh=null", f"model={folder}", "task=mrpc", f"data_dir={data_dir}")
    [record] = run(fresh_recipe(folder.parent / "scores", *settings, "tuning=null"))
    assert record["stage"] == "given"
    start = Classification(fresh_recipe(folder.parent / "out", *settings)).load_model(folder, trained=False)
    assert torch.equal(start.classifier.weight, model.classifier.weight)
    assert "another task" not in caplog.text


def test_training_is_tracked(text, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tuning = ("tuning.arguments={disable_tqdm: true, logging_steps: 1}", "tuning.epochs=9", "trackers=[tensorboard]")
    [record] = run(fresh_recipe(tmp_path / "out", "task=text", f"data_dir={text}", *tuning))
    events = EventAccumulator(str(tmp_path / "out" / "tuned" / "logs")).Reload()
    assert {"train/loss", "train/learning_rate"} <= set(events.Tags()["scalars"])
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == list(range(1, len(losses) + 1))
    assert losses[-1].value < losses[0].value
    (perplexity,) = events.Scalars("test/perplexity")
    assert perplexity.value == pytest.approx(record["score"], rel=1e-6)


def test_nothing_to_score(text, tmp_path):
    for name in ("valid", "test"):
        (text / "text" / f"{name}.txt").unlink()
    with pytest.raises(RecipeError, match="text has no split to score in"):
        run(fresh_recipe(tmp_path / "out", "task=text", f"data_dir={text}"))
