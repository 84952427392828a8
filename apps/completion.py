"""`mlx-spec completion`: a completion script for a shell, made from the parsers of the programs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence

from mlx_spec.apps.command import Parser, guarded
from mlx_spec.apps.programs import PROGRAMS, Option, options, parser_of

Programs = dict[str, list[Option]]

BASH = """\
# bash completion of mlx-spec. Now: eval "$(mlx-spec completion bash)"
_mlx_spec() {{
    local IFS=$' \\t\\n' cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
    local options= values= files=
    if [[ $cur == = ]]; then
        cur=
    elif [[ $prev == = ]]; then
        prev="${{COMP_WORDS[COMP_CWORD-2]}}"
    fi
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{programs} --help --version" -- "$cur"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    if [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$cur"))
    elif [ -n "$values" ]; then
        COMPREPLY=($(compgen -W "$values" -- "$cur"))
    elif [ -n "$files" ]; then
        IFS=$'\\n'
        COMPREPLY=($(compgen -f -- "$cur"))
        compopt -o filenames 2>/dev/null
    fi
}}
complete -F _mlx_spec mlx-spec
"""

ZSH = """\
#compdef mlx-spec
# zsh completion of mlx-spec. Now: source <(mlx-spec completion zsh)
_mlx_spec() {{
    if (( CURRENT == 2 )); then
        local -a programs
        programs=({programs})
        _describe program programs
        return
    fi
    local program=$words[2]
    shift words
    (( CURRENT-- ))
    case $program in
{cases}
    esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _mlx_spec "$@"
else
    compdef _mlx_spec mlx-spec
fi
"""

FISH = """\
# fish completion of mlx-spec. Now: mlx-spec completion fish | source
complete -c mlx-spec -f
"""


def parser() -> Parser:
    """The options of `mlx-spec completion`."""
    parser = Parser(
        "completion",
        'Print a completion script. In ~/.bashrc: eval "$(mlx-spec completion bash)"; in ~/.zshrc: '
        "source <(mlx-spec completion zsh); fish: mlx-spec completion fish | source.",
        usage="%(prog)s SHELL",
    )
    parser.add_argument("shell", metavar="SHELL", choices=sorted(SHELLS), help=", ".join(sorted(SHELLS)))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """`mlx-spec completion`. Returns its exit status."""
    shell = parser().parse_args(arguments).shell

    def show() -> int:
        print(script(shell), end="", flush=True)
        return 0

    return guarded(show)


def script(shell: str) -> str:
    """The script for bash, zsh or fish."""
    return SHELLS[shell]({name: options(parser_of(name)) for name in PROGRAMS})


def _bash(programs: Programs) -> str:
    cases = "\n".join(_bash_case(name, found) for name, found in programs.items())
    return BASH.format(programs=" ".join(programs), cases=cases)


def _bash_case(name: str, found: list[Option]) -> str:
    names = " ".join(name for option in found for name in option.names)
    lines = [f"    {name})", f"        options={shlex.quote(names)}"]
    arguments = [option for option in found if not option.names]
    choices = " ".join(choice for option in arguments for choice in option.choices)
    lines += [f"        values={shlex.quote(choices)}"] if choices else []
    lines += ["        files=yes"] if any(option.is_path for option in arguments) else []
    alike: dict[tuple[str, str], list[str]] = {}  # (values, files) -> names
    for option in found:
        if option.value is not None:
            key = shlex.quote(" ".join(option.choices)), "yes" if option.is_path else "''"
            alike.setdefault(key, []).extend(option.names)
    lines.append('        case "$prev" in')
    for (values, files), same in alike.items():
        if same:
            lines.append(f"        {' | '.join(same)}) values={values} files={files} ;;")
    return "\n".join([*lines, "        esac", "        ;;"])


def _zsh(programs: Programs) -> str:
    cases = []
    for name, found in programs.items():
        specs = [spec for option in found for spec in _zsh_specs(option)]
        cases += [f"    {name})", "        _arguments \\", " \\\n".join(f"            {s}" for s in specs)]
        cases.append("        ;;")
    return ZSH.format(programs=" ".join(programs), cases="\n".join(cases))


def _zsh_specs(option: Option) -> Iterator[str]:
    """What `_arguments` is told of an option: one specification a name."""
    about = "".join(rf"\{letter}" if letter in "[]:\\" else letter for letter in option.help)
    action = f"({' '.join(option.choices)})" if option.choices else "_files" if option.is_path else " "
    label = (option.value or "").replace(":", r"\:").replace("_", " ").lower()
    if not option.names:
        yield shlex.quote(f"{'*' if option.repeats else ''}:{label}:{action}")
    for name in option.names:
        after = "=" if option.value is not None and name.startswith("--") else ""
        value = f":{label}:{action}" if option.value is not None else ""
        yield shlex.quote(f"{'*' if option.repeats else ''}{name}{after}[{about}]{value}")


def _fish(programs: Programs) -> str:
    lines = [f"complete -c mlx-spec -n __fish_use_subcommand -a {_fished(' '.join(programs))}"]
    for name, found in programs.items():
        head = f"complete -c mlx-spec -n {_fished('__fish_seen_subcommand_from ' + name)}"
        lines += [f"{head} {line}" for option in found if (line := _fish_line(option))]
    return FISH + "\n".join(lines) + "\n"


def _fish_line(option: Option) -> str:
    words = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    if option.value is not None and option.names:
        words.append("-r")
    if option.choices:
        words.append(f"-a {_fished(' '.join(option.choices))}")
    elif option.is_path:
        words.append("-F")
    return " ".join([*words, f"-d {_fished(option.help)}"]) if words else ""


def _fished(text: str) -> str:
    """One word for fish, which knows two escapes between single quotes."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS: dict[str, Callable[[Programs], str]] = {"bash": _bash, "fish": _fish, "zsh": _zsh}
