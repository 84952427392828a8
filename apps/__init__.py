"""Programs on top of the package: the `mlx-spec` command and what it starts."""
