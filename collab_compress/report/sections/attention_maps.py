"""Attention maps of one sentence: Figure 1 of Inter-Head Diversity."""

from collab_compress.analysis import AttentionMap
from collab_compress.analysis import attention_maps as maps_of
from collab_compress.report.section import Heatmap, Heatmaps, Omitted, Section, heatmap, numbered
from collab_compress.report.study import Study

TOKENS = 40  # beyond that a map is cut
LAYERS = 12  # that are shown at most


def attention_maps(study: Study) -> Section | Omitted:
    """Show what each head attends to in a sentence."""
    if study.tokenizer is None or study.sentence is None:
        return Omitted("there is no sentence to read, or no tokenizer to read it with")
    text, target = study.sentence if isinstance(study.sentence, tuple) else (study.sentence, None)
    found = maps_of(study.model, study.tokenizer, text, target=target)
    names = list(found)[:: -(-len(found) // LAYERS)]
    first = found[names[0]]
    word = _word(first, set(study.tokenizer.all_special_tokens))
    skipped = "" if len(names) == len(found) else f" {len(names)} of {len(found)} modules are shown."
    return Section(
        "attention_maps",
        "What heads attend to",
        f"Attention weights of every head for the sentence “{text}”, read as {' '.join(first.queries[:TOKENS])}."
        + (f" Its target: “{target}”." if target else "") + skipped,
        "Diversity, Fig. 1",
        pictures=(_rows(study, {name: found[name] for name in names}, word), _grid(study, found, names)),
    )  # fmt: skip


def _word(found: AttentionMap, special: set[str]) -> int:
    """Choose the token whose attention is shown: the longest that is no special one."""
    lengths = [0 if token in special else len(token.strip("Ġ▁#")) for token in found.queries[:TOKENS]]
    return max(range(len(lengths)), key=lengths.__getitem__)


def _rows(study: Study, found: dict[str, AttentionMap], place: int) -> Heatmaps:
    maps = []
    for name, each in found.items():
        row = min(place, len(each.queries) - 1)
        matrix = each.weights[:, row, :TOKENS]  # (H, S)
        title = f"layer {study.label(name)}, from “{each.queries[row]}”"
        maps.append(heatmap(title, matrix, numbered(len(matrix)), each.keys[:TOKENS]))
    return Heatmaps(
        "One word's attention",
        "Each row is a head; rows that look alike attend alike, and a column of its own says where a head looks.",
        "Diversity, Fig. 1",
        tuple(maps), 0.0, 1.0, row_label="head", column_label="token attended to",
    )  # fmt: skip


def _grid(study: Study, found: dict[str, AttentionMap], names: list[str]) -> Heatmaps:
    maps: list[Heatmap] = [
        heatmap(f"{study.label(name)} · {head}", weights[:TOKENS, :TOKENS])
        for name in names
        for head, weights in enumerate(found[name].weights)
    ]
    return Heatmaps(
        "Every head's attention",
        "Layer · head; a diagonal looks at the token itself, a line beside it at a neighbour, a column at one token.",
        "Diversity, Fig. 1",
        tuple(maps), 0.0, 1.0, row_label="token that asks", column_label="token attended to",
    )  # fmt: skip
