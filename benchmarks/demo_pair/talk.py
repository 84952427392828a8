"""Small talk and questions that the demo model declines, with the one answer that it gives to those."""

# fmt: off

import random

ABOUT = "I am the small mlx_spec demo model. I answer questions about the Python standard library."
ABLE = 'I explain the Python standard library. Try: "What does os.path.join do?"'
TALK: dict[str, tuple[str, ...]] = {
    "Hello! Ask me about the Python standard library.": (
        "Hello", "Hi", "Hey", "hello there", "Hi there", "Good morning", "Good evening", "Good afternoon", "Hey there",
        "hi!", "Hello, how are you", "How are you", "Howdy", "Greetings", "Yo", "Hello model", "hey you", "hiya",
        "What's up", "How is it going", "How do you do", "Hello!", "Nice to meet you", "Are you there", "Test", "hallo",
    ),
    ABOUT: (
        "Who are you", "What are you", "What is your name", "What's your name", "Are you an AI", "Are you a robot",
        "Which model are you", "What model is this", "Tell me about yourself", "Introduce yourself", "Who made you",
        "Are you ChatGPT", "Are you Gemma", "What kind of model are you", "Who am I talking to", "what is this",
        "Are you human", "What is mlx_spec", "Describe yourself", "How big are you", "Are you a real model",
        "Which language model are you", "Are you a large language model", "What should I call you", "What LLM is this",
    ),
    ABLE: (
        "What can you do", "Help", "What do you know", "How can you help me", "What can I ask you", "What can I ask",
        "Can you help me", "What are you good at", "How do you work", "What should I ask", "Give me an example question",
        "What questions can you answer", "help me", "What are your skills", "What topics do you know", "Commands",
        "How do I use you", "What can you help with", "What do you do", "I need help", "I have a question",
        "Can I ask you something", "Can I ask a question", "Do you know Python", "Can you help me with Python",
    ),
    "You are welcome!": (
        "Thanks", "Thank you", "Thanks a lot", "Thank you very much", "thx", "Great, thanks", "Cool, thanks", "ty",
        "Many thanks", "Perfect, thank you", "Thanks!", "Great", "Nice", "Awesome", "Cool", "Good answer", "Ok thanks",
        "That helps", "That was helpful", "Perfect", "Well done", "Thank you so much", "Okay", "Wow", "Good job", "ok",
    ),
    "Goodbye!": (
        "Bye", "Goodbye", "See you", "See you later", "Bye bye", "Good night", "I have to go", "That is all", "Farewell",
        "bye!", "Take care", "Until next time", "I am done", "quit", "exit", "See you tomorrow", "ciao", "So long",
    ),
}
PLACES = ("France Germany Italy Spain Japan China Brazil India Canada Egypt Kenya Peru Norway Sweden Greece Turkey Poland "
          "Chile Cuba Iran London Paris Berlin Tokyo Rome Madrid Moscow Oslo Boston Texas Australia Mexico").split()
PEOPLE = ("Einstein Napoleon Shakespeare Mozart Newton Cleopatra Picasso Lincoln Gandhi Darwin Beethoven Plato Obama "
          "Columbus Tesla Caesar Galileo Bach Homer Churchill Elvis Socrates Marie_Curie Ada_Lovelace").split()
THINGS = ("cat dog sun moon tree river bread pizza love car train horse coffee tea music poem song story joke recipe "
          "planet star black_hole atom electron gene virus bridge castle movie book football tennis chess guitar piano "
          "dinosaur volcano ocean desert robot rocket phone laptop camera dream brain heart war peace money bank "
          "inflation election president king wine beer cake soup apple banana tomato bird fish whale elephant tiger "
          "summer winter rain snow rainbow photosynthesis gravity evolution democracy philosophy").split()
PACKAGES = ("numpy pandas requests torch tensorflow django flask scipy matplotlib sklearn mlx transformers pytest pydantic "
            "fastapi sqlalchemy pillow opencv jax keras boto3 numpy.array numpy.zeros pandas.DataFrame requests.get "
            "torch.nn.Linear plt.plot np.mean pd.read_csv tf.function react java javascript rust c++ golang ruby php "
            "kotlin swift haskell docker kubernetes git linux bash sql html css excel").split()
