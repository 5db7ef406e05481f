"""Run every task with every conversion, method and seed that a file describes, skipping what is finished.

    python glue_runs/sweep.py glue_runs/sweeps/glue.yaml output=outputs/glue base.data_dir=DIR
    python glue_runs/sweep.py glue_runs/sweeps/glue.yaml output=outputs/glue base.data_dir=DIR only.tasks=[mrpc]

It can be stopped at any point and started again; `collab-results OUTPUT` shows what there is so far.
"""

from collab_compress_glue_runs.commands.run import run_sweep_script

if __name__ == "__main__":
    run_sweep_script(__doc__)
