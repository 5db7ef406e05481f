"""`collab-prune`: remove attention heads for good, named ones or the least important."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from collab_compress import CollabCompressError, head_importance, prune_heads_
from collab_compress.heads import confidence, least_important

from .command import parse, silence_libraries, stopping_in_one_line
from .data import Data, Inputs, load_data
from .model import AUTO, Device, Made, Model, Saving, Source, begin, finish, output_of


@dataclass(frozen=True)
class Arguments:
    """Remove attention heads for good: named ones, or the least important share of all.

    What a share goes by must be measured, and the data say how. With --task, on labelled validation data: how much
    the loss changes as a head is weighed less (the gradient of the loss in the heads). With --data, on texts without
    labels: how much of its attention a head gives to a single token (confidence), which knows nothing of a task.
    Each attention module keeps a head at least. Fine-tune afterwards.

    Examples:
      collab-prune ./my-classifier --share 0.3 --task mrpc --data-dir glue/MRPC
      collab-prune minilm --share 0.2 --data sentences.txt --output minilm-pruned
      collab-prune minilm --heads encoder.layer.0.attention.self=0,3 encoder.layer.5.attention.self=7
    """

    model: Model
    """minilm (embedded), a model directory, stock or converted, or a name on the hub (bert-base, org/name)."""

    inputs: tyro.conf.OmitArgPrefixes[Inputs]

    share: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """How many of all heads to remove, above 0 and below 1; the least important ones."""

    heads: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODULE=H,H ...")] = ()
    """Which heads to remove, counted from 0; collab-analyze names modules and shows their heads."""

    seed: int = 0
    """Seed of the rows that are drawn, where there are more than --sentences."""

    device: Device = AUTO
    """Where to measure, as torch names it (cpu, cuda:0); auto: the accelerator, if there is one."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where to save; MODEL-pruned in the current directory if not given."""

    saving: tyro.conf.OmitArgPrefixes[Saving] = field(default_factory=Saving)

    def __post_init__(self) -> None:
        if (self.share is None) == (not self.heads):
            raise CollabCompressError("say which heads go: --share SHARE of all, or --heads MODULE=H,H")
        measured = self.inputs.data is not None or self.inputs.task is not None
        if self.share is not None and not 0 < self.share < 1:
            raise CollabCompressError(f"--share is {self.share}; expected a number above 0 and below 1")
        if self.share is not None and not measured:
            raise CollabCompressError(
                "--share ranks heads by data: give --task NAME (labels) or --data FILE (texts), or name --heads"
            )
        if self.heads and measured:
            raise CollabCompressError("--heads says which heads go, so nothing is measured; leave the data out")


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
