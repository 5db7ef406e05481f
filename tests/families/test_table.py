"""The table of families in the documentation is what the descriptions and the tests say.

`python tests/families/test_table.py` writes it anew.
"""

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).parents[1] / "support"))
from rotary_models import ROTARY, make_rotary

from collab_compress.architectures import FAMILIES, find_attention

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
VERDICTS = Path(__file__).with_name("verdicts.yaml")
BEGIN, END = "<!-- families: written by tests/families/test_table.py -->\n", "<!-- end of families -->\n"


def rows(tinies, build):
    """One line for each family: its name, model types, kinds of attention, tests, and what resists."""
    tried = {}
    for name, tiny in tinies.items():
        model = build(name)
        for site in find_attention(model, FAMILIES):
            kinds, how, eager = tried.setdefault(site.family.name, (set(), [], not model._supports_sdpa))
            kinds.add(site.kind)
            how.append((tiny.copy_of, bool(tiny.generates)))
    for name in ROTARY:
        model = make_rotary(name)
        for site in find_attention(model, FAMILIES):
            kinds, how, _ = tried.setdefault(site.family.name, (set(), [], not model._supports_sdpa))
            kinds.add(site.kind)
            how.append(("rotary", model.can_generate()))
    families = {family.name: family for family in FAMILIES.values()}
    for name in sorted(families, key=str.lower):
        family = families[name]
        kinds, how, eager = tried.get(name, (set(), [], False))
        copies = {copy for copy, _ in how}
        others = sorted(copies - {"rotary"})
        ran = "all" if "" in copies else f"contracts, as {tinies[others[0]].name}" if others else "rotary contracts"
        generates = ", generation" if any(generates for _, generates in how) else ""
        order = [kind for kind in ("encoder", "decoder", "cross") if kind in kinds]
        types = ", ".join(f"`{model_type}`" for model_type in family.model_types)
        yield f"| {name} | {types} | {', '.join(order)} | {ran}{generates} | {'; '.join(resists(family, eager))} |"


def resists(family, eager):
    """Say what cannot be done with a family."""
    if family.fixed_heads:
        yield "dk up to *H·d − H*" if family.query != "q" else "no smaller key cache"
    if family.rotary:
        yield "shared rotary heads only"
    if family.keeps_heads:
        yield "heads are not removed"
    for kind in family.undescribed:
        yield f"no {kind} attention"
    if eager:
        yield "eager attention only"


def table(tinies, build):
    """The whole table."""
    head = ["| family | model type | attention | tests | what resists |", "|---|---|---|---|---|"]
    return BEGIN + "\n".join([*head, *rows(tinies, build)]) + "\n" + END


def written(text, made):
    """The page with the table, and with the counts of verdicts as recorded."""
    start, stop = text.index(BEGIN), text.index(END) + len(END)
    text = text[:start] + made + text[stop:]
    counts = Counter(yaml.safe_load(VERDICTS.read_text(encoding="utf-8"))["families"].values())
    for verdict, count in counts.items():
        text = re.sub(rf"^\| {re.escape(verdict)} \| \d+ \|", f"| {verdict} | {count} |", text, flags=re.MULTILINE)
    return text


def test_the_table_is_what_was_tried(tinies, build):
    text = PAGE.read_text(encoding="utf-8")
    assert written(text, table(tinies, build)) == text, "python tests/families/test_table.py writes it anew"


if __name__ == "__main__":
    place = Path(__file__).with_name("conftest.py")
    spec = importlib.util.spec_from_file_location("families_conftest", place)
    assert spec is not None
    assert spec.loader is not None
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(written(page, table(found.FAMILIES, found.make_tiny)), encoding="utf-8")
