"""Print constraints for pip that pin the dependencies in pyproject.toml to their lower bounds."""

import re
from pathlib import Path

import tomllib

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
for dependency in project["dependencies"]:
    name, version = re.fullmatch(r"([\w-]+)>=([^,]+).*", dependency).groups()
    print(f"{name}=={version}")
