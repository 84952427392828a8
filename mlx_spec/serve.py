"""`python -m mlx_spec.serve`: the `mlx-spec serve` command."""

import sys

from mlx_spec.apps.server import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
