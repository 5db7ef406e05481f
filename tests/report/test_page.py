"""The page: whole, self-contained, and with a reading and a source for every picture."""

from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from collab_compress.errors import HeadError
from collab_compress.report import (
    Curve,
    Curves,
    Heatmap,
    Heatmaps,
    Panel,
    ReportResult,
    Section,
    Table,
    render_page,
    to_dict,
)
from collab_compress.report.drawing import colours_of, draw_heatmap, draw_panel, shade
from collab_compress.report.section import short, written

VOID = ("meta", "link")


class Outline(HTMLParser):
    """Collect text by tag and attributes that could fetch, and check that tags are balanced."""

    def __init__(self, page):
        super().__init__()
        self.open, self.fetched, self.texts, self.ids = [], [], {}, []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        named = dict(attributes)
        self.fetched += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]
        self.ids += [named["id"]] if "id" in named else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_data(self, data):
        for tag in self.open:
            self.texts[tag] = self.texts.get(tag, "") + data


@pytest.fixture(scope="module")
def page(result):
    return render_page(result)


def test_a_table_is_read_by_the_names_of_its_columns(result):
    rows = result.table("cost", "modules")
    assert [row["dk"] for row in rows] == [6, 6]
    with pytest.raises(HeadError, match="there is no table cost nothing; expected one of widths dk"):
        result.table("cost", "nothing")


def test_nothing_is_fetched_and_everything_is_there(page, result):
    outline = Outline(page)
    assert all(address.startswith(("#", "data:,")) for address in outline.fetched)
    assert not any(word in page for word in ("http:", "https:", "@import", "url("))
    assert outline.ids == ["overview", *(part.name for part in result.sections), "omitted"]
    for section in result.sections:
        for part in (*section.pictures, *section.tables):
            assert part.title in outline.texts["figcaption"]
        for picture in section.pictures:
            assert picture.reading in outline.texts["figcaption"]
            assert picture.source in outline.texts["figcaption"]
        for line in section.highlights:
            assert line in outline.texts["ul"]
    assert "<tiny> & small" in outline.texts["h1"]
    assert page.count("<svg") == sum(
        len(picture.maps if isinstance(picture, Heatmaps) else picture.panels)
        for section in result.sections
        for picture in section.pictures
    )


def test_numbers_are_readable():
    values = [0.0, 1.0, 0.012345, -12.345, 123.456, 12345.6, 1e-7, 2.5e20, float("nan"), None, 1 - 1e-9, -9.996]
    texts = ["0", "1.00", "0.0123", "−12.3", "123", "12,346", "1.00e−7", "2.50e20", "–", "–", "1.00", "−10.0"]
    assert [short(value) for value in values] == texts
    assert [written(cell) for cell in (1234567, -3, "any", None)] == ["1,234,567", "−3", "any", "–"]


def test_what_is_not_finite_is_not_there():
    nan, infinite = float("nan"), float("inf")
    table = Table("t", "T", [{"a": nan, "b [ms]": 1.0}, {"a": infinite, "b [ms]": "any"}])
    curve = Curve("c", (0, 1, 2), (0.0, nan, 1.0))
    section = Section("s", "S", "R.", "P", (table,), (Curves("C", "R.", "P", (Panel("", (curve,)),), "x", "y"),))
    page = render_page(ReportResult("x", {}, (section,), {}))
    assert "nan" not in page.lower()
    assert '<td class="number">–</td>' in page
    stored = to_dict(ReportResult("x", {}, (section,), {}))["sections"]["s"]["tables"]["t"]
    assert stored["columns"] == [{"name": "a", "unit": ""}, {"name": "b", "unit": "ms"}]
    assert stored["rows"] == [[None, 1.0], [None, "any"]]
    with pytest.raises(ValueError, match="as many of both"):
        Curve("c", (0, 1), (0.0,))


def drawn(svg):
    return ElementTree.fromstring(svg)


def panel_of(panel, **axes):
    picture = Curves("C", "R.", "P", (panel,), "x", "y", **axes)
    return draw_panel(panel, picture, colours_of(picture))


