"""Decode many sequences at once, each with its own drafts."""
