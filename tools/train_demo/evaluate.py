#!/usr/bin/env python3
"""Asks a server that runs the demo model held-out questions and says how many it answers rightly.

    plimsoll serve demo --enable-mtp
    evaluate.py http://127.0.0.1:8000 --count 200

Pictures go as PNG data URLs, of styles and numbers that training never saw; sums are of pairs that it never saw. Greedy. The share
of accepted drafts comes from the answers' `usage`. Needs numpy and Pillow.
"""

import argparse
import base64
import io
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image

import pictures
import text_tasks

SEED = 41
TOKENS_MAX = 96


def data_url(picture: np.ndarray) -> str:
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def asked(rng, task: str, atlas) -> tuple[list[dict], str, bool]:
    """Messages, the right answer, whether the model is to think."""
    if task in pictures.TASKS:
        some, question, answer = pictures.TASKS[task][0](rng, atlas, (64, 64), True)
        parts = [{"type": "image_url", "image_url": {"url": data_url(p)}} for p in some]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}], answer, False
    *before, (question, *thinking, answer) = text_tasks.TASKS[task][0](rng, kept=True)
    messages = []
    for said, *_, reply in before:
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]
    return [*messages, {"role": "user", "content": question}], answer, bool(thinking)


def ask(base: str, model: str, messages: list[dict], think: bool) -> dict:
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": TOKENS_MAX}
    if think:
        body["chat_template_kwargs"] = {"enable_thinking": True}
    request = urllib.request.Request(f"{base}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="such as http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--count", type=int, default=200, help="questions of each task")
    parser.add_argument("--tasks", nargs="*", default=[*pictures.TASKS, *text_tasks.TASKS])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--wrong", type=int, default=0, help="show so many wrong answers of each task")
    args = parser.parse_args()
    rng, atlas, found = np.random.default_rng(SEED), pictures.Atlas(SEED), {}
    drafted = accepted = tokens = 0
    started = time.monotonic()
    for task in args.tasks:
        questions = [asked(rng, task, atlas) for _ in range(args.count)]
        with ThreadPoolExecutor(args.streams) as pool:
            answers = list(pool.map(lambda q: ask(args.base, args.model, q[0], q[2]), questions))
        right, wrong = 0, []
        for (messages, expected, _), answer in zip(questions, answers):
            text = answer["choices"][0]["message"]["content"] or ""
            right += text.strip() == expected
            if text.strip() != expected:
                wrong.append((messages[-1]["content"] if isinstance(messages[-1]["content"], str) else task, expected, text))
            speculation = answer["usage"].get("speculation") or {"drafted": 0, "accepted": 0}
            drafted, accepted = drafted + speculation["drafted"], accepted + speculation["accepted"]
            tokens += answer["usage"]["completion_tokens"]
        found[task] = right / args.count
        for question, expected, text in wrong[: args.wrong]:
            print(f"  {question!r}: {text!r}, not {expected!r}")
        print(f"{task:10} {found[task]:7.1%}", flush=True)
    print(json.dumps({
        "tasks": found, "questions": args.count * len(args.tasks), "seconds": round(time.monotonic() - started, 1), "tokens": tokens,
        "drafted": drafted, "accepted": accepted, "acceptance": round(accepted / drafted, 3) if drafted else None,
    }))


if __name__ == "__main__":
    main()
