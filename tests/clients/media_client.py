"""Pictures and videos through an official client: python3 media_client.py BASE REFERENCE openai|anthropic

Every function whose name starts with `check_` is one promise. The first that does not hold ends the script with its traceback
and an exit code of 1. REFERENCE is a fixture's `reference.json`: what transformers makes of the same pictures.
"""

import base64
import json
import struct
import sys
import urllib.error
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor

from checks import BASE, nothing_is_held, refused, run

with open(sys.argv[2], encoding="utf-8") as file:
    REFERENCE = json.load(file)
KIND = sys.argv[3]
if KIND == "openai":
    import openai as package

    client = package.OpenAI(base_url=f"{BASE}/v1", api_key="unused", max_retries=0, timeout=120)
else:
    import anthropic as package

    client = package.Anthropic(base_url=BASE, api_key="unused", max_retries=0, timeout=120)
BAD = package.BadRequestError


def png(width, height, rows):
    """A PNG of 8-bit RGB rows."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: E731
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def picture(seed, frame, height, width):
    """The formula of tools/fixturelib/vision.py."""
    value = lambda y, x, c: ((x * 13 + y * 7 + c * 50 + frame * 31 + seed * 97) ^ (x * y * 3 + seed * 5)) & 255  # noqa: E731
    rows = [bytes(value(y, x, c) for x in range(width) for c in range(3)) for y in range(height)]
    return base64.b64encode(png(width, height, rows)).decode()


def parts_of(case, tail):
    """A reference's pictures and text, as this client sends them."""
    parts = []
    for i, given in enumerate(case["pictures"]):
        size = (given["height"], given["width"])
        if given["frames"]:
            frames = [f"data:image/png;base64,{picture(given['seed'], frame, *size)}" for frame in range(given["frames"])]
            parts.append({"type": "video", "video": frames, "fps": 2 / case["seconds"]})
        else:
            parts.append(image(picture(given["seed"], 0, *size)))
        last = i + 1 == len(case["pictures"])
        parts.append({"type": "text", "text": "Next to it " + (tail if last else "")})
    return parts


def image(data, media_type="image/png"):
    if KIND == "openai":
        return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def ask(content, max_tokens=12, **more):
    extra = {"temperature": 0, **more}
    messages = [{"role": "user", "content": content}]
    if KIND == "openai":
        extra["ignore_eos"] = True
        answer = client.chat.completions.create(model="default", messages=messages, max_tokens=max_tokens, extra_body=extra)
        return answer.choices[0].message.content or "", answer.usage.prompt_tokens, answer
    answer = client.messages.create(model="default", messages=messages, max_tokens=max_tokens, extra_body=extra)
    return "".join(block.text for block in answer.content if block.type == "text"), answer.usage.input_tokens, answer


def post(path, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{BASE}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def tail_of(case):
    """The words at the end of a reference's prompt."""
    text = post("/detokenize", {"tokens": case["ids"]})["prompt"]
    return text.rsplit("Next to it ", 1)[1].split("<|im_end|>")[0]


def usable(case):
    """Whether this API can say what the reference was given: the times of later models' frames are not those of any rate."""
    moving = any(given["frames"] for given in case["pictures"])
    return not moving or (KIND == "openai" and not REFERENCE["model"].startswith("vl-qwen3"))


def pads(ids):
    """The tokens of pictures and videos; those of the fixtures."""
    return [token for token in ids if token in (386, 387)]


def check_prompts_are_those_of_transformers():
    compared = 0
    for case in filter(usable, REFERENCE["cases"]):
        parts = parts_of(case, tail_of(case))
        text, tokens, answer = ask(parts, return_token_ids=True) if KIND == "openai" else ask(parts)
        # The reference's words were tokenized piece by piece: their text is the same, and so are the tokens of its pictures.
        words = post("/detokenize", {"tokens": case["ids"]})["prompt"]
        if KIND == "openai":
            ids = answer.prompt_token_ids
            assert post("/detokenize", {"tokens": ids})["prompt"] == words, case["name"]
            assert pads(ids) == pads(case["ids"]) and len(ids) == tokens, case["name"]
        else:
            counted = client.messages.count_tokens(model="default", messages=[{"role": "user", "content": parts}])
            assert counted.input_tokens == tokens, (counted, tokens)
        assert abs(tokens - len(case["ids"])) <= 4, (case["name"], tokens, len(case["ids"]))
        assert text, case["name"]
        compared += 1
    assert compared >= 2, compared


def check_streams_say_the_same():
    parts = parts_of(REFERENCE["cases"][0], "what is it?")
    whole, _, _ = ask(parts)
    messages = [{"role": "user", "content": parts}]
    if KIND == "openai":
        more = {"temperature": 0, "ignore_eos": True}
        stream = client.chat.completions.create(model="default", messages=messages, max_tokens=12, stream=True, extra_body=more)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    else:
        with client.messages.stream(model="default", messages=messages, max_tokens=12, extra_body={"temperature": 0}) as stream:
            text = "".join(stream.text_stream)
    assert text == whole, (text, whole)


def check_many_at_once_get_their_own_answers():
    contents = [[image(picture(seed, 0, 16 + 8 * (seed % 3), 24)), {"type": "text", "text": "what is it?"}] for seed in range(6)]
    alone = [ask(content)[0] for content in contents]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda i: ask(contents[i % 6])[0], range(36)))
    assert together == [alone[i % 6] for i in range(36)]
    assert len(set(alone)) > 1, "pictures change answers"


def check_every_size_is_taken_and_counted():
    for height, width in [(1, 1), (8, 8), (7, 13), (3, 400), (400, 3), (200, 1), (321, 123)]:
        tokens = ask([image(picture(1, 0, height, width))], max_tokens=1)[1]
        counted = post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture(1, 0, height, width)}}]}]})
        assert tokens == counted["input_tokens"] and tokens > 8, (height, width, tokens, counted)


def check_hostile_pictures_are_refused_by_name():
    good = base64.b64decode(picture(1, 0, 40, 40))
    encode = lambda data: base64.b64encode(data).decode()  # noqa: E731
    announced = lambda width, height: good[:16] + struct.pack(">II", width, height) + good[24:]  # noqa: E731
    zeros = png(30_000, 1, [bytes(90_000)])
    bomb = zeros[:16] + struct.pack(">II", 30_000, 30_000) + zeros[24:]
    cases = [
        (encode(good[:-30]), "cannot be read"),
        (encode(good[:40]), "cannot be read"),
        (encode(announced(0, 40)), "no pixels"),
        (encode(announced(30_000, 30_000)), "--max-decode-pixels"),
        (encode(bomb), "--max-decode-pixels"),
        (encode(png(65_535, 1, [bytes(3 * 65_535)])), "long side"),
        (encode(png(1, 65_535, [bytes(3)] * 65_535)), "long side"),
        (encode(b"GIF89a"), "cannot be read"),
        (encode(b"\xff\xd8\xff\xe0"), "cannot be read"),
        (encode(b"<svg/>"), "PNG, JPEG, GIF and WebP"),
        ("", "PNG, JPEG, GIF and WebP"),
        ("%%%", "base64"),
    ]
    for data, words in cases:
        refused(BAD, [words], lambda: ask([image(data)]))
    refused(BAD, ["`image/svg+xml`"], lambda: ask([image("AAAA", "image/svg+xml")]))
    refused(BAD, ["--max-media-per-request"], lambda: ask([image(picture(1, 0, 8, 8))] * 17))
    assert ask([image(encode(good))])[1] > 8, "and the next is answered"


def check_nothing_is_held_at_the_end():
    nothing_is_held(within=5)


run(globals())
