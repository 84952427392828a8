"""More phrasings, composed of beginnings and ends; the model is trained on them in its later stages."""

# ruff: noqa: E501
# fmt: off

from demo_pair.questions import HELD_OUT

_ASKING = (
    "Can you tell me", "Could you tell me", "Do you know", "I wonder", "I'd like to know", "I want to know", "Tell me",
    "Please tell me", "I am not sure", "Explain", "Please explain", "Can you say", "I need to know", "Let me know",
    "Could you please explain", "I forgot", "Remind me", "Show me", "I'm trying to understand", "Would you tell me",
    "I was wondering", "Can you please tell me", "Can anyone tell me", "Do you happen to know", "Say", "I never knew",
)
_TAILS: dict[str, tuple[str, ...]] = {
    "what": (
        "what {n} does", "what {n} is", "what {n} is used for", "what {n} is good for", "how {n} is used",
        "what {n} means", "why people use {n}", "what happens in {n}", "what the {k} {n} does", "what the {n} {k} is for",
        "what to do with {n}", "what the purpose of {n} is",
    ),
    "signature": (
        "what arguments {n} has", "how to call {n}", "which parameters {n} takes", "what the signature of {n} is",
        "what {n} takes", "which arguments {n} needs", "how {n} is called", "what the parameters of {n} are",
        "what to pass to {n}", "what the arguments of {n} are",
    ),
    "place": (
        "where {n} comes from", "how to import {n}", "which module {n} belongs to", "which module has {n}",
        "where {n} lives", "what to import for {n}", "where to find {n}", "what module {n} is from",
        "where {n} is defined", "if {n} is built in",
    ),
    "module": (
        "what the {n} module does", "what the {n} module is", "what the {n} module is for", "what {n} is used for",
        "what the module {n} is good for", "what {n} does", "what the purpose of the {n} module is",
    ),
    "code": (
        "how to {n}", "how I can {n}", "how one can {n}", "how I could {n}", "how to {n} quickly", "how to {n} with Python",
        "how you would {n}", "what code I need to {n}",
    ),
    "complete": (),
}
_OWN: dict[str, tuple[str, ...]] = {
    "what": (
        "What role does {n} play", "What purpose does {n} serve", "What effect does {n} have", "What task does {n} do",
        "Short explanation of {n}", "A summary of {n}", "Brief description of {n}", "One sentence about {n}",
        "What's {n} all about", "What's the idea of {n}", "What is the idea behind {n}", "Summary of {n}", "Overview of {n}",
        "When would I use {n}", "When should I use {n}", "When to use {n}", "Why is there {n}", "Teach me about {n}",
        "How can {n} help me", "What does the Python {k} {n} do", "In Python, what is {n}", "With Python, what does {n} do",
        "I am learning about {n}", "I have to use {n}", "I must understand {n}", "Clarify {n}", "The use of {n}",
        "Give me information on {n}", "Give me an explanation of {n}", "What do people mean by {n}", "Quickly explain {n}",
        "What's the job of {n}", "What is the role of {n}", "In simple words, what is {n}", "In short, what does {n} do",
        "Speak about {n}", "Anything about {n}", "What can {n} do", "What does {n} help with", "explain {n} in Python",
    ),
    "signature": (
        "What must I pass to {n}", "Give me the parameters of {n}", "What's the argument order of {n}", "call {n} how",
        "Write the signature of {n}", "Argument names of {n}", "What's in the signature of {n}", "Print the signature of {n}",
        "What keyword arguments does {n} take", "How do you call {n}", "Could you list the arguments of {n}",
        "What are the possible arguments of {n}", "Which inputs does {n} have", "Full signature of {n}", "List {n}'s arguments",
    ),
    "place": (
        "In what module is {n}", "What module do I need to import for {n}", "What do I need to import to use {n}",
        "Give me the import for {n}", "Name the module of {n}", "Which package has {n}", "Where's {n}", "Origin of {n}",
        "From where do I import {n}", "What's the module of {n}", "Which module defines {n}", "Home of {n}",
        "Need an import for {n}", "Can I use {n} without an import", "What does {n} belong to",
    ),
    "module": (
        "What role does the {n} module play", "Summary of the {n} module", "Overview of the {n} module",
        "In short, what is the {n} module", "In Python, what does the {n} module do", "When should I use the {n} module",
        "What's the idea of the {n} module", "Short explanation of the {n} module", "What does the module {n} offer",
        "What can I do with the {n} module", "Give me information on the {n} module", "What is the role of {n}",
    ),
    "code": (
        "What would be the code to {n}", "Give me an example to {n}", "I have to {n}", "I must {n}", "Let's {n}",
        "What do I write to {n}", "How does one {n}", "In Python, how do I {n}", "With Python, how can I {n}",
        "What is a good way to {n}", "What is a simple way to {n}", "The code to {n}", "One example: {n}",
    ),
    "complete": (
        "Complete my line: {n}", "Please complete: {n}", "Please complete this: {n}", "Please finish: {n}", "Extend: {n}",
        "Please finish this code: {n}", "Complete the next line: {n}", "Finish the line: {n}", "Go on: {n}", "Complete {n}",
    ),
}
_TESTED = {t.lower() for templates in HELD_OUT.values() for t in templates}
MORE: dict[str, tuple[str, ...]] = {
    kind: tuple(t for t in (*_OWN[kind], *(f"{a} {t}" for a in _ASKING for t in tails)) if t.lower() not in _TESTED)
    for kind, tails in _TAILS.items()
}

