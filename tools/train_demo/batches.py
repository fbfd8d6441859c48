"""Batches of the tasks: which chats a step sees is decided by the seed, the step and the worker alone."""

import numpy as np
import torch

import pictures
import text_tasks
from model import MERGE, PATCH, patches_of, places_of
from words import Chats

PICTURE_CHATS, TEXT_CHATS, LONG = 40, 24, 3
# Steps whose chats have two pictures each, which makes them longer than all others.
TWO_SHARE = 0.06


def collate(chats: Chats, rows: list[tuple[list[int], list[bool]]], grids: list[list], shots=None, grid=None) -> dict:
    """Padded on the right: later positions do not change earlier ones."""
    length = -(-max(len(ids) for ids, _ in rows) // 4) * 4
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    answer = torch.zeros(len(rows), length, dtype=torch.bool)
    places = torch.zeros(3, len(rows), length, dtype=torch.long)
    for row, (tokens, marks) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        answer[row, : len(tokens)] = torch.tensor(marks)
        places[:, row, : len(tokens)] = torch.tensor(places_of(tokens, chats.image, grids[row]))
    batch = {"ids": ids, "answer": answer, "places": places, "weight": answer / answer.sum(1, keepdim=True).sqrt()}
    if shots is not None:
        batch |= {"pictures": patches_of(torch.from_numpy(np.stack(shots))), "grid": grid, "pads": ids == chats.image}
    return batch


def some_system(rng) -> str | None:
    return text_tasks.SYSTEM[int(rng.integers(len(text_tasks.SYSTEM)))] if rng.random() < 0.12 else None


def picture_rows(rng, chats: Chats, atlas, count: int, size, task=None, kept=False):
    """Rows of one size of picture and with one system prompt, so that they are about as long; (rows, grids, shots, grid)."""
    grid = (size[0] // PATCH, size[1] // PATCH)
    tokens = grid[0] * grid[1] // MERGE**2
    rows, grids, shots, system = [], [], [], some_system(rng)
    for _ in range(count):
        if task is None:
            _, some, question, answer = pictures.draw(rng, atlas, size)
        else:
            some, question, answer = pictures.TASKS[task][0](rng, atlas, size, kept)
        after = rng.random() < 0.2
        rows.append(chats.chat([(question, answer)], system, [tokens] * len(some), after))
        grids.append([grid] * len(some))
        shots += some
    return rows, grids, shots, grid


def step_batches(seed: int, step: int, worker: int, chats: Chats, atlas) -> list[dict]:
    """What one worker sees in one step: pictures of one size, short texts, long texts."""
    rng = np.random.default_rng([seed, step, worker])
    sizes, shares = zip(*pictures.PICTURE_SIZES.items())
    size = sizes[int(rng.choice(len(sizes), p=shares))]
    task = "two" if rng.random() < TWO_SHARE else None
    count = PICTURE_CHATS // 2 if task else PICTURE_CHATS
    rows, grids, shots, grid = picture_rows(rng, chats, atlas, count, size, task)
    seen = collate(chats, rows, grids, shots, grid)
    seen["weight"] = seen["weight"] / seen["weight"].sum()
    texts = [chats.chat(text_tasks.draw(rng)[1], some_system(rng)) for _ in range(TEXT_CHATS)]
    texts.sort(key=lambda row: len(row[0]))
    parts = [texts[:12], texts[12:-LONG], texts[-LONG:]]
    batches = [collate(chats, part, [[]] * len(part)) for part in parts]
    total = sum(batch["weight"].sum() for batch in batches)
    for batch in batches:
        batch["weight"] = batch["weight"] / total
    return [seen, *batches]
