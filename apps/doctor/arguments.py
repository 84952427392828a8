"""x"""
from mlx_spec.apps.command import Parser
def parser():
    return Parser("bench","x")
