"""The official `openai` client and plain HTTP against a server of embeddings: python3 embeddings_client.py BASE REFERENCE

Every function whose name starts with `check_` is one promise. The first that does not hold ends the script with its traceback
and an exit code of 1. REFERENCE is tests/fixtures/minilm_reference.json: what transformers makes of the same texts.
"""

import json
import math
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai

from checks import BASE, refused, run

MODEL = "minilm"
with open(sys.argv[2], encoding="utf-8") as file:
    REFERENCE = json.load(file)["texts"]
TEXTS = [entry["text"] for entry in REFERENCE]
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="unused", max_retries=0, timeout=120)


def embed(given, **more):
    return client.embeddings.create(model=MODEL, input=given, **more)


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def post(path, body, status=200):
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{BASE}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert answer.status == status, answer.status
            return json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        assert error.code == status, f"{error.code}: {text}"
        return json.loads(text)


def check_embeddings_are_those_of_transformers():
    worst = 0.0
    # The client asks for base64 unless it is told otherwise.
    for more in ({}, {"encoding_format": "float"}):
        answer = embed(TEXTS, **more)
        assert [item.index for item in answer.data] == list(range(len(TEXTS))) and answer.model == MODEL
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(e["ids"]) for e in REFERENCE)
        for item, entry in zip(answer.data, REFERENCE):
            assert len(item.embedding) == 384
            worst = max(worst, *(abs(x - y) for x, y in zip(item.embedding, entry["embedding"])))
    print(f"largest difference from transformers: {worst:.2e}")
    assert worst <= 2e-4, worst


def check_similar_sentences_are_nearer():
    cargo, vessel, tokenizer, _ = (item.embedding for item in embed(TEXTS).data)
    near, far = cosine(cargo, vessel), cosine(cargo, tokenizer)
    print(f"similar {near:.3f}, unrelated {far:.3f}")
    assert near > far + 0.3


def check_company_does_not_show():
    alone = [embed(text, encoding_format="float").data[0].embedding for text in TEXTS]
    together = [item.embedding for item in embed(TEXTS * 20, encoding_format="float").data]
    assert together == alone * 20
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: embed(text, encoding_format="float").data[0].embedding, TEXTS * 8)) == alone * 8


def check_ids_and_lists_of_ids():
    by_text = embed(TEXTS[0]).data[0].embedding
    assert embed(REFERENCE[0]["ids"]).data[0].embedding == by_text
    assert embed([REFERENCE[1]["ids"], REFERENCE[0]["ids"]]).data[1].embedding == by_text


def check_dimensions():
    whole, short = embed(TEXTS[0]).data[0].embedding, embed(TEXTS[0], dimensions=64).data[0].embedding
    length = math.sqrt(sum(x * x for x in whole[:64]))
    assert len(short) == 64 and all(abs(x - y / length) < 1e-6 for x, y in zip(short, whole))
    refused(openai.BadRequestError, ["dimensions", "384"], lambda: embed("a", dimensions=385))


def check_what_is_refused():
    refused(openai.BadRequestError, ["tokens", "512", "--batch-max-tokens"], lambda: embed("crate " * 600))
    refused(openai.BadRequestError, ["--max-inputs"], lambda: embed(["a"] * 1025))
    refused(openai.BadRequestError, ["float or base64"], lambda: embed("a", encoding_format="hex"))
    refused(openai.NotFoundError, ["nobody"], lambda: client.embeddings.create(model="nobody", input="a"))
    words = ["makes embeddings only"]
    refused(openai.BadRequestError, words, lambda: client.completions.create(model=MODEL, prompt="a"))
    messages = [{"role": "user", "content": "a"}]
    refused(openai.BadRequestError, words, lambda: client.chat.completions.create(model=MODEL, messages=messages))


def check_rerank():
    documents = [TEXTS[2], {"text": TEXTS[1]}, "crate"]
    answer = post("/v1/rerank", {"model": MODEL, "query": TEXTS[0], "documents": documents})
    scores = [result["relevance_score"] for result in answer["results"]]
    assert answer["results"][0]["index"] == 1 and answer["results"][0]["document"]["text"] == TEXTS[1]
    assert scores == sorted(scores, reverse=True) and len(scores) == 3
    top = post("/v1/rerank", {"query": TEXTS[0], "documents": documents, "top_n": 1, "return_documents": False})
    assert [result["index"] for result in top["results"]] == [1] and "document" not in top["results"][0]


def check_score():
    answer = post("/v1/score", {"model": MODEL, "text_1": TEXTS[0], "text_2": TEXTS})
    expected = [cosine(REFERENCE[0]["embedding"], entry["embedding"]) for entry in REFERENCE]
    found = [item["score"] for item in answer["data"]]
    assert all(abs(x - y) < 2e-4 for x, y in zip(found, expected)), (found, expected)


def check_inputs_are_cut_on_request():
    longest = max(REFERENCE, key=lambda entry: len(entry["ids"]))
    ids = longest["ids"]
    cut = embed(longest["text"], extra_body={"truncate_prompt_tokens": 6})
    # What stands around the text stays, as transformers' truncation has it.
    same = embed(ids[:5] + ids[-1:])
    assert cut.usage.prompt_tokens == 6 and cut.data[0].embedding == same.data[0].embedding
    refused(openai.BadRequestError, ["send fewer token ids"], lambda: embed(ids, extra_body={"truncate_prompt_tokens": 6}))
    endless = " ".join([longest["text"]] * 200)
    refused(openai.BadRequestError, ["more than this server's limit of 512 tokens"], lambda: embed(endless))
    assert embed(endless, extra_body={"truncate_prompt_tokens": -1}).usage.prompt_tokens == 512
    documents = [endless, TEXTS[1]]
    ranked = post("/v1/rerank", {"query": TEXTS[0], "documents": documents, "truncate_prompt_tokens": -1})
    assert len(ranked["results"]) == 2
    # Cohere counts a document's own tokens.
    brief = post("/v2/rerank", {"query": TEXTS[0], "documents": documents, "max_tokens_per_doc": 3})
    short = [embed(entry["ids"][:4] + entry["ids"][-1:]).data[0].embedding for entry in (longest, REFERENCE[1])]
    expected = sorted((cosine(embed(TEXTS[0]).data[0].embedding, one) for one in short), reverse=True)
    assert all(abs(result["relevance_score"] - score) < 1e-6 for result, score in zip(brief["results"], expected)), brief


def check_throughput_is_printed():
    began = time.monotonic()
    answer = embed([f"{text} {i}" for i in range(64) for text in TEXTS])
    seconds = time.monotonic() - began
    tokens = answer.usage.total_tokens
    print(f"{len(answer.data) / seconds:.0f} inputs/s, {tokens / seconds:.0f} tokens/s ({tokens} tokens in {seconds:.2f} s)")


run(globals())
