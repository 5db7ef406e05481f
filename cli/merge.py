"""`collab-merge`: fold trained head mixing into the output projections."""

from collections.abc import Sequence

from collab_compress import alphas_of, merge_alphas_

from .arguments import MergeArguments as Arguments
from .command import parse, silence_libraries, stopping_in_one_line
from .model import Made, begin, finish, output_of


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
