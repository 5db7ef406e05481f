"""The hub, played by a function that gives what its data sets hold."""

from unittest.mock import Mock

import pytest
from collab_compress_glue_runs.tasks import TASKS, load_task
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets.exceptions import DatasetNotFoundError

from collab_compress.errors import DataError


@pytest.fixture
def hub(monkeypatch):
    """Put a data set with these columns and splits on the hub; return the list of requests."""
    requests = []

    def put(splits, columns, features=None):
        def load_dataset(path, **options):
            requests.append((path, options))
            return DatasetDict(dict.fromkeys(splits, Dataset.from_dict(columns, features=features)))

        monkeypatch.setattr("collab_compress_glue_runs.tasks.load.load_dataset", load_dataset)
        return requests

    return put


def labelled(names, **texts):
    return Features({**{name: Value("string") for name in texts}, "label": ClassLabel(names=names)})


def test_glue(hub):
    columns = {"sentence1": ["one", "two"], "sentence2": ["a", "b"], "label": [1, -1], "idx": [0, 1]}
    features = {**labelled(["not_equivalent", "equivalent"], sentence1=0, sentence2=0), "idx": Value("int32")}
    requests = hub(["train", "validation", "test", "other"], columns, Features(features))
    data = load_task("mrpc")
    assert requests == [("nyu-mll/glue", {"name": "mrpc"})]
    assert list(data) == ["train", "validation", "test"]
    assert [tuple(row.values()) for row in data["train"]] == [("one", "a", 1), ("two", "b", -1)]
    assert data["train"].features == TASKS["mrpc"].features
    assert list(load_task("mrpc", splits=["test"])) == ["test"]
    with pytest.raises(DataError, match="nyu-mll/glue has no split 'dev'; it has train, validation, test, other"):
        load_task("mrpc", splits=["dev"])


def test_mnli_and_stsb(hub):
    hub(["train", "validation_matched"], {"premise": ["p"], "hypothesis": ["h"], "label": [2]})
    assert load_task("mnli")["validation_matched"].to_list() == [{"text": "p", "text_pair": "h", "label": 2}]
    hub(["train"], {"sentence1": ["p"], "sentence2": ["h"], "label": [4.75]})
    assert load_task("stsb")["train"].to_list() == [{"text": "p", "text_pair": "h", "label": 4.75}]


def test_labels_by_name_have_the_numbers_of_our_table(hub):
    hub(["train"], {"text": ["How far ?", "How ?"], "label": [40, 0], "label_coarse_original": ["NUM", "DESC"]})
    assert [row["label"] for row in load_task("trec")["train"]] == [5, 0]
    hub(["train"], {"text": ["How far ?"], "label_coarse_original": ["NUMBER"]})
    with pytest.raises(DataError, match="trec: unknown label 'NUMBER'; expected one of DESC, ENTY"):
        load_task("trec")


def test_translation(hub):
    requests = hub(["train"], {"en": ["one"], "de": ["ein"]})
    assert load_task("multi30k")["train"].to_list() == [{"source": "ein", "target": "one"}]
    assert load_task("multi30k", source="en", target="de")["train"].to_list() == [{"source": "one", "target": "ein"}]
    assert requests == [("bentrevett/multi30k", {"name": None})] * 2
    with pytest.raises(DataError, match="bentrevett/multi30k has no column 'fr'; it has en, de"):
        load_task("multi30k", source="fr")


def test_what_only_its_conversion_has(hub):
    requests = hub(["train"], {"sentence": ["no it was n't"]})
    assert load_task("ptb")["train"].to_list() == [{"text": "no it was n't"}]
    options = {"data_dir": "penn_treebank", "revision": "refs/convert/parquet"}
    assert requests == [("ptb-text-only/ptb_text_only", options)]


def test_a_label_out_of_range(hub):
    hub(["train"], {"sentence": ["a"], "label": [4]})
    with pytest.raises(DataError, match="sst2: unknown label 4; expected one of negative, positive"):
        load_task("sst2")


@pytest.mark.parametrize("error", [ConnectionError("no network"), DatasetNotFoundError("gone"), ValueError("config")])
def test_no_hub_no_data_set(error, monkeypatch):
    monkeypatch.setattr("collab_compress_glue_runs.tasks.load.load_dataset", Mock(side_effect=error))
    with pytest.raises(DataError, match=rf"cannot load cola from the hub \({error}\); pass --data-dir .* train.tsv"):
        load_task("cola")


def test_tasks_that_are_on_no_hub():
    with pytest.raises(DataError, match=r"text is not on the hub; pass --data-dir .*train.txt"):
        load_task("text")


def test_without_training_data(hub):
    hub(["train", "validation"], {"sentence": ["a"], "label": [0]})
    assert list(load_task("sst2", train=False)) == ["validation"]
