"""The official `anthropic` client against a running Plimsoll server: python3 anthropic_client.py http://127.0.0.1:PORT

Every function whose name starts with `check_` is one promise. The first that does not hold ends the script with its
traceback and an exit code of 1.
"""

import json
import typing
import urllib.request

import anthropic
from anthropic.types import message_count_tokens_params, message_create_params

from checks import BASE, nothing_is_held, refused, run

MODEL = "smollm2"
client = anthropic.Anthropic(base_url=BASE, api_key="unused", max_retries=0, timeout=120)
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TIME = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


# Fields of the API that this release of the client sends only when asked to.
EXTRA = ("temperature", "top_k", "top_p", "seed")


def asked(messages, more):
    extra = {**more.pop("extra_body", {}), **{name: more.pop(name) for name in EXTRA if name in more}}
    return {"model": MODEL, "messages": messages, "max_tokens": 96, "extra_body": extra, **more}


def create(messages=CAPITAL, **more):
    return client.messages.create(**asked(messages, more))


def stream(messages=CAPITAL, **more):
    return client.messages.stream(**asked(messages, more))


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def check_create():
    message = create(seed=1, temperature=0)
    assert message.id.startswith("msg_") and message.type == "message" and message.role == "assistant"
    assert message.model == MODEL and "Paris" in text_of(message) and message.stop_reason == "end_turn", message
    assert message.stop_sequence is None and message.usage.input_tokens > 20 and message.usage.output_tokens > 3
    assert message._request_id.startswith("req-"), "the client finds the request's id"
    body = json.dumps({"model": MODEL, "messages": CAPITAL, "max_tokens": 96, "temperature": 0}).encode()
    chat = urllib.request.Request(f"{BASE}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(chat) as answer:
        answer = json.load(answer)
    assert answer["choices"][0]["message"]["content"] == text_of(message), "a reply is the same at either endpoint"
    assert answer["usage"]["prompt_tokens"] == message.usage.input_tokens


def check_system_and_blocks():
    blocks = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}]
    assert text_of(create(blocks, temperature=0)) == text_of(create(temperature=0)), "text blocks are text"
    plain, told = create(temperature=0), create(temperature=0, system=[{"type": "text", "text": "Answer in one word."}])
    assert plain.usage.input_tokens != told.usage.input_tokens
    as_text = create(temperature=0, system="Answer in one word.")
    assert text_of(told) == text_of(as_text) and told.usage.input_tokens == as_text.usage.input_tokens
    talk = [*CAPITAL, {"role": "assistant", "content": text_of(plain)}, {"role": "user", "content": "And of Italy?"}]
    assert "Rome" in text_of(create(talk, temperature=0))


def check_stream():
    whole = create(temperature=0)
    with stream(temperature=0) as pieces:
        text = "".join(pieces.text_stream)
        final = pieces.get_final_message()
    assert text == text_of(whole) == text_of(final)
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens == whole.usage.input_tokens
    events = [event.type for event in create(temperature=0, stream=True)]
    assert events[0] == "message_start" and events[-2:] == ["message_delta", "message_stop"], events
    assert events.count("content_block_start") == events.count("content_block_stop") == 1


def check_stop_and_length():
    free = text_of(create(temperature=0))
    word = free.split()[2]
    message = create(temperature=0, stop_sequences=[word, "never said"])
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == word
    assert text_of(message) == free[: free.index(word)]
    message = create(temperature=0, max_tokens=3)
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 3
    message = create(temperature=0, max_tokens=1_000_000)
    assert message.stop_reason == "end_turn" and text_of(message) == free, "more than the context has is as much as it has"


def check_sampling():
    greedy = text_of(create(temperature=0))
    assert text_of(create(temperature=1.0, top_k=1)) == greedy, "of one candidate, the best is taken"
    assert text_of(create(temperature=1.0, top_p=1e-6)) == greedy
    story = [{"role": "user", "content": "Tell me a story."}]
    assert len({text_of(create(story, temperature=1.0)) for _ in range(3)}) == 3


def call_of(message, name):
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use" and call.name == name and call.id.startswith("toolu_"), message
    return call


