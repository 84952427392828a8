"""Parts of `/v1/responses`: its tools, and the responses that are stored."""
