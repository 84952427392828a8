"""How many tokens to draft: what rounds cost, what is accepted, what pays."""