def check_tools_round_trip():
    named = {"type": "tool", "name": "get_weather"}
    for sampling in [{"temperature": 0}, {"temperature": 1.5, "seed": 4}]:
        message = create(ASK, tools=[WEATHER, TIME], tool_choice=named, max_tokens=200, **sampling)
        call = call_of(message, "get_weather")
        assert set(call.input) == {"city", "days"} and 1 <= call.input["days"] <= 9, call
    history = [*ASK, {"role": "assistant", "content": message.content}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny, 21 degrees."}]}
    history.append({"role": "user", "content": [result, {"type": "text", "text": "So?"}]})
    answer = create(history, tools=[WEATHER], max_tokens=24, temperature=0)
    assert answer.role == "assistant" and answer.usage.input_tokens > 60
    refused(anthropic.BadRequestError, ["no tool_use"], lambda: create(history[2:], tools=[WEATHER]))
    choice = {"type": "any", "disable_parallel_tool_use": True}
    whole = create(ASK, tools=[WEATHER, TIME], tool_choice=choice, max_tokens=200, temperature=0)
    (call,) = [block for block in whole.content if block.type == "tool_use"]
    with stream(ASK, tools=[WEATHER, TIME], tool_choice=choice, max_tokens=200, temperature=0) as pieces:
        streamed = pieces.get_final_message()
    same = call_of(streamed, call.name)
    assert same.input == call.input and streamed.usage == whole.usage


def check_prefill():
    whole = text_of(create(temperature=0, max_tokens=24))
    begun = whole[: whole.index(" ", len(whole) // 2)]
    rest = text_of(create([*CAPITAL, {"role": "assistant", "content": begun}], temperature=0, max_tokens=24))
    # Of the same words: what is computed as a prompt and token by token may round differently further on.
    assert rest.split()[0] == whole[len(begun) :].split()[0], (whole, begun, rest)


def check_count_tokens():
    for more in [{}, {"system": "Be kind."}, {"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": {"type": "none"}}]:
        counted = client.messages.count_tokens(model=MODEL, messages=CAPITAL, **more).input_tokens
        used = create(max_tokens=1, **more).usage
        assert counted == used.input_tokens, (more, counted, used)
    marked = [{"role": "user", "content": [{"type": "text", "text": "Once upon a time. " * 30, "cache_control": {"type": "ephemeral"}}]}]
    counted = client.messages.count_tokens(model=MODEL, messages=marked).input_tokens
    create(marked, max_tokens=1)
    usage = create(marked, max_tokens=1).usage
    assert usage.cache_read_input_tokens > 0 and usage.input_tokens + usage.cache_read_input_tokens == counted, usage


def check_structured_output():
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"], "additionalProperties": False}
    message = create(temperature=0, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert set(json.loads(text_of(message))) == {"city"}, message


def check_errors():
    bad = anthropic.BadRequestError
    error = refused(bad, ["max_tokens"], lambda: create(max_tokens=0))
    assert error.type == "invalid_request_error" and error.body["request_id"] == error.request_id, error.body
    refused(bad, ["temperature"], lambda: create(temperature=-1))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    refused(bad, ["images"], lambda: create([{"role": "user", "content": [image]}]))
    refused(bad, ["below max_tokens"], lambda: create(max_tokens=50, thinking={"type": "enabled", "budget_tokens": 50}))
    refused(bad, ["2048"], lambda: create([{"role": "user", "content": "word " * 3000}]))
    refused(bad, ["no_such_field"], lambda: create(extra_body={"no_such_field": 1}))
    refused(bad, ["custom"], lambda: create(tools=[{"type": "bash_20250124", "name": "bash"}]))
    error = refused(anthropic.NotFoundError, ["claude"], lambda: client.messages.create(model="claude", messages=CAPITAL, max_tokens=5))
    assert error.type == "not_found_error"
    error = refused(anthropic.ContentTooLargeError, ["8388608"], lambda: create([{"role": "user", "content": "x" * 9_000_000}]))
    assert error.type == "request_too_large"
    refused(bad, ["temperature"], lambda: list(create(temperature=-1, stream=True)))
    models = client.models.list()
    assert models.data[0].id == models.data[0].display_name == MODEL and not models.has_more, models
    assert client.models.retrieve(MODEL).created_at.year > 2000


# A value for every field of the client's types that is not what the server does by itself: it must have an effect that
# the checks above have seen, or be refused by its name.
WORKS = {"max_tokens", "messages", "model", "stream", "stop_sequences", "system", "temperature", "top_k", "top_p", "tools", "tool_choice", "cache_control"}
WORKS |= {"metadata", "thinking"}
REFUSED = {
    "container": {"id": "x"},
    "diagnostics": {"previous_message_id": "x"},
    "inference_geo": "eu",
    "output_config": {"effort": "most"},
    "service_tier": "priority",
    "speed": "fast",
    "user_profile_id": "x",
    "workspace_id": "x",
}


def check_every_field():
    fields = set(typing.get_type_hints(message_create_params.MessageCreateParamsStreaming))
    assert fields | {"temperature", "top_k", "top_p"} == WORKS | set(REFUSED), fields ^ (WORKS | set(REFUSED))
    for name, value in REFUSED.items():
        refused(anthropic.BadRequestError, [name], lambda: create(extra_body={name: value}))
    create(max_tokens=1, metadata={"user_id": "ann"}, thinking={"type": "disabled"}, cache_control={"type": "ephemeral"})
    # A model without thoughts keeps within any budget of them, and makes any effort.
    create(max_tokens=60, thinking={"type": "enabled", "budget_tokens": 50}, output_config={"effort": "max"})
    counted = set(typing.get_type_hints(message_count_tokens_params.MessageCountTokensParams))
    assert counted <= WORKS | set(REFUSED), counted
    for name in sorted(counted & set(REFUSED)):
        count = lambda: client.messages.count_tokens(model=MODEL, messages=CAPITAL, extra_body={name: REFUSED[name]})
        refused(anthropic.BadRequestError, [name], count)


def check_a_client_that_leaves():
    events = create([{"role": "user", "content": "Count to one thousand."}], max_tokens=1900, stream=True)
    for _ in zip(range(5), events):
        pass
    events.close()
    # Far from enough time for all that it asked for.
    nothing_is_held(within=5)


run(globals())
