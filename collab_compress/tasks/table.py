"""The tasks there are. A new one is data: an entry in one of these lists."""

from collab_compress.tasks.classification import CLASSIFICATION
from collab_compress.tasks.glue import GLUE
from collab_compress.tasks.language import LANGUAGE
from collab_compress.tasks.task import Task
from collab_compress.tasks.translation import TRANSLATION

TASKS: dict[str, Task] = {task.name: task for task in (*GLUE, *CLASSIFICATION, *TRANSLATION, *LANGUAGE)}
"""Name → task."""
