"""What runs in the main process has its result in all, and an error of one process is an error of all."""

PROGRAM = """
import os
from collab_compress.errors import RecipeError
from collab_compress_cli.distributed import end_processes, process_state
from collab_compress_glue_runs.experiments.processes import on_every_process, on_main_process

rank = process_state().process_index

def fail(where, kind):
    if rank == where:
        raise kind(f"{kind.__name__} of {where}")
    return rank

def attempt(name, work, *arguments):
    try:
        words = work(*arguments)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    os.write(1, f"{rank} {name}: {words}\\n".encode())  # at once, for two processes write

attempt("main result", on_main_process(fail), 1, ValueError)
attempt("every result", on_every_process(fail), 2, ValueError)
attempt("main", on_main_process(fail), 0, ValueError)
attempt("every", on_every_process(fail), 1, RecipeError)
attempt("again", on_main_process(fail), 1, ValueError)
end_processes()
"""


def test_results_and_errors_reach_all_processes(python):
    done = python.both(PROGRAM)
    assert sorted(done.stdout.splitlines()) == sorted(
        [
            "0 main result: 0",
            "1 main result: 0",
            "0 every result: 0",
            "1 every result: 1",
            "0 main: ValueError: ValueError of 0",
            "1 main: RecipeError: ValueError: ValueError of 0",
            "0 every: RecipeError: process 1: RecipeError of 1",
            "1 every: RecipeError: RecipeError of 1",
            "0 again: 0",
            "1 again: 0",
        ]
    ), done.stderr[-5000:]
    assert done.returncode == 0
