"""Sounds through the official client: python3 audio_client.py BASE REFERENCE MEDIA

Every function whose name starts with `check_` is one promise. The first that does not hold ends the script with its traceback
and an exit code of 1. REFERENCE is the `reference.json` of a fixture that hears: what transformers makes of the same sounds. MEDIA is
the folder with a chord in every format.
"""

import base64
import json
import os
import struct
import sys
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor

import openai

from checks import BASE, run

with open(sys.argv[2], encoding="utf-8") as file:
    REFERENCE = json.load(file)
MEDIA = sys.argv[3]
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="unused", max_retries=0, timeout=120)


def sound(seed, samples):
    """The formula of tools/fixturelib/omni.py."""
    value = lambda i: (i * (i // 37 + 40 + seed)) % 16_001 - 8_000 + (i * 911 + (i // 800) * seed * 733) % 4_001 - 2_000  # noqa: E731
    return b"".join(struct.pack("<h", value(i)) for i in range(samples))


def wav(data, rate=16_000, channels=1, claimed=None):
    head = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    size = len(data) if claimed is None else claimed
    return b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt \x10\0\0\0" + head + b"data" + struct.pack("<I", size) + data


def audio(data, form="wav"):
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}


def picture(seed, frame, height, width):
    """A PNG by the formula of tools/fixturelib/vision.py."""
    value = lambda y, x, c: ((x * 13 + y * 7 + c * 50 + frame * 31 + seed * 97) ^ (x * y * 3 + seed * 5)) & 255  # noqa: E731
    rows = b"".join(b"\0" + bytes(value(y, x, c) for x in range(width) for c in range(3)) for y in range(height))
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: E731
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def part(item, seconds):
    if item["kind"] == "sound":
        return audio(wav(sound(item["seed"], item["samples"])))
    size = (item["height"], item["width"])
    if item["kind"] == "video":
        frames = [picture(item["seed"], frame, *size) for frame in range(item["frames"])]
        return {"type": "video", "video": frames, "fps": 2 / seconds}
    return {"type": "image_url", "image_url": {"url": picture(item["seed"], 0, *size)}}


def ask(content, max_tokens=12, **more):
    messages = [{"role": "user", "content": content}]
    extra = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    return client.chat.completions.create(model="default", messages=messages, max_tokens=max_tokens, extra_body=extra)


def text(answer):
    return answer.choices[0].message.content or ""


def words(ids):
    request = urllib.request.Request(
        f"{BASE}/detokenize", json.dumps({"tokens": ids}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["prompt"]


def refused(content, *expected):
    try:
        ask(content, max_tokens=1)
    except openai.BadRequestError as error:
        for word in expected:
            assert word in str(error), (word, str(error))
        return
    raise AssertionError(f"taken: {expected}")


def check_answers_are_those_of_transformers():
    same = 0
    for case in REFERENCE["cases"]:
        # An audio track comes in a video file, which --ffmpeg decodes.
        if any("of_video" in item for item in case["items"]):
            continue
        prompt = words(case["ids"])
        tail = prompt.rsplit("Next to it ", 1)[1].split("<|im_end|>")[0]
        parts = []
        for i, item in enumerate(case["items"]):
            parts.append(part(item, case["seconds"]))
            last = i + 1 == len(case["items"])
            parts.append({"type": "text", "text": "Next to it " + (tail if last else "")})
        answer = ask(parts)
        assert words(answer.prompt_token_ids) == prompt, case["name"]
        pads = lambda ids: [token for token in ids if token in (386, 387, 390)]  # noqa: E731
        assert pads(answer.prompt_token_ids) == pads(case["ids"]), case["name"]
        # The reference's words were tokenized piece by piece; where that is the same, so is the answer.
        if answer.prompt_token_ids == case["ids"]:
            said = answer.choices[0].token_ids
            assert said == case["greedy"], (case["name"], said, case["greedy"])
            same += 1
    assert same >= 1, "one of them is tokenized alike"


def check_every_format_is_heard():
    counts = {}
    for name, form in [("chord.wav", "wav"), ("chord_float.wav", "wav"), ("chord.flac", "flac"), ("chord.ogg", "ogg"), ("chord.mp3", "mp3")]:
        with open(os.path.join(MEDIA, name), "rb") as file:
            data = file.read()
        answer = ask([audio(data, form)])
        counts[name] = answer.prompt_token_ids.count(390)
        url = {"type": "audio_url", "audio_url": {"url": f"data:audio/{form};base64," + base64.b64encode(data).decode()}}
        assert text(ask([url])) == text(answer), name
    # A fifth of a second; an MP3 has what its encoder puts around it, too.
    assert counts["chord.wav"] == counts["chord_float.wav"] == counts["chord.flac"] == counts["chord.ogg"] == 3, counts
    assert 3 <= counts["chord.mp3"] <= 5, counts


def check_other_rates_and_channels_are_the_same_sound():
    mono = sound(3, 16_000)
    both = b"".join(mono[i:i + 2] * 2 for i in range(0, len(mono), 2))
    assert text(ask([audio(wav(mono))])) == text(ask([audio(wav(both, channels=2))]))
    for rate in (8_000, 44_100, 48_000):
        assert ask([audio(wav(sound(3, rate), rate))], max_tokens=1).prompt_token_ids.count(390) == 13, rate


def check_streams_say_the_same():
    messages = [{"role": "user", "content": [audio(wav(sound(1, 20_000))), {"type": "text", "text": "what is it?"}]}]
    more = {"temperature": 0, "ignore_eos": True}
    stream = client.chat.completions.create(model="default", messages=messages, max_tokens=12, stream=True, extra_body=more)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert streamed == text(ask(messages[0]["content"]))


def check_responses_hear_and_remember():
    said = {"type": "input_audio", "input_audio": audio(wav(sound(2, 20_000)))["input_audio"]}
    message = {"role": "user", "content": [said, {"type": "input_text", "text": "what is it?"}]}
    first = client.responses.create(model="default", input=[message], max_output_tokens=8, temperature=0)
    # The client's own type of it warns about parts that it does not know.
    with urllib.request.urlopen(f"{BASE}/v1/responses/{first.id}/input_items", timeout=120) as items:
        kept = json.load(items)["data"][0]["content"][0]
    assert kept["type"] == "input_audio" and kept["input_audio"] == said["input_audio"], kept
    more = client.responses.create(model="default", input="And?", previous_response_id=first.id, max_output_tokens=8, temperature=0)
    assert more.usage.input_tokens > first.usage.input_tokens


def check_many_at_once_get_their_own_answers():
    contents = [[audio(wav(sound(seed, 9_000 + 7_000 * (seed % 3)))), {"type": "text", "text": "what is it?"}] for seed in range(5)]
    contents.append([{"type": "image_url", "image_url": {"url": picture(1, 0, 16, 24)}}, {"type": "text", "text": "what is it?"}])
    alone = [text(ask(content)) for content in contents]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda i: text(ask(contents[i % 6])), range(36)))
    assert together == [alone[i % 6] for i in range(36)]
    assert len(set(alone)) > 2, "sounds change answers"


def check_transcriptions_say_what_chat_says():
    data = wav(sound(4, 30_000))
    more = {"extra_body": {"max_tokens": 10}}
    instruction = {"type": "text", "text": "Transcribe the German audio into text."}
    system = {"role": "system", "content": "Plimsoll"}
    chat = client.chat.completions.create(
        model="default", messages=[system, {"role": "user", "content": [audio(data), instruction]}], max_tokens=10, temperature=0
    )
    file = ("speech.wav", data, "audio/wav")
    transcribe = lambda **given: client.audio.transcriptions.create(  # noqa: E731
        model="default", file=file, language="de", prompt="Plimsoll", **more, **given
    )
    whole = transcribe()
    assert whole.text == text(chat), (whole.text, text(chat))
    assert whole.usage.type == "tokens" and whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.usage.input_token_details.audio_tokens == 24, whole.usage
    assert transcribe(response_format="text").rstrip("\n") == whole.text.rstrip("\n")
    verbose = transcribe(response_format="verbose_json")
    assert (verbose.text, verbose.language, verbose.duration) == (whole.text, "german", 1.87), verbose
    events = list(transcribe(stream=True))
    assert events[-1].type == "transcript.text.done" and events[-1].text == whole.text, events[-1]
    assert "".join(event.delta for event in events[:-1]) == whole.text
    for given, word in [({"response_format": "srt"}, "supported are json, text and verbose_json"), ({"timestamp_granularities": ["word"]}, "no times")]:
        try:
            transcribe(**given)
        except openai.BadRequestError as error:
            assert word in str(error), error
        else:
            raise AssertionError(f"taken: {given}")
    try:
        client.audio.transcriptions.create(model="default", file=("a.wav", wav(b"\0" * (2 * 8_000 * 21), rate=8_000)))
    except openai.BadRequestError as error:
        assert "--max-audio-seconds" in str(error), error
    else:
        raise AssertionError("21 seconds are taken")


def check_hostile_sounds_are_refused():
    second = sound(1, 16_000)
    with open(os.path.join(MEDIA, "chord.flac"), "rb") as file:
        flac = file.read()
    hours = flac[:21] + bytes([flac[21] | 0x0F]) + flac[22:]
    for data, expected in [
        (wav(b""), "it holds no samples"),
        (wav(second[:300]), "too few to transform"),
        (wav(second[:1000], claimed=10 * 3600 * 32_000), "it is cut off"),
        (wav(second)[:-9_000], "it is cut off"),
        (flac[: len(flac) // 2], "cannot be read"),
        (hours, "(--max-audio-seconds)"),
        (wav(b"\0" * (2 * 8_000 * 21), rate=8_000), "an audio clip has 21 seconds; the limit is 20 (--max-audio-seconds)"),
        (wav(second, rate=1_000), "less than 8000 Hz"),
        (wav(second, channels=20), "20 channels"),
        (b"", "format that is not supported"),
        (b"RIFF", "format that is not supported"),
        (b"ID3" + b"\xff" * 5_000, "an audio clip"),
        (b"%PDF-1.7 and so on", "supported are WAV, FLAC, MP3 and Ogg Vorbis"),
        (wav(b"\0" * 3_000_000, rate=192_000), "(--max-audio-bytes)"),
    ]:
        refused([audio(data)], expected)
    with open(os.path.join(MEDIA, "opus.ogg"), "rb") as file:
        refused([audio(file.read(), "ogg")], "supported are WAV, FLAC, MP3 and Ogg Vorbis")
    refused([audio(second, "midi")], "known are wav, mp3, flac, ogg, aac")
    refused([{"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}], "this is not base64")
    refused([{"type": "audio_url", "audio_url": {"url": "data:video/mp4;base64,AAAA"}}], "supported are WAV")
    refused([{"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}], "--media-root")
    refused([{"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:1/a.wav"}}], "--media-fetch")
    # And the server goes on.
    assert text(ask([audio(wav(second))]))


def check_placeholders_that_clients_write_are_text():
    answer = ask([{"type": "text", "text": "<|audio_pad|>"}], max_tokens=1)
    assert 390 not in answer.prompt_token_ids, answer.prompt_token_ids


run(globals())
