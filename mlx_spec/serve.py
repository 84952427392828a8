"""`python -m mlx_spec.serve`: the `mlx-spec serve` command."""

import sys

from mlx_spec.apps.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
