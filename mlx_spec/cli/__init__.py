"""Shared by all programs: options, messages, tables, built-in texts."""
