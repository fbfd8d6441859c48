"""Texts and questions for the real models: the opening of Alice in Wonderland (public domain) and paragraphs of our own."""

TEXT = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice \
she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is the use \
of a book," thought Alice, "without pictures or conversations?" So she was considering in her own mind (as well as she \
could, for the hot day made her feel very sleepy and stupid), whether the pleasure of making a daisy-chain would be worth \
the trouble of getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her.

def moving_average(values, window):
    total = 0.0
    for i, value in enumerate(values):
        total += value
        if i >= window:
            total -= values[i - window]
        yield total / min(i + 1, window)

The boiling point of water at sea level is 100 degrees Celsius. At the top of Mount Everest it is about 71 degrees, \
because the air pressure there is only a third of that at sea level.

{"name": "Dover", "country": "England", "tides": [{"time": "06:12", "height": 6.7}, {"time": "12:31", "height": 0.8}]}

Der Kapitän stand auf der Brücke und sah auf das Meer. Es war still, und kein anderes Schiff war zu sehen.

1. Mix the flour and the salt.
2. Add the butter and the water.
3. Knead the dough for ten minutes and let it rest.
"""

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a Python function that returns the n-th Fibonacci number."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Another one, and something that has this colour."},
    ],
]

# For models that were not tuned to chat.
PLAIN = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "The sky is blue because",
    "Once upon a time there was a ship that",
]
