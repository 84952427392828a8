"""`python -m mlx_spec.menubar`: the `mlx-spec menubar` command."""

import sys

from mlx_spec.apps.cli import main

if __name__ == "__main__":
    sys.exit(main(["menubar", *sys.argv[1:]]))
