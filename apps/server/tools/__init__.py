"""Tool calls: one file reads and writes the calls of a syntax, or of all syntaxes with JSON."""
