"""`python -m mlx_spec`: the `mlx-spec` command."""

import sys

from mlx_spec.apps.cli import main

if __name__ == "__main__":
    sys.exit(main())
