"""Phrasings of questions about taught facts: what the demo model is trained on, and what it is tested on."""

# fmt: off

import random

# {n} is the name as the user writes it, {k} what it is called (function, method, class, ...).
TRAINED: dict[str, tuple[str, ...]] = {
    "what": (
        "What does {n} do", "What is {n}", "What's {n}", "Explain {n}", "Describe {n}", "Tell me about {n}", "{n}",
        "What is {n} for", "What is {n} used for", "Can you explain {n}", "Can you tell me what {n} does",
        "I want to know what {n} does", "What does the {n} {k} do", "What is the {k} {n}", "What's {n} for",
        "What does {n} mean", "Help me understand {n}", "Give me a short description of {n}", "what exactly does {n} do",
        "Do you know {n}", "Could you explain what {n} does", "What is the purpose of {n}", "How would you describe {n}",
        "Explain the {k} {n}", "Python {n}", "What does Python's {n} do", "I found {n} in some code, what does it do",
        "Tell me what {n} does", "Why would I use {n}", "What happens when I call {n}", "{n} - what is it",
        "Explain what {n} is", "Define {n}", "What about {n}", "Info on {n}", "What can I do with {n}", "How do I use {n}", "How to use {n}",
        "whats {n}", "what {n} does", "what {n} do", "Whats {n} do", "What will {n} do", "What would {n} do",
        "Explain {n} to me", "Explain {n} to a beginner", "Any idea what {n} does", "{n} explanation", "{n} meaning",
        "Meaning of {n}", "Docs for {n}", "Documentation of {n}", "Help with {n}", "help({n})", "Describe the {k} {n}",
        "I don't understand {n}", "Remind me what {n} does", "What's the point of {n}", "What does {n} return",
        "What does calling {n} do", "Give me a one-line description of {n}", "Summarize {n}", "Why do people use {n}",
        "What is {n} doing", "usage of {n}", "{n} usage", "Can you describe {n}", "What's the use of {n}",
        "What is the meaning of {n}", "I would like to know about {n}", "Say what {n} does", "Could you tell me about {n}",
        "Do you know what {n} does", "What does {n} do exactly", "What is {n} good for", "what's {n} do",
        "Let me know what {n} does", "I saw {n}, what is it", "How can I use {n}", "What do you know about {n}",
    ),
    "signature": (
        "What is the signature of {n}", "What are the arguments of {n}", "What arguments does {n} take",
        "Which parameters does {n} have", "Show me the signature of {n}", "Signature of {n}", "{n} signature",
        "What parameters does {n} take", "Arguments of {n}", "How do I call {n}", "What are the parameters of {n}",
        "Give me the signature of {n}", "What can I pass to {n}", "How is {n} called", "{n} arguments",
        "What does {n} take as arguments", "Which arguments does {n} accept", "What's the signature of {n}",
        "Tell me the parameters of {n}", "List the arguments of {n}", "What is the call signature of {n}",
        "Parameters of {n}", "{n} parameters", "What inputs does {n} take", "Show the arguments of the {k} {n}",
        "What are {n}'s arguments", "I need the signature of {n}", "How many arguments does {n} take",
        "What is the syntax of {n}", "{n} syntax", "What's the syntax for {n}", "How should I call {n}", "{n} args",
        "Args of {n}", "What args does {n} take", "Which parameters can I pass to {n}", "signature for {n}",
        "What do I pass to {n}", "How do I write a call to {n}", "What params does {n} have", "Show me how to call {n}",
        "Does {n} take any arguments", "What are the inputs of {n}", "What options does {n} have", "How to call {n}",
    ),
    "place": (
        "Where is {n}", "Which module is {n} in", "How do I import {n}", "What module has {n}",
        "Where does {n} come from", "Where can I find {n}", "Which module do I need for {n}", "What do I import for {n}",
        "Where is {n} defined", "In which module is {n}", "Import for {n}", "What import does {n} need",
        "Do I need to import {n}", "Is {n} a function or a method", "Where does {n} live", "What kind of thing is {n}",
        "Which module provides {n}", "How can I import {n}", "{n} module", "What module does {n} belong to",
        "What type of object is {n}", "Tell me where {n} is", "Is {n} built in", "{n} import",
        "Which import do I need to use {n}", "From which module is {n}",
        "Where do I import {n} from", "Is {n} in the standard library", "What package is {n} in", "How to import {n}",
        "Import statement for {n}", "What do I have to import for {n}", "Which library has {n}", "Location of {n}",
        "Which module does {n} come from", "module of {n}", "Is {n} a class or a function", "What is {n} part of",
        "Do I have to import anything for {n}", "which module has {n}", "What should I import for {n}",
    ),
    "module": (
        "What is the {n} module", "What does the {n} module do", "What is the {n} module for", "Explain the {n} module",
        "What's the {n} module", "Tell me about the {n} module", "Describe the module {n}", "What is the module {n}",
        "{n} module", "What is {n}", "What does {n} do", "What is {n} for", "What's in the {n} module",
        "Why would I import {n}", "What can the {n} module do", "Explain {n}", "What is the {n} library",
        "What does import {n} give me", "Do you know the {n} module", "Can you explain the {n} module",
        "What is the purpose of the {n} module", "What do I use the {n} module for", "the {n} module", "{n}",
        "What is the standard library module {n}", "Tell me what the {n} module is", "What's {n}", "Tell me about {n}",
        "What is {n} used for", "Describe {n}", "whats {n}", "What's {n} for", "How do I use the {n} module",
        "What is Python's {n} module", "help with the {n} module", "Summarize the {n} module", "What about the {n} module",
        "What's the point of the {n} module", "Why do people use the {n} module", "What does module {n} do",
        "Explain the module {n}", "What kind of module is {n}", "What is the {n} package", "module {n}",
    ),
    "code": (
        "How do I {n}", "How can I {n}", "Show me how to {n}", "Write code to {n}", "Give me code to {n}",
        "How to {n}", "Code to {n}", "Show me code to {n}", "I want to {n}", "Write Python code to {n}",
        "How do you {n}", "What's the way to {n}", "Help me {n}", "How would I {n}", "Can you show me how to {n}",
        "I need to {n}", "What is the code to {n}", "{n}", "Can you write code to {n}", "Python code to {n}",
        "Please show how to {n}", "Write a snippet to {n}", "Example: {n}", "How could I {n}", "Teach me how to {n}",
        "Write code that can {n}", "Write a program to {n}", "Write a script to {n}", "What's the easiest way to {n}",
        "I would like to {n}", "Python: {n}", "Can I {n}", "Snippet to {n}", "Example of how to {n}", "how to {n} in code",
    ),
    "complete": (
        "Complete: {n}", "Complete this: {n}", "Complete this code: {n}", "Finish this line: {n}",
        "Finish this code: {n}", "Complete the line: {n}", "Complete the code\n{n}", "Finish: {n}",
        "Please complete {n}", "Continue this code: {n}", "Continue: {n}", "Autocomplete: {n}",
        "Complete this line\n{n}", "How does this line go on: {n}", "What comes next: {n}", "Fill in the rest: {n}",
        "Complete this Python code: {n}", "Finish the code\n{n}", "Finish this Python line: {n}", "Code completion: {n}",
        "Can you complete {n}", "Can you finish {n}", "Complete my code: {n}", "Complete this statement: {n}",
    ),
}

