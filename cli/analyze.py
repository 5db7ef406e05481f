"""`collab-analyze`: measure the heads of a model, and write numbers and a page of pictures."""

from contextlib import ExitStack
from pathlib import Path

from collab_compress.checkpoint.files import atomic_file
from collab_compress.errors import DataError
from collab_compress.report import ReportResult, make_report, to_json, write_report

from .arguments import AnalyzeArguments as Arguments
from .data import load_data
from .model import check_outputs, load_source
from .pretrained import find_directory, title_of
from .progress import progress


def run(arguments: Arguments) -> ReportResult:
    """Load, measure, write, and print the most important numbers."""
    common, against = arguments.common, arguments.against
    output = arguments.output or Path(f"{title_of(arguments.model)}-heads")
    directory = find_directory(arguments.model, common.revision)
    other_directory = None if against is None else find_directory(against)
    check_outputs({"--output": output, "--json": common.json}, directory, other_directory, *arguments.data.files)
    source = load_source(arguments.model, directory, arguments.device, edited=True)
    name, baseline, baseline_name = source.name, None, "baseline"
    if against is not None and other_directory is not None:
        other = load_source(against, other_directory, arguments.device, edited=True)
        baseline, baseline_name = other.model, other.name
        if name == baseline_name:  # as the models of one experiment, each in a folder `model`
            name, baseline_name = arguments.model, against
    if arguments.sentence is not None and arguments.data.task is None and source.model.config.is_encoder_decoder:
        raise DataError("--sentence is one text, and an encoder–decoder reads two; it shows a pair of --data FILE")
    progress("reading the data")
    loaded = load_data(arguments.data, source.model, source.tokenizer, arguments.report.seed)
    result = make_report(
        source.model,
        loaded.batches,
        arguments.sections,
        name=name,
        data=loaded.words,
        baseline=baseline,
        baseline_name=baseline_name,
        tokenizer=source.tokenizer,
        sentence=loaded.sentence and (arguments.sentence or loaded.sentence),
        score=loaded.score,
        options=arguments.report,
        on_progress=lambda work, done, total: progress(f"measuring {work}", done, total),
    )
    progress(f"writing {output}")
    with ExitStack() as both:
        if common.json is not None:
            numbers = both.enter_context(atomic_file(common.json))
            numbers.write_text(to_json(result), encoding="utf-8")
        write_report(result, output)
    common.say(*result.highlights)
    common.say(*(f"Not shown: {section}: {reason}." for section, reason in result.omitted.items()))
    common.say(f"\nPage: {output / 'index.html'}")
    return result
