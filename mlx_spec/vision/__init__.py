"""Pictures in prompts: reading files, the towers that turn them into rows, and their places in a prompt."""
