"""Taught facts by introspection of the running interpreter: (kind, name) -> one answer."""

import importlib
import inspect
import re
from types import ModuleType

from demo_pair.fixes import MODULE_SUMMARIES, SIGNATURES, SKIP, SUMMARIES
from demo_pair.names import MODULES, NAMES

BUILTIN_TYPES = ("str", "list", "dict", "set", "tuple", "bytes", "int", "float")
CLASS_OWNERS = tuple(
    o
    for o in NAMES
    if o.rsplit(".", 1)[-1][:1].isupper() or ("." in o and o.split(".")[0] in ("datetime", "collections"))
)
SUMMARY_CHARS = 130
PARAMETER_CHARS = 60  # a longer list of parameters ends in "..."
SIGNATURE_CHARS = 90
Fact = dict[str, str]  # keys: kind, name, noun, answer


def resolve(owner: str, member: str) -> object:
    """Return the object that `owner.member` names."""
    parts = owner.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        rest = parts[cut:]
        break
    else:
        found, rest = importlib.import_module("builtins"), parts
    for part in [*rest, member]:
        found = getattr(found, part)
    return found


def summary(documentation: str) -> str:
    """Return the first sentence of a docstring, on one line; empty if there is none to use."""
    paragraphs = [p for p in re.split(r"\n\s*\n", documentation.strip()) if p.strip()]
    while paragraphs and re.match(r"^[\w.]+\(.*\)( -> .*)?$", " ".join(paragraphs[0].split()), re.S):
        paragraphs.pop(0)
    if not paragraphs:
        return ""
    lines = paragraphs[0].splitlines()
    while len(lines) > 1 and re.match(r"^[\w.]+\(.*\)( -> .*)?\s*$", lines[0].strip()):
        lines.pop(0)
    text = " ".join(" ".join(lines).split())
    text = re.sub(r"^[\w.]+\([^)]*\) *(-> *[\w\[\], .]+?)? *(-+>|--|:) *", "", text)
    text = text.replace("``", "`").replace("`", "")
    sentence = re.split(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)\s+(?=[A-Z\[(])", text)[0]
    sentence = sentence.rstrip(" .:;,")
    return sentence[:1].upper() + sentence[1:] + "." if sentence else ""


def signature(name: str, found: object) -> str:
    """Return `name(parameters)` without annotations and without self; empty if it has none."""
    if name in SIGNATURES:
        return SIGNATURES[name]
    if not callable(found):
        return ""
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (ValueError, TypeError):
        return documented_signature(name, inspect.getdoc(found) or "")
    kept = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in parameters
        if p.name not in ("self", "cls", "type")
    ]
    if kept and all(p.kind is p.POSITIONAL_ONLY for p in kept):
        kept = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in kept]
    return name + shortened(re.sub(r"<[^<>]*>", "...", str(inspect.Signature(kept))))


def shortened(parameters: str) -> str:
    """Return `(a, b, c)`, cut after a whole parameter and closed with `...` where it is too long."""
    if len(parameters) <= PARAMETER_CHARS:
        return parameters
    cut = parameters[:PARAMETER_CHARS].rsplit(", ", 1)[0]
    return f"{cut.removesuffix(', *')}, ...)"


def documented_signature(name: str, documentation: str) -> str:
    """Return the signature that a docstring of a C function begins with; empty if it has none."""
    first = documentation.strip().split("\n")[0]
    found = re.match(
        r"^(?:[\w.]*\.)?" + re.escape(name.rsplit(".", 1)[-1]) + r"(\(.*?\))(?=\s*(->|-->|--|$))", first
    )
    return name + shortened(found.group(1)) if found else ""


def noun_of(owner: str, found: object) -> str:
    """Return what the object is called: function, method, class, exception, module or value."""
    if isinstance(found, type):
        return "exception" if issubclass(found, BaseException) else "class"
    if isinstance(found, ModuleType):
        return "module"
    if not callable(found):
        return "value"
    owner_is_class = owner in BUILTIN_TYPES or owner in CLASS_OWNERS
    return "method" if owner_is_class else "function"


