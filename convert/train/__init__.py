"""Train a drafter for a target on its own answers: `mlx-spec train`."""
