"""Print the oldest versions that pyproject.toml allows of what users install, as constraints of pip."""

import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS = ("record", "plot", "fast", "opdb", "cluster")

for requirement in [
    *PROJECT["dependencies"],
    *(each for name in EXTRAS for each in PROJECT["optional-dependencies"][name]),
]:
    print(requirement.replace(">=", "=="))
