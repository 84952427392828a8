"""Read requests: bodies, the fields that routes share, and the `GenerationRequest` that the engine gets."""
