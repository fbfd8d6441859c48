"""The official `openai` client's Responses API against a running Plimsoll server: python3 responses_client.py http://127.0.0.1:PORT

Every function whose name starts with `check_` is one promise. The first that does not hold ends the script with its
traceback and an exit code of 1.
"""

import json
import re
import threading
import time
import typing

import openai
import pydantic
from openai.types.responses import response_create_params

from checks import BASE, gauge, nothing_is_held, refused, run

MODEL = "smollm2"
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="unused", max_retries=0, timeout=120)
CAPITAL = "What is the capital of France?"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}
TIME = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}, "strict": False}
ASK = "What is the weather in Paris?"


def create(said=CAPITAL, **more):
    return client.responses.create(model=MODEL, input=said, **{"max_output_tokens": 96, "temperature": 0, **more})


def check_create():
    response = create(metadata={"a": "b"}, instructions=None)
    assert response.id.startswith("resp_") and response.object == "response" and response.status == "completed"
    (item,) = response.output
    assert item.type == "message" and item.role == "assistant" and item.status == "completed"
    assert "Paris" in response.output_text and response.metadata == {"a": "b"} and response.model == MODEL
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": CAPITAL}], max_tokens=96, temperature=0)
    assert answer.choices[0].message.content == response.output_text, "a reply is the same at either endpoint"
    assert answer.usage.prompt_tokens == response.usage.input_tokens
    parts = [{"role": "user", "content": [{"type": "input_text", "text": CAPITAL}]}]
    assert create(parts).output_text == response.output_text
    told = create(instructions="Answer in one word.")
    assert told.instructions == "Answer in one word." and told.usage.input_tokens != response.usage.input_tokens


def check_stream():
    whole = create()
    events = list(create(stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed", kinds
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text and events[-1].response.usage.output_tokens == whole.usage.output_tokens
    with client.responses.stream(model=MODEL, input=CAPITAL, max_output_tokens=96, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == whole.output_text


def check_length_and_sampling():
    response = create(max_output_tokens=3)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 3
    assert create(top_p=1e-6, temperature=1.0).output_text == create().output_text
    logprobs = create(max_output_tokens=4, include=["message.output_text.logprobs"], top_logprobs=3).output[0].content[0].logprobs
    assert len(logprobs) == 4 and all(len(token.top_logprobs) == 3 for token in logprobs)


def check_tools_round_trip():
    named = {"type": "function", "name": "get_weather"}
    response = create(ASK, tools=[WEATHER, TIME], tool_choice=named, max_output_tokens=200)
    (call,) = response.output
    arguments = json.loads(call.arguments)
    assert call.type == "function_call" and call.name == "get_weather" and 1 <= arguments["days"] <= 9, call
    assert response.tools[0].name == "get_weather" and response.tool_choice.name == "get_weather"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 degrees."}
    kept = create([result], previous_response_id=response.id, tools=[WEATHER], max_output_tokens=24)
    told = create([{"role": "user", "content": ASK}, *response.output, result], tools=[WEATHER], max_output_tokens=24)
    assert kept.output_text == told.output_text and kept.usage.input_tokens == told.usage.input_tokens, "kept or told, it is one conversation"
    refused(openai.BadRequestError, [call.call_id], lambda: create([result], tools=[WEATHER]))
    whole = create(ASK, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False, max_output_tokens=200)
    events = list(create(ASK, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False, max_output_tokens=200, stream=True))
    pieces = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert pieces == done.arguments == whole.output[0].arguments


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    size: int = pydantic.Field(ge=0, le=99)


def check_structured_output():
    parsed = client.responses.parse(model=MODEL, input="Name a city.", text_format=City, max_output_tokens=100, temperature=1.0)
    assert isinstance(parsed.output_parsed, City), parsed
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    response = create(text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}})
    assert set(json.loads(response.output_text)) == {"a"} and response.text.format.name == "x"


def check_calls_or_a_form():
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    kinds = set()
    for seed in range(6):
        response = create(ASK, tools=[WEATHER], text=form, temperature=1.5, max_output_tokens=120, extra_body={"seed": seed})
        for item in response.output if response.status == "completed" else []:
            kinds.add(item.type)
            said = json.loads(item.arguments if item.type == "function_call" else item.content[0].text)
            assert set(said) == ({"city", "days"} if item.type == "function_call" else {"a"}), item
    assert kinds and kinds <= {"message", "function_call"}, kinds


def check_a_conversation_is_kept():
    first = create("My name is Ann. Say hello.", max_output_tokens=24)
    second = create("What is my name?", previous_response_id=first.id, max_output_tokens=24)
    messages = [{"role": "user", "content": "My name is Ann. Say hello."}, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "What is my name?"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, temperature=0)
    assert second.output_text == chat.choices[0].message.content and second.previous_response_id == first.id
    # The same with what is stored named by its ids, as clients do that let the server keep it.
    named = [{"role": "user", "content": "My name is Ann. Say hello."}, {"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "What is my name?"}]
    assert create(named, max_output_tokens=24).output_text == second.output_text
    assert client.responses.input_tokens.count(model=MODEL, input=named).input_tokens == second.usage.input_tokens
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user"] and items[2].content[0].text == "What is my name?"
    again = client.responses.retrieve(second.id)
    assert again.output_text == second.output_text and again.usage == second.usage
    client.responses.delete(first.id)
    refused(openai.NotFoundError, [first.id], lambda: client.responses.retrieve(first.id))
    refused(openai.NotFoundError, [first.id], lambda: client.responses.delete(first.id))
    refused(openai.BadRequestError, [first.id], lambda: create(previous_response_id=first.id))
    forgotten = create(store=False)
    refused(openai.NotFoundError, [forgotten.id], lambda: client.responses.retrieve(forgotten.id))
    assert 0 < gauge("plimsoll_response_store_bytes") <= gauge("plimsoll_response_store_limit_bytes")


def check_cancel():
    stream = create("Count to one thousand.", max_output_tokens=1900, stream=True, extra_body={"min_p": 0.0})
    events = iter(stream)
    id = next(events).response.id
    for _ in zip(range(5), events):
        pass
    rest = []
    reader = threading.Thread(target=lambda: rest.extend(events))
    reader.start()
    response = client.responses.cancel(id)
    reader.join()
    assert response.status == "cancelled" and response.id == id and response.output_text
    assert rest[-1].type == "response.incomplete" and rest[-1].response.status == "cancelled"
    assert client.responses.retrieve(id).status == "cancelled"
    refused(openai.NotFoundError, ["resp_none"], lambda: client.responses.cancel("resp_none"))
    # Far from enough time for all that it asked for.
    nothing_is_held(within=5)


def check_background():
    response = create(background=True)
    assert response.status == "queued" and response.background, response
    while response.status in {"queued", "in_progress"}:
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    assert response.status == "completed" and response.output_text == create().output_text, response
    # A client that lost its connection reads the rest.
    stream = create(background=True, stream=True)
    seen = [event for event, _ in zip(stream, range(6))]
    stream.close()
    rest = list(client.responses.retrieve(seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number))
    events = [*seen, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events))), events
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert events[-1].type == "response.completed" and events[-1].response.output_text == response.output_text
    refused(openai.BadRequestError, ["store"], lambda: create(background=True, store=False))
    running = create("Count to one thousand.", background=True, max_output_tokens=1900, extra_body={"min_p": 0.0})
    assert client.responses.cancel(running.id).status == "cancelled"
    assert gauge("plimsoll_responses_in_background") == 0


PATCH = 'start: "*** Begin\\n" line+ "*** End"\nline: ("+" | "-") /[a-z ]{1,12}/ LF\n%import common.LF\n'


def check_custom_tools():
    tools = [{"type": "custom", "name": "patch", "description": "Changes a file.", "format": {"type": "grammar", "syntax": "lark", "definition": PATCH}}]
    choice = {"type": "custom", "name": "patch"}
    for seed in range(3):
        response = create("Add a line that says hello.", tools=tools, tool_choice=choice, temperature=1.0, max_output_tokens=200, extra_body={"seed": seed})
        (call,) = response.output
        assert call.type == "custom_tool_call" and call.name == "patch", call
        pattern = r"\*\*\* Begin\n([+-][a-z ]{1,12}\n)+\*\*\* End"
        assert response.status == "incomplete" or re.fullmatch(pattern, call.input), call
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    assert create([result], previous_response_id=response.id, tools=tools, tool_choice="none", max_output_tokens=8).output_text
    events = list(create("Add a line.", tools=tools, tool_choice=choice, max_output_tokens=200, stream=True))
    pieces = "".join(event.delta for event in events if event.type == "response.custom_tool_call_input.delta")
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert pieces == done.input == events[-1].response.output[0].input and pieces.startswith("*** Begin\n")
    chat = {"type": "custom", "custom": {"name": "pick", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "red|blue"}}}}
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Pick a colour."}], tools=[chat], tool_choice="required", parallel_tool_calls=False, max_tokens=60)
    (call,) = answer.choices[0].message.tool_calls
    assert call.type == "custom" and call.custom.name == "pick" and call.custom.input in {"red", "blue"}, call


