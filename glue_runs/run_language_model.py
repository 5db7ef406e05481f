"""Language modelling, scored by perplexity: a fresh decoder, or a pretrained one.

    python glue_runs/run_language_model.py glue_runs/recipes/ptb.yaml output=outputs/ptb data_dir=DIR
    accelerate launch glue_runs/run_language_model.py glue_runs/recipes/ptb.yaml output=outputs/ptb fresh.layers=4

Settings are field=value or --field value, as for `collab-run`, whose --help shows all fields. Finished stages of the
output are not repeated, and interrupted ones are continued.
"""

from collab_compress_glue_runs.commands.run import run_script, tasks_of

if __name__ == "__main__":
    run_script(__doc__, tasks_of("language modelling"))
