"""Translation, scored by sacreBLEU: a fresh model with a tokenizer trained on the data, or a pretrained one.

    python glue_runs/run_translation.py glue_runs/recipes/multi30k.yaml output=outputs/translator data_dir=DIR
    accelerate launch glue_runs/run_translation.py glue_runs/recipes/multi30k.yaml output=outputs/1 seed=1

Settings are field=value or --field value, as for `collab-run`, whose --help shows all fields. Finished stages of the
output are not repeated, and interrupted ones are continued.
Translations are written beside each result.
"""

from collab_compress_glue_runs.commands.run import run_script, tasks_of

if __name__ == "__main__":
    run_script(__doc__, tasks_of("translation"))
