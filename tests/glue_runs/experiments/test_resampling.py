"""Scores on resampled test sets and intervals of them, against loops over draws, seeds and examples."""

import math
import statistics
from zlib import crc32

import numpy as np
import pytest
from collab_compress_glue_runs.experiments import resampling
from collab_compress_glue_runs.experiments.examples import ngram_counts
from collab_compress_glue_runs.experiments.resampling import check_score, error_of_mean, resampled_scores
from collab_compress_glue_runs.metrics import METRICS, load_metric
from scipy import stats

from collab_compress.errors import RecipeError

WORDS = ["the", "a", "dog", "cat", "sat", "on", "mat", "runs", "over", "."]
DRAWS = 12


def outcomes(metric, seed=0, count=9):
    """Random outcomes, and for each example what the metric itself takes: a prediction and a reference."""
    generator = np.random.default_rng(seed)
    if metric == "bleu":
        references = [" ".join(generator.choice(WORDS, size=7)) for _ in range(count)]
        written = [
            " ".join(word if generator.random() < 0.7 else "red" for word in line.split()[: 7 - place % 3])
            for place, line in enumerate(references)
        ]
        return {"ngrams": ngram_counts(written, references, "13a")}, written, references
    if metric == "perplexity":
        losses, tokens = generator.uniform(1, 9, count).astype(np.float32), generator.integers(1, 9, count)
        return {"losses": losses, "tokens": tokens}, losses, tokens
    if metric == "correlation":  # with ties
        labels = generator.integers(0, 4, count).astype(np.float32)
        predictions = np.round(labels + generator.normal(size=count), 0).astype(np.float32)
    else:
        classes = 3 if metric == "accuracy" else 2
        labels = generator.integers(0, classes, count).astype(np.int16)
        predictions = np.where(generator.random(count) < 0.7, labels, 0).astype(np.int16)
    return {"predictions": predictions, "labels": labels}, predictions, labels


def score(metric, predictions, references):
    """Return the score in the benchmark's scale, of lists."""
    computed = load_metric(metric).compute(predictions=list(predictions), references=list(references))
    return METRICS[metric].scale * statistics.fmean(computed[name] for name in METRICS[metric].scores)


@pytest.mark.parametrize("metric", [name for name in METRICS if name != "bleu-compounds-split"])
def test_a_resampled_score_is_that_of_the_repeated_examples(metric, monkeypatch):
    monkeypatch.setattr(resampling, "DRAWS", DRAWS)
    splits = {"test": outcomes(metric), "test_second": outcomes(metric, seed=1, count=14)}
    computed = resampled_scores(metric, "task", {split: arrays for split, (arrays, _, _) in splits.items()})
    expected = np.zeros(DRAWS)
    for split, (_, predictions, references) in splits.items():
        count = len(predictions)
        generator = np.random.default_rng([count, crc32(f"task {split}".encode())])
        for draw, counts in enumerate(generator.multinomial(count, [1 / count] * count, size=DRAWS)):
            rows = [place for place, times in enumerate(counts) for _ in range(times)]
            expected[draw] += score(metric, [predictions[row] for row in rows], [references[row] for row in rows]) / 2
    assert computed == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert len(set(computed)) > 3


def test_few_matches_are_smoothed_as_sacrebleu_does():
    written, references = ["the cat sat on mats", "red red", "blue"], ["the cat is on mats .", "a dog", "a"]
    _, bleu = resampling.SCORES["bleu"]
    for rows in ([0], [0, 1, 2], [1], [2, 2]):
        counts = np.bincount(rows, minlength=3)[None].astype(float)
        computed = bleu({"ngrams": ngram_counts(written, references, "13a")}, counts)
        expected = score("bleu", [written[row] for row in rows], [references[row] for row in rows])
        assert computed == pytest.approx([expected])


def test_results_on_the_same_examples_get_the_same_draws():
    arrays, *_ = outcomes("accuracy")
    same = resampled_scores("accuracy", "trec", {"test": arrays})
    assert np.array_equal(same, resampled_scores("accuracy", "trec", {"test": dict(arrays)}))
    assert not np.array_equal(same, resampled_scores("accuracy", "imdb", {"test": arrays}))


def test_draws_are_kept_in_bytes():
    assert resampling._draws(500, 1, 30).nbytes == 500 * 30


def test_without_the_outcomes_that_a_score_needs_there_is_none():
    assert resampled_scores("accuracy", "trec", {}) is None
    assert resampled_scores("bleu", "multi30k", {"test": {"losses": np.ones(3), "tokens": np.ones(3)}}) is None


def test_outcomes_must_have_the_recorded_score():
    arrays, predictions, labels = outcomes("accuracy")
    check_score("accuracy", {"test": arrays}, score("accuracy", predictions, labels), "place")
    with pytest.raises(RecipeError, match=r"place has the score 12\.0000, and the outcomes of its examples have \d"):
        check_score("accuracy", {"test": arrays}, 12.0, "place")


def test_the_error_adds_chance_of_seeds_and_of_examples():
    generator = np.random.default_rng(3)
    values = [0.4, 1.2, 0.9, 0.1, 0.6]
    resampled = np.array(values)[:, None] + generator.normal(size=(5, 400)) / 3
    error, freedom = error_of_mean(np.array(values), resampled)
    of_seeds = statistics.variance(values) / 5
    of_examples = statistics.variance([statistics.fmean(draw) for draw in resampled.T])
    assert error == pytest.approx(math.sqrt(of_seeds + of_examples))
    assert freedom == pytest.approx((of_seeds + of_examples) ** 2 / (of_seeds**2 / 4))
    assert error_of_mean(np.array(values)) == pytest.approx((stats.sem(values), 4))
    assert error_of_mean(np.full(5, 2.0), resampled) == pytest.approx((math.sqrt(of_examples), math.inf))


@pytest.mark.parametrize(("seeds", "examples", "both"), [(1, 0, 0), (0, 1, 0), (0.05, 1, 1)])
def test_intervals_of_the_error_hold_the_mean_as_often_as_they_say(seeds, examples, both):
    """Outcomes that differ by seed, by example, and by both; the mean of all that there could be is 0."""
    generator, inside = np.random.default_rng(1), 0
    for _ in range(300):
        outcomes = examples * generator.normal(size=200) + both * generator.normal(size=(5, 200))
        outcomes += seeds * generator.normal(size=(5, 1))
        counts = generator.multinomial(200, np.full(200, 1 / 200), size=200)
        error, freedom = error_of_mean(outcomes.mean(1), outcomes @ counts.T / 200)
        inside += abs(outcomes.mean()) < stats.t.ppf(0.975, freedom) * error
    assert 0.92 < inside / 300 < 0.995
