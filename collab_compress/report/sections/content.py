"""Content against context: section 2.2 of Collaborate."""

import torch

from collab_compress.analysis import ContentShare, content_share
from collab_compress.report.section import Cell, Column, Heatmaps, Omitted, Section, Table, ragged
from collab_compress.report.study import Study


def content(study: Study) -> Section | Omitted:
    """Show what share of each head's score variance depends on the key alone."""
    found = content_share(study.model, study.some(study.look.input_sequences), progress=study.progress("content"))
    labels = study.labels(found)
    count = min(study.look.input_sequences, study.sequences)
    mean = float(torch.cat([shares.content for shares in found.values()]).mean())
    return Section(
        "content",
        "Content against context",
        f"The variance of a head's scores over the keys that a query sees (in {count:,} sequences), split into what "
        "depends on the key alone (content, v·y) and what depends on query and key (context). What is left of 1 is "
        "twice their covariance, negative where they oppose each other. A conversion moves what all queries share "
        "from context into content, so compare converted models with converted ones.",
        "Collaborate, section 2.2",
        (_table(labels, list(found.values())),),
        tuple(_picture(labels, list(found.values()), name) for name in ("content", "context")),
        (f"Content makes {100 * mean:.1f} % of the variance of scores, mean over heads.",),
    )


def _table(labels: list[str], found: list[ContentShare]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (label, *(float(100 * part.mean()) for part in (shares.content, shares.context, shares.overlap)),
         float(100 * shares.content.max()), int(shares.content.argmax()))
        for label, shares in zip(labels, found, strict=True)
    ]  # fmt: skip
    columns = (
        Column("layer"), Column("content", "%"), Column("context", "%"), Column("overlap", "%"),
        Column("largest content", "%"), Column("of head"),
    )  # fmt: skip
    return Table("shares", "Shares of score variance, mean over heads", columns, tuple(rows))


def _picture(labels: list[str], found: list[ContentShare], name: str) -> Heatmaps:
    reading = {
        "content": "Strong cells are heads that look for certain tokens, whoever asks.",
        "context": "Strong cells are heads that look for what suits the token that asks; above 1 content opposes it.",
    }[name]
    shares = [getattr(each, name) for each in found]
    return Heatmaps(
        f"{name.capitalize()} share of each head", reading, "Collaborate, section 2.2",
        (ragged("", shares, labels),), 0.0, max(1.0 if name == "context" else 0.0, *(float(s.max()) for s in shares)),
        row_label="layer", column_label="head",
    )  # fmt: skip
