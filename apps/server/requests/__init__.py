"""Read requests: bodies, the parameters that the routes share, and the request that the engine gets."""