# Never trained on: the evaluation asks with these.
HELD_OUT: dict[str, tuple[str, ...]] = {
    "what": (
        "What is the use of {n}", "Could you describe {n}", "Please give me a summary of {n}", "So what does {n} actually do",
        "In Python, what does {n} do", "Please tell me what {n} is for", "When do I use {n}", "What is the function of {n}",
        "I need to understand {n}", "What job does {n} have",
    ),
    "signature": (
        "What is the argument list of {n}", "Show me {n}'s parameters", "Which arguments can I give {n}",
        "Could you show the signature of {n}", "Tell me what arguments {n} takes", "Can you list the parameters of {n}",
    ),
    "place": (
        "What module is {n} part of", "Can you tell me where {n} is", "Which module contains {n}",
        "What should I import to use {n}", "Tell me which module {n} is in", "Where do I get {n} from",
    ),
    "module": (
        "Could you describe the {n} module", "What is the use of the {n} module", "Give me a summary of the {n} module",
        "Please explain what the {n} module does", "When do I need the {n} module", "In Python, what is the {n} module",
    ),
    "code": (
        "Could you show me how to {n}", "What's the code to {n}", "Tell me how to {n}", "What is the best way to {n}",
        "How should I {n}", "Give me an example of how to {n}",
    ),
    "complete": (
        "Complete the following: {n}", "Can you complete this: {n}", "Please finish this line: {n}",
        "Complete this snippet: {n}", "Finish the following code: {n}", "Complete the statement: {n}",
    ),
}

