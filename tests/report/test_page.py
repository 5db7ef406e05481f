"""The page and the numbers: whole, self-contained, escaped, and written completely or not at all."""

import json
from dataclasses import asdict
from html import unescape
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from collab_compress.errors import CheckpointError
from collab_compress.report import ReportResult, render_page, to_json, write_report
from collab_compress.report.section import Curves, Heatmaps, Section, Table, draw_curves, draw_heatmap, short

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


def test_nothing_is_fetched_and_everything_is_there(result):
    page = render_page(result)
    outline, sections = Outline(page), result.sections.values()
    assert all(address.startswith(("#", "data:,")) for address in outline.fetched)
    assert not any(word in page for word in ("http:", "https:", "@import", "url("))
    assert outline.ids == ["overview", *result.sections, "omitted"]
    for section in sections:
        for picture in section.pictures:
            assert f"{picture.title}. {picture.reading}" in outline.texts["figcaption"]
        assert all(table.title in outline.texts["figcaption"] for table in section.tables.values())
        assert all(line in outline.texts["ul"] for line in section.highlights)
    assert "<tiny> & small" in outline.texts["h1"]
    pictures = [picture for section in sections for picture in section.pictures]
    drawn = sum(len(picture.maps) if isinstance(picture, Heatmaps) else 1 for picture in pictures)
    assert page.count('<svg role="img" aria-label="') == page.count("<svg") == drawn


def test_what_is_written_is_escaped():
    evil = "<script>alert('\"&')</script>"
    section = Section(
        evil,
        evil,
        {"t": Table(evil, [{evil: evil}])},
        [
            Heatmaps(evil, evil, {evil: [[1.0], [0.5]]}, row_label=evil, column_label=evil, row_names=[evil, evil]),
            Curves(evil, evil, [(evil, [(0, 1)]), (evil, [(0, 2)])], evil, evil),
        ],
        [evil],
    )
    page = render_page(ReportResult(evil, {evil: evil}, {"s": section}, {evil: evil}))
    assert "<script" not in page
    texts = Outline(page).texts
    for tag in ["title", "h1", "dt", "dd", "h2", "h4", "p", "summary", "th", "td", "figcaption", "li", "text", "b"]:
        assert evil in texts[tag], tag


def test_numbers_are_readable():
    values = [0.0, 1.0, 0.012345, -12.345, 123.456, 12345.6, 1e-7, 2.5e20, float("nan"), None, 1 - 1e-9, -9.996]
    texts = ["0", "1.00", "0.0123", "−12.3", "123", "12,346", "1.00e−7", "2.50e20", "–", "–", "1.00", "−10.0"]
    assert [short(value) for value in values] == texts
    assert [short(cell) for cell in (1234567, -3, "any")] == ["1,234,567", "−3", "any"]


def test_what_is_not_finite_is_not_there():
    nan = float("nan")
    tables = {"t": Table("T", [{"a": nan, "b [ms]": 1.0}, {"a": float("inf"), "b [ms]": "any"}])}
    pictures = [
        Heatmaps("H", "R.", {"": [[nan, 1.0]]}),
        Curves("C", "R.", [("c", [(0, 0.0), (1, nan), (2, 1.0)])], "x", "y"),
    ]
    result = ReportResult("x", {}, {"s": Section("S", "R.", tables, pictures)}, {})
    page = render_page(result)
    assert "nan" not in page.lower()
    assert '<td class="number">–</td>' in page
    stored = json.loads(to_json(result))["sections"]["s"]
    assert stored["tables"]["t"]["rows"] == [{"a": None, "b [ms]": 1.0}, {"a": None, "b [ms]": "any"}]
    assert stored["pictures"][0]["maps"] == {"": [[None, 1.0]]}


def cells(picture):
    svg = ElementTree.fromstring(draw_heatmap(picture, "m"))
    return {(path.get("class"), path.get("fill-opacity")): path.get("d") for path in svg.iter("path")}


def test_cells_lie_where_their_values_are_and_are_as_strong():
    matrix = [[0.0, 0.5, float("nan")], [1.0, -3.0, 0.25]]
    assert cells(Heatmaps("P", "R.", {"m": matrix})) == {
        ("plus", "0.25"): "M2 1h1v1h-1z",
        ("plus", "0.5"): "M1 0h1v1h-1z",
        ("plus", "1"): "M0 1h1v1h-1z",
    }
    diverging = cells(Heatmaps("P", "R.", {"m": matrix}, high=6.0, diverging=True))
    assert diverging["minus", "0.5"] == "M1 1h1v1h-1z"
    assert cells(Heatmaps("P", "R.", {"m": [[0.0]]}, high=0.0)) == {}


@pytest.mark.parametrize(("diverging", "low"), [(True, "-4"), (False, "0")])
def test_the_legend_of_a_scale_has_its_ends(diverging, low):
    section = Section("S", "R.", pictures=[Heatmaps("P", "R.", {"": [[-1.0, 4.0]]}, 4.0, diverging)])
    page = render_page(ReportResult("x", {}, {"s": section}, {}))
    assert f"<span>{low}</span><i></i><span>4</span>" in page
    assert ('class="scale diverging"' in page) == diverging


def curves(*lines):
    return ElementTree.fromstring(draw_curves(Curves("C", "R.", lines, "x", "y")))


def test_curves_run_from_corner_to_corner():
    svg = curves(("a & b", [(1, 0.0), (10, 10.0), (100, 100.0)]), ("c", [(1, 50.0)]))
    assert [title.text for title in svg.iter("title")] == ["a & b", "c"]
    path, dot = (element.get("d") for element in svg.iter("path"))
    assert path == f"M46.0 182.0h0 L46.0 182.0 L{46 + 274 * 9 / 99:.1f} {182 - 17.2:.1f} L320.0 10.0"
    assert dot == "M46.0 96.0h0 L46.0 96.0"
    assert {"0", "50", "100"} <= {element.text for element in svg.iter("text")}


def test_axes_of_tiny_and_of_flat_curves():
    ticks = [text.text for text in curves(("c", [(0, 0.0), (1, 4e-14)])).iter("text") if text.get("x") == "41"]
    assert ticks == ["0", "1e-14", "2e-14", "3e-14", "4e-14"]
    assert [*curves(("c", [(3, 0.0)])).iter("line")]


def test_all_is_written_or_nothing(result, tmp_path, monkeypatch):
    folder = tmp_path / "heads"
    write_report(result, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["index.html", "numbers.json"]
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert page == render_page(result)
    frame = result._repr_html_()
    assert unescape(frame.partition('srcdoc="')[2].rpartition('" style')[0]) == page
    stored = json.loads((folder / "numbers.json").read_text(encoding="utf-8"))
    assert stored["facts"]["data"] == "20 sentences: 20 sequences"
    for name, section in result.sections.items():
        for table, expected in asdict(section)["tables"].items():
            for row, numbers in zip(stored["sections"][name]["tables"][table]["rows"], expected["rows"], strict=True):
                assert row.keys() == numbers.keys()
                floats = {heading: cell for heading, cell in numbers.items() if isinstance(cell, float)}
                assert {heading: row[heading] for heading in floats} == pytest.approx(floats, rel=1e-5)
    with pytest.raises(CheckpointError, match="exists; choose another output"):
        write_report(result, folder)
    monkeypatch.setattr("collab_compress.report.result.to_json", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(result, tmp_path / "new" / "heads")
    assert [*tmp_path.rglob("new/*")] == []
