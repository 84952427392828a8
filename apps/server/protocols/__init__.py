"""The APIs of OpenAI, Anthropic, Ollama and llama.cpp: each reads its requests and writes its answers."""
