"""Fine-tune on a GLUE task, convert, evaluate, fine-tune again, evaluate: the papers' protocol.

    python glue_runs/run_glue.py glue_runs/recipes/mrpc.yaml output=outputs/mrpc data_dir=DIR
    accelerate launch glue_runs/run_glue.py glue_runs/recipes/mrpc.yaml output=outputs/mrpc compression.dk=64 seed=1

The first argument may be a recipe; field=value or --field value sets or changes its fields, with dots between nested
ones and values as in YAML. What is finished in the output is not done again, and what was interrupted goes on.
`collab-run` is the same for all tasks; its --help shows every field.
"""

from collab_compress_cli.run import run_script

from collab_compress.tasks.catalogue import GLUE

if __name__ == "__main__":
    run_script(__doc__, [task.name for task in GLUE])
