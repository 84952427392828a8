"""The APIs of OpenAI, Anthropic and Ollama: each reads its requests and writes its answers."""
