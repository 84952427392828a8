"""Tool calls: read from answers as they stream, enforced by grammar, and written into prompts."""

from mlx_spec.apps.server.tools.calls import Calls as Calls
from mlx_spec.apps.server.tools.conversation import prompt_of as prompt_of
from mlx_spec.apps.server.tools.dialect import Dialect as Dialect
from mlx_spec.apps.server.tools.dialect import dialect_of as dialect_of
from mlx_spec.apps.server.tools.grammar import banned as banned
from mlx_spec.apps.server.tools.grammar import lark as lark
from mlx_spec.apps.server.tools.unions import widened_text as widened_text
