"""Every metric against the library that defines it, on the whole set, however the set came in."""

import math
import sys
import warnings

import numpy as np
import pytest
import sacrebleu
import torch
from collab_compress_glue_runs.metrics import METRICS, load_metric, token_losses
from scipy.stats import ConstantInputWarning, pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from collab_compress.errors import DataError

ROWS = 101
HYPOTHESES = ["The cat sat on the mat.", "A dog!", "", "Über den Fluss , he said", "the well-known end"] * 4
REFERENCES = ["the cat sat on a mat.", "A dog!", "Nothing.", "Over the river, he said", "The Well-Known End"] * 4


def inputs(name, seed=0):
    """Return random predictions and references for a metric."""
    generator = np.random.default_rng(seed)
    if name.startswith("bleu"):
        return HYPOTHESES, REFERENCES
    if name == "perplexity":
        return generator.gamma(2.0, 30.0, ROWS), generator.integers(0, 40, ROWS)
    if name == "correlation":
        references = generator.integers(0, 26, ROWS) / 5
        return references + generator.normal(size=ROWS), references
    classes = 2 if name in ("matthews", "accuracy+f1") else 3
    references = generator.integers(0, classes, ROWS)
    return np.where(generator.random(ROWS) < 0.6, references, generator.integers(0, classes, ROWS)), references


def expected(name, predictions, references):
    """Return the score by scikit-learn, SciPy, sacreBLEU, or the definition."""
    if name == "bleu":
        return {"bleu": sacrebleu.corpus_bleu(predictions, [references]).score}
    if name == "perplexity":
        nll = math.fsum(predictions) / int(np.sum(references))
        return {"perplexity": math.exp(nll), "nll": nll}
    if name == "correlation":
        correlations = {"pearson": pearsonr, "spearmanr": spearmanr}
        return {key: correlation(predictions, references).statistic for key, correlation in correlations.items()}
    if name == "matthews":
        return {"matthews_correlation": matthews_corrcoef(references, predictions)}
    scores = {"accuracy": accuracy_score(references, predictions)}
    return scores if name == "accuracy" else scores | {"f1": f1_score(references, predictions)}


def multi_bleu(hypotheses, references):
    """Return BLEU by the definition of Papineni et al.: clipped counts of up to four words, and brevity."""
    logarithms = []
    for size in range(1, 5):
        right, total = 0, 0
        for hypothesis, reference in zip(hypotheses, references, strict=True):
            ours, theirs = (
                [tuple(line[i : i + size]) for i in range(len(line) - size + 1)] for line in (hypothesis, reference)
            )
            right += sum(min(ours.count(gram), theirs.count(gram)) for gram in set(ours))
            total += len(ours)
        logarithms.append(math.log(right / total))
    lengths = [sum(map(len, lines)) for lines in (hypotheses, references)]
    return 100 * math.exp(min(0.0, 1 - lengths[1] / lengths[0]) + sum(logarithms) / 4)


def score(name, predictions, references, **options):
    return load_metric(name, **options).compute(predictions=predictions, references=references)


@pytest.mark.parametrize("name", sorted(METRICS.keys() - {"bleu-compounds-split"}))
def test_the_whole_set_is_scored_as_by_the_library(name):
    predictions, references = inputs(name)
    result, expected_scores = score(name, predictions, references), expected(name, predictions, references)
    assert {key: result[key] for key in expected_scores} == expected_scores
    assert set(METRICS[name].scores) <= set(result)
    assert all(type(value) is float for value in result.values())
    assert score(name, list(predictions), list(references)) == result
    if name != "bleu":
        assert score(name, torch.tensor(predictions), torch.tensor(references)) == result


def test_one_class_predicted():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert score("matthews", [1, 1, 1], [0, 1, 1]) == {"matthews_correlation": 0.0}
        assert score("matthews", [0, 1, 1], [1, 1, 1]) == {"matthews_correlation": 0.0}
        assert score("matthews", [1, 1], [1, 1]) == {"matthews_correlation": 0.0}
        assert score("accuracy+f1", [0, 0], [0, 0]) == {"accuracy": 1.0, "f1": 0.0}
        assert score("accuracy+f1", [0, 0], [1, 1]) == {"accuracy": 0.0, "f1": 0.0}
    assert matthews_corrcoef([0, 1, 1], [1, 1, 1]) == 0.0


def test_constant_predictions_correlate_with_nothing():
    with pytest.warns(ConstantInputWarning):
        assert math.isnan(pearsonr([2.0, 2.0, 2.0], [1.0, 2.0, 3.0]).statistic)
    for constant, other in (([2.0] * 3, [1.0, 2.0, 3.0]), ([1.0, 2.0, 3.0], [2.0] * 3), ([1.0], [2.0])):
        assert score("correlation", constant, other) == {"pearson": 0.0, "spearmanr": 0.0}
    nearly = score("correlation", [1e9, 1e9 + 1e-6, 1e9], [1.0, 2.0, 3.0])
    assert nearly["spearmanr"] == pytest.approx(0.0)


