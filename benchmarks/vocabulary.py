"""What a smaller vocabulary costs a model: parameters, bytes, longer texts, and quality.

    python benchmarks/vocabulary.py --data-dir DIR
    python benchmarks/vocabulary.py --data-dir DIR --model E5 --prefix "query: " --shares 0.5 0.25 0.125
    python benchmarks/vocabulary.py --data-dir DIR --model SMOLLM2 --shares 0.5

The first is MiniLM; E5 and SMOLLM2 are folders of `models.py`. DIR holds the GLUE tasks in their original TSV layout,
Multi30k and the Penn Treebank. Of each model a share of the tokens stays: the most frequent ones of some texts, then
the first ones in the tokenizer's order. Bytes are those of the weights, in float32, and of tokenizer.json.

* An encoder of sentences: Spearman correlation (×100) of mean-pooled embeddings on the dev rows of STS-B. Tokens are
  counted in the built-in texts, in 1,024 sentences of STS-B's training rows, or in all of them. A text that keeps its
  tokens keeps its embedding, which is not computed again.
* One with a prefix, which goes before each text that it reads or that tokens are counted in, is multilingual: the
  same, and of the 1,000 English test captions of Multi30k the share (%) whose nearest neighbour among the German and
  among the French ones is its translation. Tokens are counted in the built-in texts, or in the training captions of
  all three languages.
* A language model: perplexity for each character of the Penn Treebank's test text, as much of it as 10,240 tokens of
  the whole vocabulary write. All read it in the same 20 parts, each after the token that begins a text. Tokens are
  counted in the built-in texts, or in the training text.
"""

import math
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from collab_compress_glue_runs.metrics import token_losses
from collab_compress_glue_runs.tasks import load_task
from language_models import load
from quality import Embeddings, embed
from scipy.stats import spearmanr
from timing import make_parser, measure_new
from torch import Tensor, nn
from transformers import AutoConfig

from collab_compress import trim_vocabulary_
from collab_compress.calibration.builtin import builtin_texts

SENTENCES = 1024
PARTS, LENGTH = 20, 512  # of the Penn Treebank


class Encoder:
    """An encoder of sentences, scored on STS-B, and on translations of captions if its texts have a prefix."""

    def __init__(self, folder: Path | None, data: Path, prefix: str) -> None:
        self.task, self.prefix = Embeddings(data, folder), prefix
        self.vectors: dict[tuple[str, ...], Tensor] = {}  # by the tokens of a text, which is read once if they stay
        self.texts, self.captions = self.sentences("validation"), dict[str, dict[str, list[str]]]()
        for target in ("de", "fr") if prefix else ():
            pairs = load_task("multi30k", data, source="en", target=target, splits=["train", "test"])
            for name, column in (("en", "source"), (target, "target")):
                self.captions[name] = {split: list(rows[column]) for split, rows in pairs.items()}
        for captions in self.captions.values():
            self.texts += captions["test"]

    def load(self) -> tuple[Any, Any]:
        return self.task.load()

    def sentences(self, split: str) -> list[str]:
        """Return the different sentences of some rows of STS-B, in order."""
        rows = load_task("stsb", self.task.data, splits=[split])[split]
        return list(dict.fromkeys([*rows["text"], *rows["text_pair"]]))

    def counted(self) -> dict[str, list[str]]:
        """Return what tokens are counted in beside the built-in texts."""
        if self.captions:
            return {"captions": [text for captions in self.captions.values() for text in captions["train"]]}
        training = self.sentences("train")
        random.Random(0).shuffle(training)
        return {"1,024 sentences": training[:SENTENCES], "all sentences": training}

    @torch.no_grad()
    def score(self, model: Any, tokenizer: Any) -> dict[str, float]:
        def embedded(texts: Sequence[str]) -> Tensor:
            prefixed = [self.prefix + text for text in texts]
            keys = [tuple(tokenizer.tokenize(text)) for text in prefixed]
            new = {key: text for key, text in zip(keys, prefixed, strict=True) if key not in self.vectors}
            if new:
                self.vectors.update(zip(new, embed(model, tokenizer, list(new.values())), strict=True))
            return torch.stack([self.vectors[key] for key in keys])

        rows = load_task("stsb", self.task.data, splits=["validation"])["validation"]
        cosines = torch.cosine_similarity(embedded(rows["text"]), embedded(rows["text_pair"]))
        scores = {"STS-B": 100 * float(spearmanr(cosines, rows["label"]).statistic)}
        vectors = {name: nn.functional.normalize(embedded(texts["test"])) for name, texts in self.captions.items()}
        for name in [name for name in vectors if name != "en"]:
            found = (vectors["en"] @ vectors[name].mT).argmax(1) == torch.arange(len(vectors["en"]))
            scores[f"en→{name}"] = 100 * float(found.float().mean())
        return scores


