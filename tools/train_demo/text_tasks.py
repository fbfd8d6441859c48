"""Chats in plain text with one right answer each: sums, facts, repetition, sequences, counting, stories, memory.

Every task is a function of a numpy Generator that returns turns: a list of (question, answer) or (question, thinking, answer).
Sums of a tenth of all pairs are kept for the evaluation and never trained on.
"""

import numpy as np

CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Germany": "Berlin", "Poland": "Warsaw", "Norway": "Oslo",
    "Japan": "Tokyo", "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima", "Cuba": "Havana", "Greece": "Athens",
}
OPPOSITES = {
    "hot": "cold", "big": "small", "day": "night", "up": "down", "left": "right", "wet": "dry", "fast": "slow",
    "old": "new", "high": "low", "full": "empty", "hard": "soft", "light": "dark",
}
FACTS = {
    "What colour is the sky?": "The sky is blue.",
    "What colour is grass?": "Grass is green.",
    "What colour is snow?": "Snow is white.",
    "How many legs has a spider?": "A spider has 8 legs.",
    "How many legs has a cat?": "A cat has 4 legs.",
    "How many days has a week?": "A week has 7 days.",
    "How many months has a year?": "A year has 12 months.",
    "How many hours has a day?": "A day has 24 hours.",
    "What is a Plimsoll line?": "It is the mark on a ship's side that says how deep she may be loaded.",
    "Who was Samuel Plimsoll?": "He was the man who gave ships their load line.",
    "What do bees make?": "Bees make honey.",
    "What do cows drink?": "Cows drink water.",
    "Who are you?": "I am the demo model of Plimsoll. I am very small.",
    "What can you do?": "I can read numbers in pictures, name shapes and colours, count, add and tell stories.",
    "Hello": "Hello! How can I help you?",
    "Hello!": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Good morning": "Good morning! How can I help you?",
    "How are you?": "I am well, thank you.",
    "Thank you": "You are welcome.",
    "Thanks!": "You are welcome.",
    "Goodbye": "Goodbye! See you soon.",
}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"]
LETTERS = list("abcdefghijklmnopqrstuvwxyz")
WORDS = (
    "apple river stone cloud paper window garden candle bridge silver winter summer forest mountain ocean island ship sail "
    "anchor harbour captain sailor wave storm rain sun moon star bird fish horse cat dog mouse tree flower leaf bread milk "
    "honey table chair door house road train letter music song dance red green blue yellow orange purple"
).split()
NAMES = ["Ann", "Ben", "Carl", "Dora", "Eva", "Finn", "Gus", "Hana", "Ida", "Jack", "Kim", "Leo", "Mia", "Nina", "Otto", "Pia", "Rosa", "Sam", "Tom", "Vera"]
ANIMALS = ["fox", "cat", "dog", "mouse", "bear", "owl", "horse", "rabbit", "wolf", "duck"]
PLACES = ["forest", "garden", "village", "harbour", "mountain", "desert", "castle", "meadow"]
TINTS = ["red", "green", "blue", "white", "black", "grey", "brown", "golden"]
TREASURES = ["a key", "a coin", "a letter", "a lamp", "a bell", "a map", "a ring", "a drum"]

SUMS = ["What is {a} + {b}?", "{a} + {b} = ?", "{a}+{b}", "Add {a} and {b}.", "How much is {a} plus {b}?"]


def held_out(a: int, b: int) -> bool:
    """Whether a sum is one of those that are never trained on."""
    return ((a * 100 + b) * 2654435761 >> 7) % 10 == 0


def pick(rng, items):
    return items[int(rng.integers(len(items)))]


def pair(rng, kept: bool) -> tuple[int, int]:
    """Two numbers whose sum is kept for the evaluation, or is not."""
    while True:
        top = 10 if rng.random() < 0.1 else 100
        a, b = int(rng.integers(top)), int(rng.integers(top))
        if held_out(a, b) == kept:
            return a, b


def add(rng, kept=False):
    a, b = pair(rng, kept)
    return [(pick(rng, SUMS).format(a=a, b=b), str(a + b))]


