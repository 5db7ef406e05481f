"""An error of one process reaches the others at once, and they go on together."""

PROGRAM = """
import os, sys, time
import torch
from collab_compress.errors import RecipeError
from collab_compress_cli.distributed import can_continue_together, on_every_process, failing_together, on_main_process
from collab_compress_cli.distributed import end_processes, process_state

state, rank = process_state(), process_state().process_index

def fail(where, kind):
    if rank == where:
        time.sleep(0.5)
        raise kind(f"{kind.__name__} of {where}")

def say(name, words):
    os.write(1, f"{rank} {name}: {words}\\n".encode())  # at once, for two processes write

def reduce():
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    return int(ones)

def attempt(name, work):
    try:
        with failing_together():
            work()
        say(name, "done")
    except Exception as error:
        say(name, f"{type(error).__name__}: {error}")
    assert can_continue_together()
    assert reduce() == 2  # both go on

attempt("told", lambda: [on_main_process(lambda: rank), on_every_process(lambda: rank)])
attempt("main", lambda: on_main_process(lambda: fail(0, ValueError)))
attempt("each", lambda: on_every_process(lambda: fail(1, RecipeError)))
attempt("waiting", lambda: [fail(1, ZeroDivisionError), reduce()])
attempt("once", lambda: [fail(1, KeyError), on_main_process(time.time)])
attempt("both", lambda: [fail(rank, RecipeError)])
with failing_together():
    fail(1, KeyboardInterrupt)
    reduce()
end_processes()
"""


def test_an_error_of_one_is_an_error_of_all_and_an_interrupt_stops_all(python):
    done = python.both(PROGRAM)
    lines = done.stdout.splitlines()
    assert sorted(line for line in lines if " both: " not in line) == sorted(
        [
            "0 told: done",
            "1 told: done",
            "0 main: ValueError: ValueError of 0",
            "1 main: RecipeError: ValueError: ValueError of 0",
            "0 each: RecipeError: process 1: RecipeError of 1",
            "1 each: RecipeError: RecipeError of 1",
            "0 waiting: RecipeError: process 1: ZeroDivisionError: ZeroDivisionError of 1",
            "1 waiting: ZeroDivisionError: ZeroDivisionError of 1",
            "0 once: RecipeError: process 1: KeyError: 'KeyError of 1'",
            "1 once: KeyError: 'KeyError of 1'",
        ]
    )
    assert sum(" both: RecipeError: " in line for line in lines) == 2  # whichever was first
    assert done.returncode != 0
    assert "process 1: KeyboardInterrupt: KeyboardInterrupt of 1" in done.stderr
