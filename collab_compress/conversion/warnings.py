"""What the report of a conversion warns of."""

from collections.abc import Callable, Iterable, Sequence

from transformers import PreTrainedModel

from collab_compress.attention import MapConfig, NarrowConfig, RotaryConfig
from collab_compress.attention.projections import width_in
from collab_compress.conversion.feed_forward import FeedForward
from collab_compress.conversion.maps import Replacement
from collab_compress.conversion.report import PartReport, RefitReport

MIN_VECTORS_PER_DIM = 4  # with fewer vectors for each dimension of the inputs, a covariance is mostly chance


def rounded_widths(configs: Sequence[MapConfig], dk: int | None, dv: int | None = None) -> list[str]:
    """Warn of a dk that rotary heads round, and of a dv that narrow values round."""
    rotary = [config for config in configs if isinstance(config, RotaryConfig) and config.rank != dk]
    narrow = [config for config in configs if isinstance(config, NarrowConfig) and config.dv != dv]
    return [
        f"dk {dk} was rounded up to {config.rank}: a rotary embedding rotates whole heads of {config.head_width} "
        "channels"
        for config in rotary[:1]
    ] + [
        f"dv {dv} was rounded to {config.dv}: its {config.key_value_heads} heads of values have {config.size} "
        "channels each"
        for config in narrow[:1]
    ]


def few_vectors(
    maps: Sequence[Replacement],
    blocks: Sequence[FeedForward],
    refits: Sequence[RefitReport],
    renamed: Callable[[str], str],
) -> list[str]:
    """Warn of modules whose moments are of few vectors; `renamed` returns the path in the converted model."""
    by_name = {report.name: report.vectors for report in refits}
    seen = [(block.down, by_name[block.down], block.width) for block in blocks]
    for item in maps:
        for vectors, (projection, _) in zip(item.report.vectors, item.site.inputs, strict=True):
            seen.append((item.site.name, vectors, width_in(projection)))
    few = [entry for entry in seen if 0 < entry[1] < MIN_VECTORS_PER_DIM * entry[2]]
    if not few:
        return []
    name, vectors, width = min(few, key=lambda entry: entry[1] / entry[2])
    others = len({name for name, *_ in few}) - 1
    more = f" and {others} more modules" if others else ""
    return [
        f"{renamed(name)}{more} saw few calibration vectors: {vectors} of width {width}, where {MIN_VECTORS_PER_DIM} "
        f"times the width would be {MIN_VECTORS_PER_DIM * width}; pass more data, or more sequences of it"
    ]


def breakdowns(reports: Sequence[PartReport]) -> list[str]:
    """Warn of solvers that met a singular system."""
    return [
        f"{report.name}: {report.breakdowns} sweeps of the solver met a singular system; "
        f"{'it went on with a shifted one' if report.sweeps else 'it kept its start'}; "
        "look at the module's error, or raise the damping"
        for report in reports
        if report.breakdowns
    ]


def random_choices(chosen: Sequence[str]) -> list[str]:
    """Warn of neurons or layers that were chosen on random tokens."""
    if not chosen:
        return []
    return [
        f"{' and '.join(chosen)} were chosen on random tokens alone, which loses more; calibrate on texts "
        "like yours, or on those that a language model has 'generated'"
    ]


def tied_weights(model: PreTrainedModel) -> set[frozenset[str]]:
    """Return the names of each parameter that several layers hold; a layer in several places counts once."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            names.setdefault(id(parameter), []).append(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def untied_weights(before: Iterable[frozenset[str]], after: set[frozenset[str]]) -> list[str]:
    """Warn of weights that were one and no longer are."""
    pairs = sorted(sorted(group)[:2] for group in {*before} - after if len(group) > 1)
    return [
        f"{len(pairs)} weights that several layers shared, such as {first} and {second}, are separate now, which "
        "takes more parameters"
        for first, second in pairs[:1]
    ]
