"""The official `ollama` client against a running Plimsoll server: python3 ollama_client.py http://127.0.0.1:PORT

Every function whose name starts with `check_` is one promise. The first that does not hold ends the script with its traceback and an
exit code of 1. A second argument is the address of a server with an embedding model.
"""

import asyncio
import datetime
import json
import sys

import ollama

from checks import BASE, nothing_is_held, refused, run

MODEL = "smollm2"
client = ollama.Client(host=BASE)
GREEDY = {"temperature": 0, "num_predict": 48}
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The city's name.
    """
    return f"Sunny in {city}."


def check_list_show_and_ps():
    models = client.list().models
    assert [model.model for model in models] == [f"{MODEL}:latest"], models
    (model,) = models
    assert model.modified_at < datetime.datetime.now(datetime.timezone.utc) and model.size > 50_000_000
    assert model.details.family == "llama" and model.details.parameter_size.endswith("M"), model.details
    shown = client.show(model.model)
    assert {"completion", "tools"} <= set(shown.capabilities) and "vision" not in shown.capabilities
    assert shown.modelinfo["general.architecture"] == "llama" and shown.modelinfo["llama.context_length"] == 2048
    assert shown.details.quantization_level == "Q4_1" and "<|im_start|>" in shown.template
    (running,) = client.ps().models
    assert running.name == model.model and running.size_vram == 0 and running.context_length == 2048
    assert running.expires_at.year == 9999


def check_chat():
    answer = client.chat(MODEL, CAPITAL, options=GREEDY)
    assert "Paris" in answer.message.content and answer.message.role == "assistant", answer
    assert answer.done and answer.done_reason == "stop" and answer.model == MODEL
    assert answer.eval_count > 0 and answer.prompt_eval_count > 0
    parts = answer.load_duration + answer.prompt_eval_duration + answer.eval_duration
    assert answer.total_duration >= parts > 0
    assert client.chat(f"{MODEL}:latest", CAPITAL, options=GREEDY).message.content == answer.message.content


def check_chat_stream():
    whole = client.chat(MODEL, CAPITAL, options=GREEDY)
    parts = list(client.chat(MODEL, CAPITAL, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True] and len(parts) > 3
    assert parts[-1].done_reason == whole.done_reason and parts[-1].eval_count == whole.eval_count


def check_tools_and_their_results():
    messages = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
    answer = client.chat(MODEL, messages, tools=[get_weather], options={**GREEDY, "num_predict": 96})
    streamed = list(client.chat(MODEL, messages, tools=[get_weather], options={**GREEDY, "num_predict": 96}, stream=True))
    calls = [call for part in streamed for call in part.message.tool_calls or []]
    same = [(call.function.name, dict(call.function.arguments)) for call in answer.message.tool_calls or []]
    assert [(call.function.name, dict(call.function.arguments)) for call in calls] == same
    # Whatever the model made of it: a call and its result are told back.
    call = ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(name="get_weather", arguments={"city": "Paris"}))
    messages += [
        ollama.Message(role="assistant", content="", tool_calls=[call]),
        ollama.Message(role="tool", tool_name="get_weather", content=get_weather("Paris")),
    ]
    told = client.chat(MODEL, messages, tools=[get_weather], options=GREEDY)
    assert told.done and told.prompt_eval_count > answer.prompt_eval_count


def check_format():
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "people": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    answer = client.chat(MODEL, CAPITAL, format=schema, options=GREEDY)
    value = json.loads(answer.message.content)
    assert value["city"] in ["Paris", "Rome"] and 1 <= value["people"] <= 99
    answer = client.generate(MODEL, "A JSON object with one number.", format="json", options={**GREEDY, "num_predict": 200})
    assert answer.done_reason == "length" or isinstance(json.loads(answer.response), dict)


def check_generate():
    answer = client.generate(MODEL, "What is the capital of France?", system="Answer in one word.", options=GREEDY)
    assert answer.response and answer.done and answer.eval_count > 0
    raw = client.generate(MODEL, "The capital of France is", raw=True, options={**GREEDY, "num_predict": 8})
    assert "Paris" in raw.response and raw.done_reason == "length" and raw.eval_count == 8
    parts = client.generate(MODEL, "The capital of France is", raw=True, options={**GREEDY, "num_predict": 8}, stream=True)
    assert "".join(part.response for part in parts) == raw.response
    assert client.generate(MODEL).done_reason == "load"


def check_options():
    def sample(seed):
        options = {"temperature": 1.0, "seed": seed, "num_predict": 16, "num_ctx": 512, "num_thread": 2, "top_k": 40}
        return client.generate(MODEL, "Once upon a time", raw=True, options=options).response

    assert sample(3) == sample(3) != sample(4)
    free = client.generate(MODEL, "One, two, three, four,", raw=True, options=GREEDY).response
    word = free.split()[2]
    cut = client.generate(MODEL, "One, two, three, four,", raw=True, options={**GREEDY, "stop": [word]})
    assert cut.response == free[: free.index(word)] and cut.done_reason == "stop"


def check_logprobs():
    answer = client.generate(MODEL, "The capital of France is", raw=True, logprobs=True, top_logprobs=2, options={**GREEDY, "num_predict": 3})
    assert len(answer.logprobs) == 3 and all(len(token.top_logprobs) == 2 for token in answer.logprobs)
    assert all(abs(token.logprob - token.top_logprobs[0].logprob) < 1e-3 for token in answer.logprobs), "greedy tokens are the likeliest"


def check_pull_and_delete():
    assert client.pull(MODEL).status == "success"
    assert [part.status for part in client.pull(MODEL, stream=True)][-1] == "success"
    assert refused(ollama.ResponseError, ["llama3", MODEL], lambda: client.pull("llama3")).status_code == 404
    assert refused(ollama.ResponseError, ["deletes no models"], lambda: client.delete(MODEL)).status_code == 400


def check_errors():
    assert refused(ollama.ResponseError, ["gpt-4"], lambda: client.chat("gpt-4", CAPITAL)).status_code == 404
    wrong = {"temperature": -1.0}
    error = refused(ollama.ResponseError, ["temperature"], lambda: client.chat(MODEL, CAPITAL, options=wrong))
    assert error.status_code == 400
    refused(ollama.ResponseError, ["suffix"], lambda: client.generate(MODEL, "def f(", suffix="return 1"))
    refused(ollama.ResponseError, ["template"], lambda: client.generate(MODEL, "x", template="{{ .Prompt }}"))
    refused(ollama.ResponseError, ["--pooling"], lambda: client.embed(MODEL, "x"))
    # The first piece of a stream is the error.
    refused(ollama.ResponseError, ["gpt-4"], lambda: next(client.chat("gpt-4", CAPITAL, stream=True)))


def check_the_async_client_and_a_broken_off_stream():
    async def first_words():
        stream = await ollama.AsyncClient(host=BASE).generate(MODEL, "Once upon a time", raw=True, stream=True)
        part = await anext(stream)
        # Without this the client keeps its connection open, and the server goes on.
        await stream.aclose()
        return part.response

    assert asyncio.run(first_words())
    nothing_is_held(10)


def check_the_calls_of_home_assistant():
    """As its integration of 2026.11 makes them: plain tools, a num_ctx, no end of keep_alive, results without a name."""
    parameters = {"type": "object", "properties": {"name": {"type": "string"}}, "required": []}
    function = {"name": "HassTurnOn", "description": "Turns on a device", "parameters": parameters}
    tools, options = [{"type": "function", "function": function}], {"num_ctx": 2048, "num_predict": 48}
    call = ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(name="HassTurnOn", arguments={"name": "lamp"}))
    said = [ollama.Message(role="system", content="You control a house."), ollama.Message(role="user", content="Turn on the lamp.")]
    result = ollama.Message(role="tool", content='{"data": {"success": ["lamp"]}, "error": null}')
    later = [*said, ollama.Message(role="assistant", content="", tool_calls=[call]), result]

    async def converse(messages, think):
        client = ollama.AsyncClient(host=BASE)
        asked = {"tools": tools, "stream": True, "keep_alive": -1, "options": options, "think": think, "format": None}
        *_, last = [part async for part in await client.chat(model=MODEL, messages=messages, **asked)]
        assert last.done and last.done_reason in ("stop", "length"), last

    for messages in [said, later]:
        for think in [None, False]:
            asyncio.run(converse(messages, think))


def check_embeddings():
    if len(sys.argv) < 3:
        return
    embedder = ollama.Client(host=sys.argv[2])
    (model,) = embedder.list().models
    assert embedder.show(model.model).capabilities == ["embedding"]
    answer = embedder.embed(model.model, ["a ship", "a boat", "tax law"])
    assert answer.prompt_eval_count > 3 and answer.total_duration > 0
    ship, boat, law = answer.embeddings
    dot = lambda a, b: sum(x * y for x, y in zip(a, b))
    assert abs(dot(ship, ship) - 1) < 1e-4 and dot(ship, boat) > dot(ship, law)
    (alone,) = embedder.embed(model.model, "a ship").embeddings
    older = embedder.embeddings(model.model, "a ship").embedding
    assert all(abs(a - b) < 1e-5 for a, b in zip(alone, ship)) and len(older) == len(ship)


run(globals())