def test_cells_lie_where_their_values_are_and_are_as_strong():
    heat = Heatmap("m", ((0.0, 0.5, None), (1.0, -3.0, 0.25)), ("a", "b"), ("x", "y", "z"))
    svg = drawn(draw_heatmap(heat, Heatmaps("P", "R.", "S", (heat,)), 10))
    cells = {path.get("fill-opacity"): path.get("d") for path in svg.iter("path")}
    assert cells == {
        "0": "M0 0h1v1h-1zM1 1h1v1h-1z",
        "0.25": "M2 1h1v1h-1z",
        "0.5": "M1 0h1v1h-1z",
        "1": "M0 1h1v1h-1z",
    }


@pytest.mark.parametrize(
    ("value", "high", "diverging", "expected"),
    [
        (0.5, 1, False, ("plus", 12)),
        (-1, 1, False, ("plus", 0)),
        (-1, 2, True, ("minus", 12)),
        (1, 2, True, ("plus", 12)),
        (0, 0, True, ("plus", 0)),
        (None, 1, False, None),
    ],
)
def test_shades(value, high, diverging, expected):
    assert shade(value, Heatmaps("P", "R.", "S", [], high, diverging)) == expected


def test_a_scale_ends_at_its_strongest_cells():
    """On a diverging one both ends are as far from 0: a cell at either end is as strong as the legend shows."""
    heat = Heatmap("m", ((-1.0, 4.0),))
    for diverging, low in ((True, "-4"), (False, "0")):
        section = Section("s", "S", "R.", "P", pictures=(Heatmaps("P", "R.", "S", (heat,), 4.0, diverging),))
        page = render_page(ReportResult("x", {}, (section,), {}))
        assert f"<span>{low}</span><i></i><span>4</span>" in page
        assert ('class="scale diverging"' in page) == diverging


def test_curves_say_what_they_are():
    panel = Panel("p", (Curve("a & b", (1, 10), (0.5, 1234.5)), Curve("c", (1, 10), (1.0, 2.0), dashed=True)))
    svg = drawn(panel_of(panel))
    assert [[title.text for title in group.iter("title")] for group in svg.iter("g")] == [["a & b"], ["c"]]
    assert [group.get("class") for group in svg.iter("g")] == ["line", "dashed"]


@pytest.mark.parametrize("log", [False, True])
def test_curves_run_from_corner_to_corner(log):
    curve = Curve("c", (1, 10, 100), (1.0, 10.0, 100.0))
    panel = Panel("p", (curve, Curve("gap", (1, 10, 100), (1.0, None, 100.0))))
    svg = drawn(panel_of(panel, bottom=0.0 if not log else None, log=log))
    paths = [element.get("d") for element in svg.iter("path")]
    points = [[float(x) for x in point.split()] for point in paths[0][1:].split("L")]
    (left, bottom), middle, (right, top) = points
    assert (left, right) == (46.0, 320.0)
    assert bottom == pytest.approx(182 - (0 if log else 172 / 100), abs=0.1)
    assert top == 10.0
    share = 0.5 if log else 9 / 99
    assert (middle[0] - left) / (right - left) == pytest.approx(share, abs=1e-3)
    assert paths[1].count("M") == 2  # interrupted
    ticks = {"1", "10", "100"} if log else {"0", "50", "100"}
    assert {element.text for element in svg.iter("text")} >= ticks


def test_ticks_of_tiny_numbers_are_told_apart():
    panel = Panel("", (Curve("c", (0, 1), (0.0, 4e-14)),))
    svg = drawn(panel_of(panel))
    ticks = [element.text for element in svg.iter("text") if element.get("text-anchor") == "end"]
    assert ticks == ["0", "1e-14", "2e-14", "3e-14", "4e-14"]


def test_a_flat_curve_has_axes_too():
    panel = Panel("", (Curve("c", (3,), (0.0,)),))
    svg = drawn(panel_of(panel))
    (path,) = svg.iter("path")
    assert path.get("d").count("L") == 1
    assert [*svg.iter("line")]
