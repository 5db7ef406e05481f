"""`collab-results --significance`: what the translations of two runs differ by, and whether that is chance."""

from __future__ import annotations

from pathlib import Path

from .results import Grid


def blocks(folder: Path, against: str | None) -> list[str | Grid]:
    """Compare the translations in a folder, and format what was found."""
    from collab_compress.experiments.significance import significance

    found = significance(folder, against)
    header = ["model", "method", "stage", "task", "split", "seed", "BLEU", "difference", "p"]
    rows = [
        [
            each.variant.model, each.variant.method, each.variant.stage, each.column.name, each.split, str(each.seed),
            f"{each.score:.2f} ± {each.interval:.2f}",
            "" if each.difference is None else f"{each.difference:+.2f}", "" if each.p is None else f"{each.p:.3f}",
        ]
        for each in found
    ]  # fmt: skip
    references = dict.fromkeys(each.reference for each in found)
    return [
        "BLEU ± half of its 95 % interval over resamples of the sentences, and the difference to "
        f"{' or '.join(references)} of the same model, task and seed with its p by paired bootstrap: chance in the "
        f"test set, not in training. sacreBLEU: {', '.join(dict.fromkeys(each.signature for each in found))}.",
        Grid(header, rows, words=6),
    ]
