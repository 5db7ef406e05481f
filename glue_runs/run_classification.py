"""Text classification: from a pretrained model, or a fresh one trained on the task alone.

    python glue_runs/run_classification.py glue_runs/recipes/trec.yaml output=outputs/trec data_dir=DIR
    accelerate launch glue_runs/run_classification.py glue_runs/recipes/trec.yaml output=outputs/trec seed=1

The first argument may be a recipe; field=value or --field value sets or changes its fields, with dots between nested
ones and values as in YAML. What is finished in the output is not done again, and what was interrupted goes on.
`collab-run` is the same for all tasks; its --help shows every field.
"""

from collab_compress_cli.run import run_script, tasks_of

if __name__ == "__main__":
    run_script(__doc__, tasks_of("classification", "regression"))
