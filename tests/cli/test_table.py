"""Tables that commands print: drawn on a terminal, plain text for programs elsewhere."""

import os
import re
import sys

import pytest
from collab_compress_cli.command import table
from rich.console import Console

COLOURS = r"\x1b\[[0-9;]*m"
LONG = "bert.encoder.layer.11.attention.self." * 3
HEADER, ROWS = ["module", "dk", "parameters"], [[LONG, "8", "1,200 → 400"], ["[b]b[/b]", "128", "8 → 4"]]


@pytest.fixture
def colours(monkeypatch):
    """Return an environment that asks for colours, on a terminal of 60 columns."""
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color"), ("COLUMNS", "60")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(Console, "_environ", os.environ)  # `datasets` replaces os.environ when it maps with processes


def test_outside_a_terminal_tables_are_plain(colours):
    width = len(LONG)
    assert table(HEADER, ROWS) == [
        f"{'module':<{width}}   dk   parameters",
        f"{LONG}    8  1,200 → 400",
        f"{'[b]b[/b]':<{width}}  128        8 → 4",
    ]


def test_a_terminal_shows_every_cell(colours, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = table(HEADER, ROWS)
    assert "\x1b[1mmodule" in lines[0]
    plain = [re.sub(COLOURS, "", line) for line in lines]
    assert max(map(len, plain)) == 60
    assert "…" not in "".join(plain)
    assert "".join(line.split("  ")[0] for line in plain[2:5]) == LONG  # folded, not cut
