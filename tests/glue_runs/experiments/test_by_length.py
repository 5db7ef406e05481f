"""Batches of rows of similar lengths."""

from collab_compress_glue_runs.experiments.by_length import row_lengths
from datasets import Dataset


def test_lengths_are_those_of_the_longer_side():
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3], [4, 5, 6]], "labels": [[1], [2, 3], []]})
    assert row_lengths(rows, "input_ids").tolist() == [2, 1, 3]
    assert row_lengths(rows, "input_ids", "labels").tolist() == [2, 2, 3]
    assert row_lengths(rows.select([2, 0]), "input_ids", "labels").tolist() == [3, 2]
    classes = Dataset.from_dict({"input_ids": [[1, 2], [3]], "labels": [0, 1]})
    assert row_lengths(classes, "input_ids", "labels", "nothing").tolist() == [2, 1]
