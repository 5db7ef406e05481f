"""Translation, scored by sacreBLEU: a fresh model with a tokenizer trained on the data, or a pretrained one.

    python glue_runs/run_translation.py glue_runs/recipes/multi30k.yaml output=outputs/translator data_dir=DIR
    accelerate launch glue_runs/run_translation.py glue_runs/recipes/multi30k.yaml output=outputs/1 seed=1

The first argument may be a recipe; field=value or --field value sets or changes its fields, with dots between nested
ones and values as in YAML. What is finished in the output is not done again, and what was interrupted goes on.
`collab-run` is the same for all tasks; its --help shows every field.
Translations are kept beside each result.
"""

from collab_compress_cli.run import run_script, tasks_of

if __name__ == "__main__":
    run_script(__doc__, tasks_of("translation"))
