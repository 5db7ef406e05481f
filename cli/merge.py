"""`collab-merge`: fold trained head mixing into the output projections."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from collab_compress import alphas_of, merge_alphas_

from .command import parse, silence_libraries, stopping_in_one_line
from .model import AUTO, Device, Made, Model, Saving, begin, finish, output_of


@dataclass(frozen=True)
class Arguments:
    """Fold the mixing of heads (alphas) into the output projections: the same outputs, no further cost.

    A model that is edited in no other way is a stock one afterwards, and loads without this package.

    Examples:
      collab-merge my-classifier-mixed
      collab-merge my-tuned-dk256-mixed --output my-tuned-dk256
    """

    model: Model
    """A model whose heads mix (collab-compress MODEL --mix): its directory, or its name on the hub."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where to save; MODEL-merged in the current directory if not given."""

    device: Device = AUTO
    """Where to compute, as torch names it (cpu, cuda:0); auto: the accelerator, if there is one."""

    saving: tyro.conf.OmitArgPrefixes[Saving] = field(default_factory=Saving)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; errors are one line on standard error and exit code 2."""
    with stopping_in_one_line("collab-merge"):
        run(parse(Arguments, "collab-merge", argv))


def run(arguments: Arguments) -> dict[str, int]:
    """Load, merge, save and print; returns attention modules → number of heads that mixed."""
    silence_libraries()
    output = output_of(arguments.output, arguments.model, "-merged")
    source = begin(arguments.model, output, arguments.saving, arguments.device, edited=True)
    heads = {name: len(alphas) for name, alphas in alphas_of(source.model).items()}
    merge_alphas_(source.model)
    modules = f"{len(heads)} attention module{'s' if len(heads) > 1 else ''}"
    record = {"model": arguments.model, "merged_heads": heads}
    note = f"The mixing of heads in {modules} was folded into their output projections; outputs are the same."
    finish(source, output, arguments.saving, Made(record, [note]), [note])
    return heads


if __name__ == "__main__":
    main()