def place(owner: str, name: str, noun: str) -> str:
    """Return the sentence that says where a name lives."""
    article = "an" if noun == "exception" else "a"
    if owner == "builtins":
        return f"{name} is a built-in {noun}; no import is needed."
    if owner in BUILTIN_TYPES:
        return f"{name} is a method of the built-in type {owner}; no import is needed."
    if noun == "method":
        return f"{name} is a method of the class {owner}; import {owner.rsplit('.', 1)[0]} first."
    return f"{name} is {article} {noun} in the module {owner}; import {owner} first."


def name_facts(owner: str, member: str) -> list[Fact]:
    """Return the facts of one name, one per kind that has a good answer."""
    name = member if owner == "builtins" else f"{owner}.{member}"
    found = resolve(owner, member)
    noun = noun_of(owner, found)
    text = SUMMARIES.get(name) or summary(inspect.getdoc(found) or "")
    if noun == "value" and name not in SUMMARIES:
        text = ""
    answers = {"what": f"{name}: {text}" if 8 < len(text) <= SUMMARY_CHARS and name not in SKIP else ""}
    call = signature(name, found)
    answers["signature"] = f"Signature: {call}" if call and len(call) <= SIGNATURE_CHARS else ""
    answers["place"] = place(owner, name, noun)
    if noun in ("exception", "module") or name.startswith("__"):
        answers["signature"] = ""
    if not answers["what"]:
        return []
    return [{"kind": k, "name": name, "noun": noun, "answer": a} for k, a in answers.items() if a]


def module_facts(name: str) -> list[Fact]:
    """Return the fact about a module as a whole."""
    text = MODULE_SUMMARIES.get(name) or summary(inspect.getdoc(importlib.import_module(name)) or "")
    if not 8 < len(text) <= SUMMARY_CHARS:
        return []
    return [{"kind": "module", "name": name, "noun": "module", "answer": f"The {name} module: {text}"}]


def all_facts() -> list[Fact]:
    """Return every taught fact about names and modules, in teaching order."""
    facts = [f for owner, members in NAMES.items() for m in members.split() for f in name_facts(owner, m)]
    return facts + [f for name in MODULES.split() for f in module_facts(name)]


# Short forms that several taught names share, and the one that people mean.
PREFERRED = {
    "append": "list.append",
    "split": "str.split",
    "strip": "str.strip",
    "loads": "json.loads",
    "dumps": "json.dumps",
    "sleep": "time.sleep",
    "exists": "os.path.exists",
    "replace": "str.replace",
    "choice": "random.choice",
    "sqrt": "math.sqrt",
    "extend": "list.extend",
    "insert": "list.insert",
    "items": "dict.items",
    "lower": "str.lower",
    "upper": "str.upper",
    "join": "str.join",
    "run": "subprocess.run",
    "pprint": "pprint.pprint",
    "chain": "itertools.chain",
}


def short_forms(names: list[str]) -> dict[str, list[str]]:
    """Returns, for each dotted name, the shorter forms that can only mean this name (`listdir`, `Path.exists`)."""
    taken = {**dict.fromkeys(MODULES.split(), 2), **{n: 2 for n in names}}
    for name in names:
        for form in _suffixes(name):
            taken[form] = taken.get(form, 0) + 1
    return {
        n: [f for f in _suffixes(n) if PREFERRED.get(f) == n or (taken[f] == 1 and f not in PREFERRED)]
        for n in names
    }


def _suffixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(1, len(parts))]


def untaught_names(taught: set[str]) -> list[str]:
    """Return public callables of the taught modules that are not taught themselves, sorted."""
    found = set()
    for module in MODULES.split():
        members = vars(importlib.import_module(module))
        found |= {f"{module}.{m}" for m, v in members.items() if m[0] != "_" and callable(v) and len(m) > 2}
    last = {n.rsplit(".", 1)[-1].lower() for n in taught}
    return sorted(n for n in found if n.rsplit(".", 1)[-1].lower() not in last)
