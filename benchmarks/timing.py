"""The harness of the benchmarks: calls are timed in turns, so that ratios hold while the machine's speed drifts."""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time
from typing import Any

import torch
from collab_compress_glue_runs.experiments.outputs import environment
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

Calls = Mapping[str, Callable[[], Any]]


def make_parser(description: str | None, commands: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return a parser with the script's docstring as its help; Transformers is quiet from now on."""
    set_verbosity_error()
    disable_progress_bar()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if commands:
        parser.add_argument("command", choices=list(commands))
    return parser


def add_timing_arguments(parser: argparse.ArgumentParser, seconds: float = 10) -> None:
    """Add the options that all timings share."""
    parser.add_argument("--seconds", type=float, default=seconds, help="for each cell, for all rows together")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; more than one are timed by wall time")
    parser.add_argument("--wall", action="store_true", help="wall time, for a quiet machine; default: processor time")
    parser.add_argument("--records", type=Path, help="append a JSON line for each row to this file")


def has_wall_time(args: argparse.Namespace) -> bool:
    """Return whether wall time is measured: the processor time of several threads grows while they wait."""
    return bool(args.wall or args.threads > 1)


def paired_times(calls: Calls, args: argparse.Namespace, min_rounds: int = 5) -> dict[str, list[float]]:
    """Return the seconds of each call in every round of all calls in random order, for about `args.seconds`."""
    clock = perf_counter if has_wall_time(args) else process_time
    order = list(calls)
    times: dict[str, list[float]] = {name: [] for name in order}
    for call in calls.values():  # warm up
        call()
    start = clock()
    while clock() - start < args.seconds or len(times[order[0]]) < min_rounds:
        random.shuffle(order)
        for name in order:
            before = clock()
            calls[name]()
            times[name].append(clock() - before)
    return times


def ratio(times: Mapping[str, list[float]], name: str, baseline: str = "dense") -> dict[str, float]:
    """Return the median and quartiles of a call's time over the baseline's, round by round."""
    ratios = [seconds / base for seconds, base in zip(times[name], times[baseline], strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    figures = {"ratio": middle, "low": low, "high": high, "rounds": len(ratios)}
    return figures | {"baseline_ms": 1e3 * median(times[baseline])}


def report(cell: Mapping[str, Any], calls: Calls, args: argparse.Namespace, baseline: str = "dense") -> None:
    """Time the calls of one cell; print and record the ratio of each to the baseline."""
    times = paired_times(calls, args)
    for name in calls:
        if name != baseline:
            print_row(cell, name, ratio(times, name, baseline), args)


def print_row(cell: Mapping[str, Any], name: str, figures: Mapping[str, float], args: argparse.Namespace) -> None:
    """Print one row, and append it to the records."""
    place = "  ".join(f"{key} {value}" for key, value in cell.items())
    more = "".join(f"  {key} {figures[key]:.4g}" for key in figures if key in ("size", "MiB", "score"))
    print(
        f"{place:28} {name:28} {figures['ratio']:.3f} [{figures['low']:.3f}, {figures['high']:.3f}]  "
        f"baseline {figures['baseline_ms']:.1f} ms{more}",
        flush=True,
    )
    if args.records:
        settings = {"threads": args.threads, "clock": "wall" if has_wall_time(args) else "processor"}
        append_record(args.records, {**cell, "row": name, **settings, **figures})


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append a JSON line to a file, with the revision of this package, and the number of CPU threads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        settings = {"threads": torch.get_num_threads(), "revision": environment()["revision"]}
        file.write(json.dumps({**settings, **record}) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file, or none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def cases(args: argparse.Namespace, rows: Iterable[str], **calibrated: Any) -> Iterator[dict[str, Any]]:
    """Yield each row with each calibration and seed; the dense one has neither."""
    for row, kind, seed in product(rows, args.calibrations, args.seeds):
        case = {"model": args.model.name, "row": row}
        yield case if row == "dense" else {**case, "calibration": kind, **calibrated, "seed": seed}


def measure_new(
    path: Path, cases: Iterable[dict[str, Any]], measure: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Measure the cases that no record holds; print each with its figures, and append it to the records."""
    done = read_records(path)
    for case in cases:
        if any(case.items() <= record.items() for record in done):
            continue
        done.append(case | measure(case))
        print(json.dumps(done[-1], ensure_ascii=False), flush=True)
        append_record(path, done[-1])


def fresh_process(script: str, *arguments: object, **environment: str) -> str:
    """Run a script by itself, and return the last line that it prints."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    return done.stdout.splitlines()[-1]


def resident_bytes(field: str) -> int:
    """Return this process's resident size ("VmRSS"), its peak ("VmHWM") or its anonymous part ("RssAnon") (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def reset_peak() -> int:
    """Reset the peak of the resident size, and return the size now, in bytes (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")