class LanguageModel:
    """A language model, scored by its perplexity for each character of the Penn Treebank."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.prefix = folder, ""
        self.treebank = load_task("ptb", data, splits=["train", "test"])
        _, tokenizer = self.load()
        ids = torch.tensor(tokenizer("\n".join(self.treebank["test"]["text"]))["input_ids"][: PARTS * LENGTH])
        self.texts = tokenizer.batch_decode(ids.view(PARTS, LENGTH))

    def load(self) -> tuple[Any, Any]:
        model, tokenizer, _ = load(self.folder)
        return model, tokenizer

    def counted(self) -> dict[str, list[str]]:
        """Return what tokens are counted in beside the built-in texts."""
        return {"training text": list(self.treebank["train"]["text"])}

    @torch.no_grad()
    def score(self, model: Any, tokenizer: Any) -> dict[str, float]:
        loss = 0.0
        for text in self.texts:
            ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]])
            loss += float(token_losses(model(input_ids=ids).logits, ids)[0, 0])
        return {"perplexity per character": math.exp(loss / sum(map(len, self.texts)))}


def measure(bench: Encoder | LanguageModel, share: float, texts: Sequence[str]) -> dict[str, float]:
    """Return the size of a model with a share of its tokens, and its scores."""
    model, tokenizer = bench.load()
    before = sum(map(len, tokenizer(bench.texts)["input_ids"]))
    if share < 1:
        counted = [bench.prefix + text for text in texts]
        trim_vocabulary_(model, tokenizer, counted, tokens=int(share * len(tokenizer)))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    size = weights + len(tokenizer.backend_tokenizer.to_str().encode())
    longer = sum(map(len, tokenizer(bench.texts)["input_ids"])) / before - 1
    figures = {"tokens": len(tokenizer), "parameters": model.num_parameters(), "bytes": size, "longer": longer}
    return figures | bench.score(model, tokenizer)


def main() -> None:
    """Measure what is not in the records, and append it."""
    parser = make_parser(__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="default: MiniLM")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "records" / "vocabulary.jsonl")
    args = parser.parse_args()
    bench: Encoder | LanguageModel
    if args.model and "CausalLM" in AutoConfig.from_pretrained(args.model).architectures[0]:
        bench = LanguageModel(args.model, args.data_dir)
    else:
        bench = Encoder(args.model, args.data_dir, args.prefix)
    builtin = [text for text in builtin_texts(pairs=False) if isinstance(text, str)]
    counted = {"built-in texts": builtin, **bench.counted()}
    cases: list[tuple[float, str]] = [(1.0, "nothing"), *product(args.shares, reversed(counted))]
    of_model = {"model": args.model.name if args.model else "minilm"}
    measure_new(
        args.records,
        ({**of_model, "share": share, "counted": name} for share, name in cases),
        lambda case: measure(bench, case["share"], counted.get(case["counted"], ())),
    )


if __name__ == "__main__":
    main()
