"""`collab-expand`, `collab-merge` and `collab-prune`: a model from an edited or a dense one, without conversion."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from collab_compress import CollabCompressError, alphas_of, expand, head_importance, merge_alphas_, prune_heads_
from collab_compress.heads import confidence, least_important
from collab_compress.heads.importance import end_tokens

from .arguments import ExpandArguments, MergeArguments, PruneArguments
from .data import load_data
from .model import RECORD, Source, begin, finish
from .progress import progress

LASTING = (
    "Refitted layers, and feed-forward blocks with fewer neurons, stay as they are; removed layers do not come back."
)


def run_expand(arguments: ExpandArguments) -> None:
    """Load, expand, save and print."""
    source, output = begin(arguments, "-dense")
    progress("expanding attention")
    expand(source.model)
    lines = ["The dense model computes the same, up to rounding."]
    note = "Converted attention was expanded to dense projections of each head; it computes the same."
    lasting = [LASTING] if _is_smaller_elsewhere(source.directory / RECORD) else []
    finish(source, output, arguments.saving, {"model": arguments.model}, lines + lasting, notes=[note, *lasting])


def _is_smaller_elsewhere(record: Path) -> bool:
    """Return whether the record of a conversion, if there is one, has more than converted attention."""
    try:
        report = json.loads(record.read_text(encoding="utf-8")).get("report") or {}
    except (OSError, ValueError):
        return False
    return bool(report.get("refits") or report.get("removed_layers"))


def run_merge(arguments: MergeArguments) -> dict[str, int]:
    """Load, merge, save and print; return module → number of heads that mixed."""
    source, output = begin(arguments, "-merged")
    heads = {name: len(alphas) for name, alphas in alphas_of(source.model).items()}
    merge_alphas_(source.model)
    modules = f"{len(heads)} attention module{'s' if len(heads) > 1 else ''}"
    note = f"The mixing of heads in {modules} was folded into their output projections; outputs are the same."
    record = {"model": arguments.model, "merged_heads": heads}
    finish(source, output, arguments.saving, record, [note], notes=[note])
    return heads


def run_prune(arguments: PruneArguments) -> dict[str, list[int]]:
    """Load, rank, remove, save and print; return module → removed heads."""
    heads = _named_heads(arguments.heads)
    source, output = begin(arguments, "-pruned", inputs=arguments.inputs.files)
    importance: dict[str, torch.Tensor] = {}
    measure = None
    if arguments.share is not None:
        importance, measure = _importance(source, arguments)
        heads = least_important(importance, arguments.share, keep_one=True)
    if not heads:
        raise CollabCompressError(f"a share of {arguments.share} of the heads is less than one; pass a larger share")
    before = source.model.num_parameters()
    prune_heads_(source.model, heads)
    after, count = source.model.num_parameters(), sum(map(len, heads.values()))
    record = {
        "model": arguments.model,
        "pruned_heads": heads,
        "ranked_by": measure,
        "importance": {name: values.tolist() for name, values in importance.items()},
        "parameters_before": before,
        "parameters_after": after,
    }
    ranked = "" if measure is None else f", the least important by {measure}"
    note = f"{count} attention head{'s were' if count > 1 else ' was'} removed{ranked}."
    lines = ["Removed heads, by their numbers before:"]
    lines += [f"  {name}: {', '.join(map(str, removed))}" for name, removed in heads.items()]
    lines += ["", note, f"Parameters {before:,} → {after:,} ({after / before - 1:+.1%})."]
    finish(source, output, arguments.saving, record, lines, notes=[note])
    return heads


def _importance(source: Source, arguments: PruneArguments) -> tuple[dict[str, torch.Tensor], str]:
    """Return the importance of each head, and its measure in words."""
    progress("measuring how important heads are")
    loaded = load_data(arguments.inputs, source.model, source.tokenizer, arguments.seed)
    if loaded.score is None:
        ends = end_tokens(source.model, source.tokenizer)
        return confidence(source.model, loaded.batches, exclude=ends), f"confidence on {loaded.words}"
    measure = f"the gradient of the loss on {loaded.words}"
    return head_importance(source.model, loaded.score.batches), measure


def _named_heads(words: Sequence[str]) -> dict[str, list[int]]:
    """Parse `MODULE=0,3` words to module → heads."""
    heads: dict[str, list[int]] = {}
    for word in words:
        name, _, listed = word.partition("=")
        numbers = listed.split(",")
        if not name or not all(number.strip().isdecimal() for number in numbers):
            raise CollabCompressError(f"--heads {word}: expected MODULE=H,H, as encoder.layer.0.attention.self=0,3")
        heads.setdefault(name, []).extend(map(int, numbers))
    return {name: sorted(set(numbers)) for name, numbers in heads.items()}
