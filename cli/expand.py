"""`collab-expand`: turn a converted model back into a dense, stock one."""

from collections.abc import Sequence

from collab_compress import Expansion, expand

from .arguments import ExpandArguments as Arguments
from .command import parse, silence_libraries, stopping_in_one_line, table
from .model import Made, begin, finish, output_of, read_record

LASTING = "Refitted layers, and feed-forward blocks with fewer neurons, stay as they are."


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; errors are one line on standard error and exit code 2."""
    with stopping_in_one_line("collab-expand"):
        run(parse(Arguments, "collab-expand", argv))


def run(arguments: Arguments) -> Expansion:
    """Load, expand, save and print."""
    silence_libraries()
    output = output_of(arguments.output, arguments.model, "-dense")
    source = begin(arguments.model, output, arguments.saving, arguments.device, edited=True)
    expansion = expand(source.model)
    record = {"model": arguments.model, "expansion": {"exact": expansion.exact, "errors": expansion.errors}}
    rows = [[name, f"{error:.2e}"] for name, error in expansion.errors.items()]
    lines = [*table(["module", "relative error"], rows), ""] if rows else []
    exact = "The dense model computes the same, up to rounding."
    nearest = "The dense model is the nearest one of this width, not the same."
    lines.append(exact if expansion.exact else nearest)
    made = read_record(source.directory).get("report") or {}
    if made.get("refits") or made.get("feed_forward"):
        lines.append(LASTING)
    note = "What was converted was expanded to dense projections of each head's own"
    note += "; it computes the same." if expansion.exact else ", the nearest of their width."
    finish(source, output, arguments.saving, Made(record, [note]), lines)
    return expansion


if __name__ == "__main__":
    main()
