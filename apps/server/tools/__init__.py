"""Tool calls: each file reads and writes one way in which models write them."""
