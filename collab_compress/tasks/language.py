"""Language modelling: the Penn Treebank, and any text files."""

from collab_compress.tasks.task import Hub, Task
from collab_compress.tasks.text_layouts import Text

LANGUAGE = (
    Task(
        name="ptb", kind="language modelling", metric="perplexity",
        layouts=(
            Text(
                files={"train": ("ptb.train.txt",), "validation": ("ptb.valid.txt",), "test": ("ptb.test.txt",)},
                strip=True,
            ),
        ),
        hub=Hub("ptb-text-only/ptb_text_only", {"text": ("sentence",)}, config="penn_treebank", exported=True),
        folders=("ptb", "simple-examples/data"),
    ),
    Task(
        name="text", kind="language modelling", metric="perplexity",
        layouts=(
            Text(
                files={"train": ("train.txt",), "validation": ("valid.txt|val.txt|dev.txt",), "test": ("test.txt",)},
                optional=("validation", "test"),
            ),
        ),
        folders=("text",),
    ),
)  # fmt: skip
