"""How the documentation is built: `make docs`. Nothing is fetched, neither to build nor to read it."""

import logging
import os
import sys
from importlib.metadata import version as installed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
logging.getLogger("transformers").setLevel(logging.ERROR)

project = "collab-compress"
author = "the collab-compress authors"
project_copyright = author
version = release = installed("collab-compress")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "command_help",
    "native_math",
    "public_api",
]
nitpicky = True  # with -W, a reference to what is not there stops the build
ELSEWHERE = "torch|transformers|datasets|evaluate|tokenizers|numpy|tyro|pathlib|collections|types|typing"
nitpick_ignore_regex = [("py:.*", rf"({ELSEWHERE})\b.*")]  # this site links to no other

autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True, "imported-members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True

myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks are executed by `make test-extras`; here they show what they printed
suppress_warnings = ["myst.xref_ambiguous"]

highlight_language = "text"  # of blocks that name none: commands and what they print
html_theme = "furo"
html_title = "collab-compress"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"footer_icons": []}
html_math_renderer = "native"