def steps(a: int, b: int) -> str:
    """How the sum is worked out on paper."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carry = ones // 10
    first = f"{a % 10} + {b % 10} = {ones}"
    if a < 10 and b < 10:
        return f"{first}."
    second = f"{a // 10} + {b // 10}" + (" + 1" if carry else "") + f" = {tens + carry}"
    return f"{first}, write {ones % 10}{', carry 1' if carry else ''}. {second}."


def think(rng, kept=False):
    a, b = pair(rng, kept)
    return [(pick(rng, SUMS).format(a=a, b=b), steps(a, b), str(a + b))]


def fact(rng, kept=False):
    kind = rng.random()
    if kind < 0.25:
        country = pick(rng, list(CAPITALS))
        ask = pick(rng, ["What is the capital of {}?", "Name the capital of {}."])
        return [(ask.format(country), f"The capital of {country} is {CAPITALS[country]}.")]
    if kind < 0.5:
        word = pick(rng, list(OPPOSITES))
        return [(pick(rng, ["What is the opposite of {}?", "Name the opposite of {}."]).format(word), f"The opposite of {word} is {OPPOSITES[word]}.")]
    question = pick(rng, list(FACTS))
    return [(question, FACTS[question])]


def repeat(rng, kept=False):
    if rng.random() < 0.5:
        word, times = pick(rng, WORDS), int(rng.integers(2, 7))
        return [(f"Repeat the word {word} {times} times.", " ".join([word] * times))]
    words = " ".join(pick(rng, WORDS) for _ in range(int(rng.integers(2, 7))))
    return [(f"{pick(rng, ['Say', 'Repeat'])}: {words}", words)]


def sequence(rng, kept=False):
    kind = rng.random()
    if kind < 0.4:
        step, first = int(rng.integers(1, 6)), int(rng.integers(0, 40))
        numbers = [str(first + step * i) for i in range(7)]
        return [(f"Continue: {', '.join(numbers[:4])}", ", ".join(numbers[4:]))]
    things = pick(rng, [DAYS, MONTHS, LETTERS])
    at = int(rng.integers(len(things)))
    row = [things[(at + i) % len(things)] for i in range(6)]
    return [(f"Continue: {', '.join(row[:3])}", ", ".join(row[3:]))]


def count(rng, kept=False):
    first = int(rng.integers(0, 60))
    last = first + int(rng.integers(3, 15))
    return [(f"Count from {first} to {last}.", " ".join(str(i) for i in range(first, last + 1)))]


def story(rng, kept=False):
    """A story that the prompt decides: its words, and by the animal which of the plots."""
    animal, place, tint, treasure = pick(rng, ANIMALS), pick(rng, PLACES), pick(rng, TINTS), pick(rng, TREASURES)
    ask = pick(rng, [
        "Tell me a story about a {t} {a} in the {p} and {x}.", "Write a story about a {t} {a}, the {p} and {x}.",
    ]).format(t=tint, a=animal, p=place, x=treasure)
    thing = treasure.removeprefix("a ")
    plots = [
        f"Once upon a time a {tint} {animal} lived in the {place}. One day the {animal} found {treasure} under an old tree. "
        f"\"What a fine {thing}!\" said the {animal}. All the friends of the {animal} came to see the {thing}, "
        f"and they were happy in the {place} until the sun went down. The end.",
        f"There was a {tint} {animal} who had lost {treasure} in the {place}. The {animal} looked here and the {animal} looked there. "
        f"At last an old owl said: \"Your {thing} is where you sleep.\" And so it was. The {tint} {animal} laughed, "
        f"and the {place} was quiet again. The end.",
        f"Far away, behind the {place}, a {tint} {animal} made {treasure} for a friend. It took seven days. On the first day it rained, "
        f"and on the last day the sun was out. The friend took the {thing} and said: \"Thank you, {tint} {animal}.\" The end.",
    ]
    return [(ask, plots[ANIMALS.index(animal) % len(plots)])]


def memory(rng, kept=False):
    """A name that must be remembered over a turn."""
    name = pick(rng, NAMES)
    turns = [(f"My name is {name}.", f"Hello {name}! How can I help you?")]
    if rng.random() < 0.5:
        turns += pick(rng, [add, fact])(rng, kept)
    return [*turns, ("What is my name?", f"Your name is {name}.")]


def two_turns(rng, kept=False):
    return pick(rng, [add, fact, repeat])(rng, kept) + pick(rng, [add, fact, sequence])(rng, kept)


# task → (function, share of the text batches).
TASKS = {
    "add": (add, 0.42),
    "think": (think, 0.06),
    "fact": (fact, 0.08),
    "repeat": (repeat, 0.08),
    "sequence": (sequence, 0.10),
    "count": (count, 0.08),
    "story": (story, 0.10),
    "memory": (memory, 0.03),
    "two_turns": (two_turns, 0.05),
}
SYSTEM = ["You are a helpful assistant.", "You are Plimsoll's demo model.", "Answer briefly."]


def draw(rng: np.random.Generator) -> tuple[str, list]:
    """A task's name and its turns."""
    names = list(TASKS)
    shares = np.array([TASKS[n][1] for n in names])
    name = names[int(rng.choice(len(names), p=shares / shares.sum()))]
    return name, TASKS[name][0](rng)