def test_a_model_that_diverged():
    for value in (math.nan, math.inf):
        result = score("correlation", [value, 1.0, 2.0], [1.0, 2.0, 3.0])
        assert all(math.isnan(number) for number in result.values())
        assert str(score("perplexity", [value, 1.0], [1, 1])["perplexity"]) == str(value)
    assert score("perplexity", [1e6], [1])["perplexity"] == math.inf
    assert score("perplexity", [1e308, 1e308], [1, 1])["perplexity"] == math.inf
    assert math.isnan(score("perplexity", [math.inf, -math.inf], [1, 1])["perplexity"])


def test_bleu_of_german_with_its_compounds_split(caplog):
    """The expected words of three lines are written by hand, as by the papers' script."""
    hypotheses = ["Die USA-Reise im E-Mail-Verkehr - ein Rich-Text.", "Ein Nord-Süd-Gefälle, sagte er.", "Das A-b-c."]
    references = [
        "Die USA-Reise im E-Mail-Verkehr - kein Rich-Text.",
        "Das Nord-Süd Gefälle, sagte er.",
        "Das A-b-c.",
    ]
    split_up = [
        "Die USA ##AT##-##AT## Reise im E ##AT##-##AT## Mail ##AT##-##AT## Verkehr - {} Rich ##AT##-##AT## Text .",
        "{} Nord ##AT##-##AT## Süd {} Gefälle , sagte er .",
        "Das A ##AT##-##AT## b-c .",
    ]
    by_hand = [
        [split_up[0].format(first).split(), split_up[1].format(*second).split(), split_up[2].split()]
        for first, second in (("ein", ("Ein", "##AT##-##AT##")), ("kein", ("Das", "")))
    ]
    actual = score("bleu-compounds-split", hypotheses * 100, references * 100)
    assert actual == {"bleu_compounds_split": pytest.approx(multi_bleu(*by_hand), rel=1e-9)}
    assert abs(actual["bleu_compounds_split"] - score("bleu", hypotheses, references)["bleu"]) > 1
    assert not caplog.text  # sacreBLEU warns of tokenized texts, which these are


def test_bleu_of_nothing_right():
    result, oracle = score("bleu", HYPOTHESES, REFERENCES), sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES])
    assert (result["brevity_penalty"], result["length_ratio"]) == (oracle.bp, oracle.sys_len / oracle.ref_len)
    assert score("bleu", ["", ""], ["a b", "c"]) == {"bleu": 0.0, "brevity_penalty": 0.0, "length_ratio": 0.0}


@pytest.mark.parametrize("shift", [True, False])
def test_token_losses_against_the_double_loop(shift):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 11, generator=generator)
    labels = torch.randint(0, 11, (3, 6), generator=generator)
    labels[0, 4:] = -100
    labels[2] = -100
    losses = token_losses(logits, labels, shift=shift)
    assert losses.dtype == torch.float64
    for row in range(3):
        total, count = 0.0, 0
        for place in range(6 - shift):
            label = int(labels[row, place + shift])
            if label != -100:
                total -= float(logits[row, place].double().log_softmax(-1)[label])
                count += 1
        assert losses[row].tolist() == [pytest.approx(total, rel=1e-6), count]


@pytest.mark.parametrize(
    ("name", "predictions", "references", "match"),
    [
        ("accuracy", [1, 0], [1, -1], "a reference is −1, which stands for no label"),
        ("matthews", [1, 0], [1, -1], "a reference is −1"),
        ("accuracy+f1", [1, 2], [1, 0], "F1 needs two classes, 0 and 1; got class 2"),
        ("perplexity", [1.0], [0], "the token counts sum to 0; expected more than 0"),
        ("perplexity", [1.0, 1.0], [5, -1], "no negative counts"),
    ],
)
def test_what_cannot_be_scored(name, predictions, references, match):
    with pytest.raises(DataError, match=match):
        score(name, predictions, references)


def test_what_cannot_be_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "MeCab", None)  # not installed
    with pytest.raises(DataError, match="unknown metric 'rouge'; expected one of accuracy, accuracy"):
        load_metric("rouge")
    with pytest.raises(DataError, match="unknown tokenizer 'moses'; expected one of 13a, char"):
        score("bleu", ["a"], ["a"], tokenize="moses")
    with pytest.raises(DataError, match="tokenizer 'ja-mecab' cannot be used: Japanese tokenization requires"):
        score("bleu", ["a"], ["a"], tokenize="ja-mecab")


@pytest.mark.parametrize("name", METRICS)
def test_nothing_cannot_be_scored(name):
    with pytest.raises(DataError, match="nothing to score"):
        load_metric(name).compute(predictions=[], references=[])


def test_labels_beyond_the_classes_are_refused():
    with pytest.raises(DataError, match="a label is none of the 5 classes of the logits: Target 9"):
        token_losses(torch.zeros(1, 3, 5), torch.tensor([[0, 9, 1]]))
