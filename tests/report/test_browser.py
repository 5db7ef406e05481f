"""The page in a real browser, without a network: no errors, sorting, and something to see in light and dark."""

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy
import pytest
from PIL import Image

from collab_compress.report import Column, ReportResult, Section, Table, render_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SORTED = """<script>
const lines = [];
for (const place of [1, 1, 0]) {
  document.querySelectorAll("th button")[place].click();
  lines.push([...document.querySelectorAll("tbody tr")].map(row => row.textContent).join(" "));
}
document.documentElement.dataset.lines = lines.join("|");
</script>"""
WIDE = """<script>
const wide = [...document.querySelectorAll("body *")].filter(each =>
  each.getBoundingClientRect().right > innerWidth + 1 && !each.closest(".scroll, nav, .map"));
document.documentElement.dataset.wide = wide.map(each => each.tagName + "." + each.className).join(" ");
</script>"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


@pytest.fixture
def browse(tmp_path):
    def open_page(page, *options):
        """Open a page; return its final document and the console's messages."""
        file = tmp_path / "index.html"
        file.write_text(page, encoding="utf-8")
        done = subprocess.run(
            [
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--enable-logging=stderr",
                f"--user-data-dir={tmp_path / 'profile'}",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                *options,
                file.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={**os.environ, "HOME": str(tmp_path)},
        )
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return open_page


def marked(document, name):
    """Return an attribute of the root element."""
    values = []

    class Root(HTMLParser):
        def handle_starttag(self, tag, attributes):
            if tag == "html":
                values.append(dict(attributes)[f"data-{name}"])

    Root().feed(document)
    return values[0]


@pytest.mark.parametrize("width", [1280, 420])
def test_no_errors_and_nothing_sticks_out(result, browse, width):
    page = render_page(result).replace("</body>", WIDE + "</body>")
    document, console = browse(page, "--dump-dom", f"--window-size={width},900")
    assert console == []
    assert marked(document, "wide") == ""


def test_an_error_would_be_seen(browse):
    _, console = browse("<script>missing()</script>", "--dump-dom")
    assert "missing is not defined" in console[0]


def test_tables_sort_up_and_down_with_gaps_last(browse):
    rows = (("layer 10", 9.5), ("layer 2", None), ("layer 1", 10.0), ("layer 3", -1.0))
    section = Section("s", "S", "R.", "P", (Table("t", "T", (Column("name"), Column("size")), rows),))
    page = render_page(ReportResult("x", {}, (section,), {})).replace("</body>", SORTED + "</body>")
    document, _ = browse(page, "--dump-dom")
    up, down, names = marked(document, "lines").split("|")
    assert up == "layer 3−1.00 layer 109.50 layer 110.0 layer 2–"
    assert down == "layer 110.0 layer 109.50 layer 3−1.00 layer 2–"
    assert [int(number) for number in re.findall(r"layer (\d\d?)(?=[9–−]|10\.0)", names)] == [1, 2, 3, 10]


def test_light_and_dark(result, browse, tmp_path):
    grounds = {}
    for scheme, setting in (("light", 1), ("dark", 0)):
        shot = tmp_path / f"{scheme}.png"
        browse(
            render_page(result),
            f"--screenshot={shot}",
            "--window-size=1000,3000",
            f"--blink-settings=preferredColorScheme={setting}",
        )
        with Image.open(shot) as image:
            pixels = numpy.asarray(image.convert("RGB"), dtype=float)
        grounds[scheme] = pixels[5, 5].mean()
        assert pixels.std() > 10  # not blank
        colourful = pixels.max(2) - pixels.min(2) > 60
        assert colourful.mean() > 0.001  # heatmaps and curves
    assert grounds["light"] > 200
    assert grounds["dark"] < 60
