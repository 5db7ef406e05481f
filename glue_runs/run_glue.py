"""Fine-tune on a GLUE task, convert, evaluate, fine-tune again, evaluate: the papers' protocol.

    python glue_runs/run_glue.py glue_runs/recipes/mrpc.yaml output=outputs/mrpc data_dir=DIR
    accelerate launch glue_runs/run_glue.py glue_runs/recipes/mrpc.yaml output=outputs/mrpc compression.dk=64 seed=1

Settings are field=value or --field value, as for `collab-run`, whose --help shows all fields. Finished stages of the
output are not repeated, and interrupted ones are continued.
"""

from collab_compress_glue_runs.commands.run import run_script
from collab_compress_glue_runs.tasks.catalogue import GLUE

if __name__ == "__main__":
    run_script(__doc__, [task.name for task in GLUE])