def check_errors():
    bad = openai.BadRequestError
    error = refused(bad, ["temperature"], lambda: create(temperature=-1))
    assert error.param == "temperature" and error.type == "invalid_request_error"
    refused(bad, ["images"], lambda: create([{"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "auto"}]}]))
    refused(bad, ["2048"], lambda: create("word " * 3000))
    refused(bad, ["no_such_field"], lambda: create(extra_body={"no_such_field": 1}))
    error = refused(openai.NotFoundError, ["gpt-4"], lambda: client.responses.create(model="gpt-4", input="x"))
    assert error.code == "model_not_found"
    refused(bad, ["temperature"], lambda: list(create(temperature=-1, stream=True)))


# A value for every field of the client's types that is not what the server does by itself: it must have an effect that
# the checks above have seen, or be refused by its name.
WORKS = {"include", "input", "instructions", "max_output_tokens", "metadata", "model", "parallel_tool_calls", "previous_response_id"}
WORKS |= {"background", "store", "stream", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation"}
# Names for people, which come back as they are.
WORKS |= {"user", "safety_identifier", "prompt_cache_key", "max_tool_calls"}
# Hints, which change no answer.
WORKS |= {"prompt_cache_options", "prompt_cache_retention"}
REFUSED = {
    "access_programs": {"cyber": "standard"},
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "image": {"context_compression": "enabled"},
    "moderation": {"model": "x"},
    "prompt": {"id": "x"},
    "reasoning": {"mode": "pro"},
    "service_tier": "batch",
    "stream_options": {"include_obfuscation": True},
    "truncation": "middle",
}


def check_every_field():
    fields = set(typing.get_type_hints(response_create_params.ResponseCreateParamsStreaming))
    assert fields == WORKS | set(REFUSED), fields ^ (WORKS | set(REFUSED))
    for name, value in REFUSED.items():
        error = refused(openai.BadRequestError, [], lambda: create(extra_body={name: value}))
        assert error.param.split(".")[0] == name, error.body
    named = create(max_output_tokens=1, user="ann", safety_identifier="s", prompt_cache_key="k", reasoning={"effort": "xhigh", "summary": "auto"})
    assert (named.user, named.safety_identifier, named.prompt_cache_key) == ("ann", "s", "k")
    assert named.reasoning.effort == "xhigh", named.reasoning


run(globals())
