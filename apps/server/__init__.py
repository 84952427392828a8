"""The local endpoint: an OpenAI-style server in front of a pair."""
