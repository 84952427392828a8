"""Grammars of answers: which tokens may come next."""

from mlx_spec.grammar.matcher import Grammar as Grammar
from mlx_spec.grammar.matcher import GrammarKind as GrammarKind
from mlx_spec.grammar.matcher import Matcher as Matcher
from mlx_spec.grammar.matcher import limits as limits
from mlx_spec.grammar.matcher import read_tokens as read_tokens
from mlx_spec.grammar.matcher import row_limits as row_limits
