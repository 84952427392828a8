"""Build steps that pyproject.toml cannot say: the links of the long description, and a check of the tree."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def long_description() -> str:
    """Return README.md with absolute links: package indexes show it alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    repository, version = project["urls"]["Repository"], project["version"]

    def absolute(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        kind = "raw" if picture else "blob"
        return f"{picture}[{words}]({repository}/{kind}/v{version}/{target})"

    relative = r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)]+)\)"
    return re.sub(relative, absolute, (ROOT / "README.md").read_text("utf-8"))


for name in ("apps", "convert"):
    if not (ROOT / "mlx_spec" / name / "__init__.py").is_file():
        raise SystemExit(
            f"mlx_spec/{name} must be a link to {name}/, and this checkout has no symbolic links: "
            "run `git config core.symlinks true`, then `git checkout -- mlx_spec`"
        )
setup(long_description=long_description(), long_description_content_type="text/markdown")
