"""Print the lowest versions of pyproject.toml as constraints for pip; torch as TORCH says, or constraints.txt."""

import os
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lowest_versions() -> dict[str, str]:
    """Return the lower bound of each requirement of the package, and of its extras, that has one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = sum(project["optional-dependencies"].values(), project["dependencies"])
    matches = [re.match(r"([\w.-]+)>=([\w.]+)", line) for line in lines]
    return {match[1]: match[2] for match in matches if match is not None}


if __name__ == "__main__":
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    torch = os.environ.get("TORCH") or re.findall(r"^torch==(.+)$", pinned, re.M)[0]
    for name, version in (lowest_versions() | {"torch": torch}).items():
        print(f"{name}=={version}")
