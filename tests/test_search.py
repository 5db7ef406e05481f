"""The benchmark of search: its scores by the formulas, and its collections."""

import math

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")
from search import Collection, interval, stay

GRADES = {"q1": {"a": 3, "c": 1}, "q3": {"b": 2, "gone": 4}}


@pytest.fixture
def collection(tmp_path):
    lines = {
        "documents": [f"{name}\ttext of {name}" for name in "abcd"],
        "queries": [f"q{number}\tquery {number}" for number in (1, 2, 3)],  # nothing is judged for the second
        "judgements": [
            f"{query}\t{name}\t{grade}" for query, judged in GRADES.items() for name, grade in judged.items()
        ],
    }
    for name, content in lines.items():
        (tmp_path / f"{name}.tsv").write_text("\n".join(content) + "\n", encoding="utf-8")
    return Collection(tmp_path)


def test_scores_are_those_of_the_formulas(collection, monkeypatch):
    monkeypatch.setattr("search.RANKS", 2)
    monkeypatch.setattr("search.RECALL_RANKS", 1)
    assert list(collection.queries) == ["q1", "q3"]
    similarity = {"q1": "cadb", "q3": "dbca"}  # documents from the nearest to the farthest
    queries = np.eye(2)
    documents = np.zeros((4, 2))
    for column, order in enumerate(similarity.values()):
        for rank, name in enumerate(order):
            documents["abcd".index(name), column] = 1 - rank / 4
    scores = collection.score(queries, documents)
    expected = []
    for query, order in similarity.items():
        gains = [GRADES[query].get(name, 0) for name in order[:2]]
        best = sorted((grade for name, grade in GRADES[query].items() if name in "abcd"), reverse=True)[:2]
        found, ideal = (sum(gain / math.log2(rank + 2) for rank, gain in enumerate(list_)) for list_ in (gains, best))
        expected.append(100 * found / ideal)
    assert scores["ndcg"] == pytest.approx(expected)
    assert scores["recall"].tolist() == [50, 0]  # of c and a, c; of b, none


def test_what_stays_of_the_first_documents(monkeypatch):
    monkeypatch.setattr("search.RANKS", 2)
    documents = np.array([[1, 0.9, 0.5, 0.1], [0.2, 0.1, 0.8, 0.9]])  # scores of four documents for two queries
    changed = np.array([[0.9, 0.1, 0.5, 1], [0.1, 0.2, 0.9, 0.8]])  # a and d come first, and c and d as before
    assert stay((np.eye(2), documents.T), (np.eye(2), changed.T)) == 75
    assert stay((np.eye(2), documents.T), (np.eye(2), documents.T)) == 100


def test_the_interval_holds_the_mean_and_narrows_with_more_queries():
    differences = np.random.default_rng(0).normal(-2, 10, 400)
    low, high = interval(differences)
    assert low < differences.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * differences.std() / 20, rel=0.1)
    assert interval(np.zeros(5)) == (0.0, 0.0)
