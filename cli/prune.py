"""`collab-prune`: remove attention heads for good, named ones or the least important."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from collab_compress import CollabCompressError, head_importance, prune_heads_
from collab_compress.heads import confidence, least_important

from .arguments import Data
from .arguments import PruneArguments as Arguments
from .command import parse, silence_libraries, stopping_in_one_line
from .data import load_data
from .model import Made, Source, begin, finish, output_of


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; errors are one line on standard error and exit code 2."""
    with stopping_in_one_line("collab-prune"):
        run(parse(Arguments, "collab-prune", argv))


def run(arguments: Arguments) -> dict[str, list[int]]:
    """Load, rank, remove, save and print; returns attention modules → heads that went."""
    silence_libraries()
    output = output_of(arguments.output, arguments.model, "-pruned")
    named = _named(arguments.heads)
    source = begin(arguments.model, output, arguments.saving, arguments.device, True, arguments.inputs.files)
    importance, measured = ({}, None) if arguments.share is None else _importance(source, arguments)
    chosen = named if arguments.share is None else least_important(importance, arguments.share, keep_one=True)
    if not chosen:
        raise CollabCompressError(f"a share of {arguments.share} of the heads is not one head; give a greater one")
    before = source.model.num_parameters()
    prune_heads_(source.model, chosen)
    after, count = source.model.num_parameters(), sum(map(len, chosen.values()))
    record = {
        "model": arguments.model, "pruned_heads": chosen, "ranked_by": measured,
        "importance": {name: values.tolist() for name, values in importance.items()},
        "parameters_before": before, "parameters_after": after,
    }  # fmt: skip
    ranked = "" if measured is None else f", the least important by {measured}"
    note = f"{count} attention head{'s were' if count > 1 else ' was'} removed{ranked}."
    lines = [f"  {name}: {', '.join(map(str, heads))}" for name, heads in chosen.items()]
    lines = ["Heads removed, counted as before:", *lines, "", note]
    lines.append(f"Parameters {before:,} → {after:,} ({after / before - 1:+.1%}).")
    finish(source, output, arguments.saving, Made(record, [note]), lines)
    return chosen


def _importance(source: Source, arguments: Arguments) -> tuple[dict[str, torch.Tensor], str]:
    """Measure heads, and say by what."""
    loaded = load_data(Data(**asdict(arguments.inputs)), source.model, source.tokenizer, arguments.seed)
    if loaded.score is not None:
        words = f"the gradient of the loss on {loaded.words}"
        return head_importance(source.model, loaded.score.batches), words
    return confidence(source.model, loaded.batches), f"confidence on {loaded.words}"


def _named(words: Sequence[str]) -> dict[str, list[int]]:
    """Read `MODULE=0,3`.

    Raises:
        CollabCompressError: it is none.
    """
    heads: dict[str, list[int]] = {}
    for word in words:
        name, _, numbers = word.partition("=")
        listed: list[Any] = numbers.split(",")
        if not name or not all(number.strip().isdecimal() for number in listed):
            raise CollabCompressError(f"--heads {word}: expected MODULE=H,H, as encoder.layer.0.attention.self=0,3")
        heads.setdefault(name, []).extend(int(number) for number in listed)
    return {name: sorted(set(chosen)) for name, chosen in heads.items()}


if __name__ == "__main__":
    main()