# Questions about the name that the last answer was about.
FOLLOW_UPS: dict[str, tuple[str, ...]] = {
    "what": ("What does it do", "And what does it do", "What is it for", "What is it", "Explain it", "And what is it"),
    "signature": (
        "What is its signature", "And its signature", "What arguments does it take", "And the arguments", "How do I call it",
        "What are its arguments", "What are its parameters", "And its parameters", "Which arguments does it have",
        "Show me its signature", "And the signature", "How is it called", "What parameters does it take",
    ),
    "place": (
        "Where is it", "Which module is it in", "How do I import it", "And where is it", "What do I import for it",
        "Where does it come from", "And how do I import it", "Which module has it", "Do I need to import it",
        "What module is it in", "Where can I find it", "And which module is it in",
    ),
}

OPENERS = ("Hi, ", "Hello, ", "Hey, ", "Please, ", "Ok, ", "And ", "Quick question: ", "Thanks! ", "Now, ", "Hi! ",
           "So ", "Hmm, ", "Hello! ", "Sorry, ", "Python question: ", "One more: ")
CLOSERS = (" please", " in Python", ", please", " in python", " in one sentence", " in Python 3", " thanks", " again",
           " exactly", " for me", " briefly")
CALLED = ("function", "method", "class")


def written_name(name: str, short: str, noun: str, rng: random.Random) -> str:
    """Return a name as users write it: short or full, in backticks, with `()`, with its kind of thing."""
    text = rng.choice(short.split()) if short and rng.random() < 0.25 else name
    if noun in CALLED and rng.random() < 0.15:
        text += "()"
    draw = rng.random()
    if draw < 0.2:
        text = f"`{text}`"
    elif draw < 0.23:
        text = f'"{text}"' if draw < 0.215 else f"'{text}'"
    if noun in CALLED and rng.random() < 0.06:
        text = f"the {text} {noun}" if rng.random() < 0.5 else f"the {noun} {text}"
    return text


def dressed(question: str, rng: random.Random) -> str:
    """Return a question in one of the ways people type it: openers, closers, case and punctuation."""
    has_newline = "\n" in question
    if rng.random() < 0.14:
        rest = question if question.startswith("I ") else question[:1].lower() + question[1:]
        question = rng.choice(OPENERS) + rest
    if rng.random() < 0.14 and not has_newline:
        question += rng.choice(CLOSERS)
    if rng.random() < 0.3:
        question = question[:1].lower() + question[1:]
    if rng.random() < 0.06:
        question = question.lower()
    draw = rng.random()
    if draw < 0.6:
        return question + "?"
    return question + ("" if draw < 0.9 else "." if draw < 0.96 else " ?" if draw < 0.98 else "??")


def asked(fact: dict[str, str], templates: tuple[str, ...], rng: random.Random) -> str:
    """Return one phrasing of a fact's question, drawn from `templates`."""
    kind = fact["kind"]
    if kind == "complete":
        code = fact["name"] if rng.random() < 0.6 else f"`{fact['name']}`"
        return rng.choice(templates).format(n=code, k="")
    if kind == "code":
        task = rng.choice([fact["name"], *fact.get("short", "").split("|")]) or fact["name"]
        return dressed(rng.choice(templates).format(n=task, k=""), rng)
    name = written_name(fact["name"], fact.get("short", ""), fact["noun"], rng)
    template = rng.choice(templates)
    if name.startswith("the "):
        template = template.replace("the {n} {k}", "{n}").replace("the {k} {n}", "{n}").replace("Python's ", "")
    return dressed(template.format(n=name, k=fact["noun"]), rng)
