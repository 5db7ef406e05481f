"""Fine-tune on a GLUE task, convert, evaluate, fine-tune again, evaluate: the papers' protocol.

    python glue_runs/run_glue.py glue_runs/recipes/mrpc.yaml output=outputs/mrpc data_dir=DIR
    accelerate launch glue_runs/run_glue.py glue_runs/recipes/mrpc.yaml output=outputs/mrpc compression.rank=64 seed=1

The first argument may be a recipe; field=value arguments set or change its fields, with dots between nested ones and
values as in YAML. What is finished in the output is not done again, and what was interrupted goes on.
"""

import sys
from pathlib import Path

from collab_compress_cli.source import find_directory

from collab_compress import CollabCompressError
from collab_compress.experiments import read_recipe, run


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit(__doc__)
    path = None if "=" in arguments[0] else Path(arguments.pop(0))
    try:
        records = run(read_recipe(path, arguments), find_directory)
    except CollabCompressError as error:
        sys.exit(f"run_glue: {error}")
    for record in records:
        print(f"{record['task']:8} {record['stage']:14} {record['score']:.2f}  {record['metrics']}")


if __name__ == "__main__":
    main()
