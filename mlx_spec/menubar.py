"""`python -m mlx_spec.menubar`: the `mlx-spec menubar` command."""

import sys

from mlx_spec.apps.menubar import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
