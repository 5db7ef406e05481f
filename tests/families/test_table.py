"""The table of families in the documentation is what the descriptions and the tests say.

`python tests/families/test_table.py` writes it.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))
from tiny_families import BLOCKS_ALONE, KEEPING, ROTARY, TINIES, build, make_rotary

from collab_compress.architectures import FAMILIES, find_attention

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- families: written by tests/families/test_table.py -->\n", "<!-- end of families -->\n"


def rows(models):
    """Return one line for all families with the same kinds of attention and the same limits."""
    kinds, eager = {}, {}
    for model in models:
        for site in find_attention(model):
            kinds.setdefault(site.family.name, set()).add(site.kind)
            eager.setdefault(site.family.name, not model._supports_sdpa)
    groups = {}
    for family in sorted(
        {family.name: family for family in FAMILIES.values()}.values(), key=lambda f: f.name.lower()
    ):
        order = [kind for kind in ("encoder", "decoder", "cross") if kind in kinds.get(family.name, ())]
        key = ", ".join(order), "; ".join(limits(family, eager.get(family.name, False)))
        types = ", ".join(f"`{model_type}`" for model_type in family.model_types)
        since = f" ({family.since})" if family.since else ""
        groups.setdefault(key, []).append(types + since)
    for (attention, limit), families in sorted(groups.items()):
        yield f"| {attention} | {limit or 'none'} | {'; '.join(families)} |"


def limits(family, eager):
    """Return what cannot be done with a family."""
    if family.limits.feed_forward_only:
        yield "dff alone"
        return
    if family.limits.no_dk:
        yield "dv and dff alone"
        return
    if family.layout.fixed_head_count:
        yield "dk up to *H·d − H*" if family.paths.query != "q" else "no smaller key cache"
    if family.rotary:
        yield "rotary"
    if family.limits.no_pruning and not family.rotary:  # the page says it of rotary ones
        yield "heads stay"
    elif family.paths.fused and not family.rotary:
        yield "converted heads stay"
    for kind in family.limits.undescribed:
        yield f"no {kind} attention"
    if eager:
        yield "eager only"


def table():
    """Return the table, from the tiny models of the tests."""
    head = ["| attention | limits | families |", "|---|---|---|"]
    models = [*map(build, TINIES | BLOCKS_ALONE), *map(make_rotary, [*ROTARY, *KEEPING])]
    return BEGIN + "\n".join([*head, *rows(models)]) + "\n" + END


def written(text, made):
    """Return the page with the table."""
    start, stop = text.index(BEGIN), text.index(END) + len(END)
    return text[:start] + made + text[stop:]


def test_the_table_is_what_was_tried():
    text = PAGE.read_text(encoding="utf-8")
    assert written(text, table()) == text, "python tests/families/test_table.py writes it"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
