"""Tokens and text: the tokenizer of a target, its chat template, and the text of a stream of tokens."""

from mlx_spec.tokenizer.recent import common_prefix as common_prefix
from mlx_spec.tokenizer.tokenizer import Tokenizer as Tokenizer
from mlx_spec.tokenizer.tokenizer import differing_token as differing_token
from mlx_spec.tokenizer.tokenizer import read_fast_tokenizer as read_fast_tokenizer
from mlx_spec.tokenizer.tokenizer import read_tokenizer as read_tokenizer
