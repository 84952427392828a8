"""`python -m mlx_spec.chat`: the `mlx-spec chat` command."""

import sys

from mlx_spec.apps.cli import main

if __name__ == "__main__":
    sys.exit(main(["chat", *sys.argv[1:]]))
