"""Text classification: from a pretrained model, or a fresh one trained on the task alone.

    python glue_runs/run_classification.py glue_runs/recipes/trec.yaml output=outputs/trec data_dir=DIR
    accelerate launch glue_runs/run_classification.py glue_runs/recipes/trec.yaml output=outputs/trec seed=1

Settings are field=value or --field value, as for `collab-run`, whose --help shows all fields. Finished stages of the
output are not repeated, and interrupted ones are continued.
"""

from collab_compress_glue_runs.commands.run import run_script, tasks_of

if __name__ == "__main__":
    run_script(__doc__, tasks_of("classification", "regression"))
