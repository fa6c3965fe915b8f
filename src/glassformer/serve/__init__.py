"""The OpenAI-compatible server: models by name, continuous batching, limits."""