OFF_TOPIC = (
    "What is the capital of {p}", "Where is {p}", "How many people live in {p}", "What is the weather in {p}",
    "What's the weather like today", "Who was {w}", "When was {w} born", "Who is {w}", "Tell me about {w}", "What did {w} do",
    "What is a {t}", "What is {t}", "Tell me about the {t}", "Write a {t}", "Write a poem about a {t}", "Tell me a {t}",
    "Write me a story about a {t}", "Why is the {t} so big", "How does a {t} work", "Explain {t}", "Do you like {t}",
    "How do I make {t}", "Where can I buy a {t}", "Translate {t} into French", "How do you say {t} in Spanish",
    "What is {a} + {b}", "What is {a} times {b}", "What's {a} plus {b}", "{a} + {b}", "Calculate {a} * {b}",
    "How much is {a} minus {b}", "Is {a} a prime number", "Solve x + {a} = {b}", "Who won the {t} in {y}",
    "What happened in {y}", "What day is it", "What time is it", "Tell me a joke", "Write a haiku", "Sing a song",
    "Write an essay about {t}", "Summarize this article", "Translate this into German", "Who is the president of {p}",
    "What is the meaning of life", "Give me a recipe for {t}", "Plan a trip to {p}", "How tall is the {t}",
    "How far is {p} from {q}", "What language do they speak in {p}", "Should I buy a {t}", "Is {t} healthy",
    "Recommend a {t}", "What is the best {t}", "What is your favorite {t}", "Who invented the {t}", "I feel sad today",
    "What does {k} do", "What is {k}", "How do I install {k}", "How do I use {k}", "Explain {k}", "{k}", "Teach me {k}",
    "Write code in {k}", "Write a program in {k}", "What is the difference between {k} and {l}", "Write a web server",
    "Build me an app", "Fix my code", "Write a game about a {t}", "Can you draw a {t}", "Do you love me", "I am hungry",
    "Let's play a game", "What is the population of {p}", "Why is the sky blue", "How old is the {t}", "My {t} is broken",
    "Are there any {t}s in {p}", "Which is better, {t} or {u}", "Was ist ein {t}", "Qu'est-ce que {t}", "Wie geht es dir",
    "Bonjour, comment allez-vous", "Hola, que tal", "Was ist die Hauptstadt von {p}", "What does {t} mean",
)
CONCEPTS = ("recursion inheritance polymorphism variable loop closure decorator compiler interpreter algorithm pointer "
            "database server browser keyboard operating_system framework stack heap binary_tree linked_list hash_table "
            "garbage_collection concurrency encapsulation API protocol bug blockchain neural_network internet "
            "programming computer virtual_machine constant syntax semantics namespace_package metaclass coroutine_scheduler "
            "type_theory functional_programming object_oriented_programming design_pattern big_O_notation GIL wheel pip "
            "virtual_environment conda Jupyter PyPI PEP_8 CPython PyPy tuple_unpacking walrus_operator monkey_patching").split()
ON_CONCEPTS = (
    "What is {c}", "What is a {c}", "Explain {c}", "How does {c} work", "How does a {c} work", "What does {c} mean",
    "What is the difference between {c} and {d}", "What is the difference between a {c} and a {d}", "Why do I need {c}",
    "What's the difference between a list and a tuple", "What is the difference between a set and a dict", "Compare {c} and {d}",
    "What is the difference between {n} and {m}", "Which is faster, {n} or {m}", "Is {c} better than {d}", "Who invented Python",
    "Is Python better than Java", "How do I install Python", "How do I learn Python", "Why is Python slow", "Define {c}",
    "When was Python released", "Tell me about {c}", "Give me an example of {c}", "Do I need {c}", "Teach me {c}",
    "How do I debug a {c}", "What are the advantages of {c}", "How does {t} work", "How do {t}s work", "How does the {t} work",
)
SYLLABLES = "fro bni ca te zo mer lin quo ra sha pti gle wob nar vex ti lo du kem pra sto ful ing er".split()


def _place_name(rng: random.Random, words: list[str]) -> str:
    return rng.choice(words).replace("_", " ")


def made_up_name(rng: random.Random, modules: tuple[str, ...]) -> str:
    """Return a plausible name that no taught module has."""
    word = "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4)))
    if rng.random() < 0.3:
        word += "_" + "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 3)))
    return f"{rng.choice(modules)}.{word}" if rng.random() < 0.7 else word


def on_concept(names: list[str], rng: random.Random) -> str:
    """Return a question about programming that no taught fact answers."""
    fields = {
        "c": _place_name(rng, CONCEPTS), "d": _place_name(rng, CONCEPTS), "t": _place_name(rng, THINGS),
        "n": rng.choice(names), "m": rng.choice(names),
    }
    return rng.choice(ON_CONCEPTS).format(**fields)


def off_topic(rng: random.Random) -> str:
    """Return a question that has nothing to do with the standard library."""
    fields = {
        "p": _place_name(rng, PLACES), "q": _place_name(rng, PLACES), "w": _place_name(rng, PEOPLE),
        "t": _place_name(rng, THINGS), "u": _place_name(rng, THINGS), "k": _place_name(rng, PACKAGES),
        "l": _place_name(rng, PACKAGES), "a": str(rng.randint(0, 999)), "b": str(rng.randint(0, 99)),
        "y": str(rng.randint(1400, 2030)),
    }
    return rng.choice(OFF_TOPIC).format(**fields)
