"""BLEU by sacreBLEU: Post 2018, "A call for clarity in reporting BLEU scores"."""

from collections.abc import Sequence

import datasets
from sacrebleu.metrics import BLEU

from collab_compress.errors import DataError
from collab_compress.metrics.base import Metric


class Bleu(Metric):
    """Corpus BLEU, from 0 to 100, of detokenized text against one or several references.

    Args:
        tokenize: sacreBLEU's tokenizer: 13a, intl, zh, char, none, …
        lowercase: whether case is ignored.
        gather: as for every metric.
    """

    scores = ("bleu",)
    formats = (
        {"predictions": datasets.Value("string"), "references": datasets.Value("string")},
        {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))},
    )

    def __init__(self, tokenize: str = "13a", lowercase: bool = False, *, gather: bool = False) -> None:
        if tokenize not in BLEU.TOKENIZERS:
            raise DataError(f"unknown tokenizer {tokenize!r}; expected one of {', '.join(sorted(BLEU.TOKENIZERS))}")
        super().__init__(gather=gather)
        self.tokenize, self.lowercase = tokenize, lowercase
        self.signature: str | None = None
        """How the last score came about, to be reported with it."""

    def _score(
        self, predictions: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]]
    ) -> dict[str, float]:
        rows = [[reference] if isinstance(reference, str) else list(reference) for reference in references]
        counts = {len(row) for row in rows}
        if len(counts) > 1 or 0 in counts:
            raise DataError(f"each sentence needs as many references as the others; got {sorted(counts)}")
        bleu = BLEU(tokenize=self.tokenize, lowercase=self.lowercase)
        score = bleu.corpus_score(list(predictions), [list(stream) for stream in zip(*rows, strict=True)])
        self.signature = str(bleu.get_signature())
        return {
            "bleu": float(score.score),
            "brevity_penalty": float(score.bp),
            "length_ratio": score.sys_len / score.ref_len if score.ref_len else 0.0,
        }