# Added in the third stage: what the model got wrong after the second.
LAST: dict[str, tuple[str, ...]] = {
    "what": (
        "How does {n} work", "How does {n} work", "How does {n} work in Python", "How do {n} work", "how {n} works",
        "Explain how {n} works", "Tell me how {n} works", "How does the {k} {n} work", "How does the {n} {k} work",
        "Can you explain how {n} works", "I don't know how {n} works", "Show me how {n} works", "How is {n} used",
        "What use does {n} have", "What purpose does {n} have", "What meaning does {n} have", "What benefit does {n} have",
        "What good is {n}", "What sort of thing does {n} do", "What does one use {n} for", "What is it that {n} does",
        "A question about {n}: what does it do", "About {n}", "I have a question about {n}", "What was {n} again",
        "What does {n} do, in short", "What does {n} do? Answer in one line", "What does {n} do and why",
        "I need a description of {n}", "I want to understand {n}", "I need to learn {n}", "Help me with {n}",
        "What is the idea of {n}? Be brief", "Hey what does {n} do", "yo what is {n}", "What does {n} do in my code",
        "What's this {n} thing", "Why {n}", "What does {n} actually do", "So what is {n}", "Say something about {n}",
    ),
    "signature": (
        "What does the signature of {n} look like", "How does the call of {n} look", "{n} takes what",
        "What are the arguments to {n}", "What arguments can I use with {n}", "Which arguments go into {n}",
        "How do I use the arguments of {n}", "arguments for {n}", "parameters for {n}", "Parameter list of {n}",
        "What arguments can {n} take", "Show me the arguments of {n}", "Show me the parameters of {n}",
    ),
    "place": (
        "In which module can I find {n}", "In which module do I find {n}", "What module do I find {n} in",
        "What's the import for {n}", "Which module should I import for {n}", "Which module is {n} defined in",
        "To which module does {n} belong", "Which module do I import to use {n}", "What module is {n} in",
        "Which library is {n} in", "Where in the standard library is {n}", "Does {n} need an import",
    ),
    "module": (
        "How does the {n} module work", "What is {n} good for", "What is the module {n} for", "How do I use {n}",
        "Explain how the {n} module works", "What use does the {n} module have", "The use of the {n} module",
        "What does the module named {n} do", "I want to understand the {n} module", "I need help with the {n} module",
    ),
    "code": (
        "What code do I use to {n}", "How do I {n} in my program", "Give me a snippet to {n}", "Best way to {n}",
        "What's a good way to {n}", "The best way to {n}", "Quick way to {n}", "Give an example of code to {n}",
        "I'm trying to {n}", "Example code to {n}", "I am trying to {n}, how", "Is there a way to {n}",
    ),
    "complete": ("Complete the following line: {n}", "Fill in: {n}", "Complete code: {n}", "Finish this: {n}"),
}
