"""The texts of the self-test: built in, so that it needs no network."""

from __future__ import annotations

TEXTS = (
    "The harbour was quiet when the last ferry came in. Two fishermen sat on the wall and mended a net, and "
    "above them the gulls waited for what the day had left over. In winter nobody took the path along the "
    "cliff, but now, in the first warm week of the year, you could hear people talking up there until it was "
    "dark, and sometimes somebody sang.",
    "def mean(values):\n    total = 0.0\n    count = 0\n    for value in values:\n        total += value\n"
    "        count += 1\n    if count == 0:\n        raise ValueError('mean of nothing')\n"
    "    return total / count\n\n\ndef variance(values):\n    center = mean(values)\n"
    "    return mean([(value - center) ** 2 for value in values])\n",
    "Water boils at a lower temperature on a mountain than at the coast, because the air above presses on it "
    "with less force. At sea level it takes 100 degrees Celsius; at a height of 3000 metres about 90 are "
    "enough. That is why pasta needs more time in a hut in the Alps, although the water in the pot bubbles "
    "just as much as at home.",
    "Question: A train leaves at 9:40 and arrives at 11:05. How long is the journey?\nAnswer: From 9:40 to "
    "10:40 it is one hour, and from 10:40 to 11:05 it is 25 minutes more, so the journey takes 1 hour and 25 "
    "minutes.\nQuestion: And how far does it go at 80 kilometres an hour?\nAnswer: 1 hour and 25 minutes are "
    "85 minutes, and 80 times 85 divided by 60 is about 113 kilometres.",
)

PROMPTS = (  # to be continued as they are
    "The capital of",
    "Once upon a time",
    "def fib(n):\n    if n",
    "one two three four five six",
    "for i in range(10):\n",
)

QUESTIONS = (  # to be answered, where the target has a chat template
    "Explain in three sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper and a storm.",
)
