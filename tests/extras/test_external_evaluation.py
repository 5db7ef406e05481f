"""MTEB, the LM evaluation harness and jiwer themselves, on tasks that lie here: what is scored is what is there."""

import json

import pytest
import torch
from collab_compress_glue_runs.external_evaluation import lm_eval_scores, mteb_scores
from datasets import Dataset, DatasetDict
from scipy.stats import spearmanr
from tiny_words import WORDS, sentences, word_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from collab_compress import Compression, Solver, compress

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]  # warnings of these libraries are ignored


def test_mteb_on_a_converted_model(minilm_path):
    mteb = pytest.importorskip("mteb", reason="pip install '.[eval]'")
    from mteb.abstasks import AbsTaskSTS
    from sentence_transformers import SentenceTransformer

    ones, others = sentences(20), sentences(20, seed=1)
    scores = [float(len({*one.split()} & {*other.split()})) for one, other in zip(ones, others, strict=True)]

    class Local(AbsTaskSTS):
        metadata = mteb.TaskMetadata(
            name="Local",
            dataset={"path": "here", "revision": "1"},
            description="words in common",
            type="STS",
            category="t2t",
            eval_splits=["validation"],
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
        )

        def load_data(self, *_, **__):
            columns = {"sentence1": ones, "sentence2": others, "score": scores}
            self.dataset, self.data_loaded = DatasetDict(validation=Dataset.from_dict(columns)), True

    model = SentenceTransformer(str(minilm_path), device="cpu", local_files_only=True)
    compress(model, Compression(dk=192, solver=Solver(sweeps=2)), calibration=None)
    [score] = mteb_scores(model, [Local()], batch_size=8)
    one, other = (model.encode(texts, normalize_embeddings=True) for texts in (ones, others))
    expected = spearmanr((one * other).sum(1), scores).statistic
    assert (score.task, score.metric) == ("Local", "cosine_spearman")
    assert score.value == pytest.approx(expected, abs=1e-5)


TASK = """
task: after
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{before}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{right}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_lm_eval_on_a_converted_model(tmp_path):
    """Its tokenizer appends an end token to every text, which must not be predicted."""
    pytest.importorskip("lm_eval", reason="pip install '.[eval]'")
    rows = []
    for number, line in enumerate(sentences(30)):
        *before, last = line.split()
        choices = [WORDS[number % 12], last] if number % 2 else [last, WORDS[number % 12]]
        rows.append({"before": " ".join(before), "choices": choices, "right": number % 2})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "after.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 40}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = GPT2Config(**sizes, **ends, initializer_range=0.4)
    model = GPT2LMHeadModel(config).eval()
    compress(model, Compression(dk=6), calibration=None)
    [score] = lm_eval_scores(model, tokenizer, ["after"], include=tmp_path, batch_size=4)

    def likelihood(text):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            return float(model(torch.tensor([ids])).logits[0, -2].log_softmax(-1)[ids[-1]])

    right = 0
    for row in rows:
        one, other = (likelihood(f"{row['before']} {choice}") for choice in row["choices"])
        right += (other > one) == row["right"]
    assert (score.task, score.metric) == ("after", "acc")
    assert score.value == pytest.approx(right / len(rows))
