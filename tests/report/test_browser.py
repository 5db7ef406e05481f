"""The page in a real browser, without a network: no errors, and something to see."""

import os
import re
import shutil
import subprocess

import numpy
import pytest
from PIL import Image

from collab_compress.report import render_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
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


@pytest.mark.parametrize("width", [1280, 420])
def test_no_errors_and_nothing_sticks_out(result, browse, width):
    page = render_page(result).replace("</body>", WIDE + "</body>")
    document, console = browse(page, "--dump-dom", f"--window-size={width},900")
    assert console == []
    assert re.findall(r'<html[^>]* data-wide="(.*?)"', document) == [""]


def test_an_error_would_be_seen(browse):
    _, console = browse("<script>missing()</script>", "--dump-dom")
    assert "missing is not defined" in console[0]


def test_there_is_something_to_see(result, browse, tmp_path):
    shot = tmp_path / "page.png"
    browse(render_page(result), f"--screenshot={shot}", "--window-size=1000,3000")
    with Image.open(shot) as image:
        pixels = numpy.asarray(image.convert("RGB"), dtype=float)
    assert pixels[5, 5].mean() > 200
    assert pixels.std() > 10  # not blank
    assert (pixels.max(2) - pixels.min(2) > 60).mean() > 0.001  # heatmaps and curves
