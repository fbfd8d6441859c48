"""The official `openai` client against a running Plimsoll server: python3 openai_client.py http://127.0.0.1:PORT

Every function whose name starts with `check_` is one promise. The first that does not hold ends the script with its
traceback and an exit code of 1.
"""

import asyncio
import json
import math
import pathlib
import re
import typing

import openai
import openai.types.chat.completion_create_params
import openai.types.completion_create_params
import openai.types.embedding_create_params
import openai.types.responses.response_create_params

from checks import BASE, gauge, nothing_is_held, refused, run

MODEL = "smollm2"
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="unused", max_retries=0, timeout=120)
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def complete(prompt, **more):
    return client.completions.create(model=MODEL, prompt=prompt, **{"max_tokens": 12, "temperature": 0, **more})


def chat(messages=CAPITAL, **more):
    return client.chat.completions.create(model=MODEL, messages=messages, **{"max_tokens": 96, "temperature": 0, **more})


def close(a, b, by=1e-3):
    return abs(a - b) <= by


# Models.


def check_models_list_and_retrieve():
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL]
    assert models[0].object == "model" and models[0].owned_by == "plimsoll" and models[0].created > 1_700_000_000
    assert client.models.retrieve(MODEL).id == MODEL
    refused(openai.NotFoundError, ["gpt-4", MODEL], lambda: client.models.retrieve("gpt-4"))


# Completions.


def check_prompt_as_string():
    answer = complete("The capital of France is")
    assert answer.object == "text_completion" and answer.model == MODEL and answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert "Paris" in choice.text and choice.index == 0 and choice.finish_reason == "length"
    usage = answer.usage
    assert usage.completion_tokens == 12 and usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def check_prompt_as_ids_and_lists():
    texts = ["The capital of France is", "One, two, three,"]
    alone = [complete(text) for text in texts]
    ids = [complete(text, max_tokens=1, extra_body={"return_token_ids": True}).choices[0].prompt_token_ids for text in texts]
    assert [len(one) for one in ids] == [answer.usage.prompt_tokens for answer in alone]
    for prompt, wanted in [(ids[0], alone[:1]), (texts, alone), (ids, alone)]:
        answer = complete(prompt)
        assert [choice.index for choice in answer.choices] == list(range(len(wanted)))
        assert [choice.text for choice in answer.choices] == [one.choices[0].text for one in wanted], prompt
        assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in wanted)


def check_echo_with_logprobs():
    prompt = "The capital of France is"
    answer = complete(prompt, max_tokens=4, echo=True, logprobs=2)
    (choice,) = answer.choices
    report = choice.logprobs
    count = answer.usage.prompt_tokens + 4
    assert choice.text.startswith(prompt) and "".join(report.tokens) == choice.text
    assert len(report.tokens) == len(report.token_logprobs) == len(report.top_logprobs) == len(report.text_offset) == count
    assert report.token_logprobs[0] is None and report.top_logprobs[0] is None, "the first token has no probability"
    assert report.text_offset == [len("".join(report.tokens[:i])) for i in range(count)]
    for token, own, top in list(zip(report.tokens, report.token_logprobs, report.top_logprobs))[1:]:
        assert own <= 0 and close(top[token], own) and 2 <= len(top) <= 3
    for own, top in list(zip(report.token_logprobs, report.top_logprobs))[-4:]:
        assert close(own, max(top.values())), "greedy tokens are the likeliest"
    only = complete(prompt, max_tokens=0, echo=True, logprobs=0).choices[0]
    assert only.text == prompt
    for a, b in list(zip(only.logprobs.token_logprobs, report.token_logprobs))[1:]:
        assert close(a, b)


def check_n_choices():
    answer = complete("Once upon a time", n=3, temperature=1.0, seed=5, max_tokens=16)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) == 3, texts
    assert answer.usage.completion_tokens == sum(16 for _ in texts)
    greedy = complete("Once upon a time", n=3)
    assert len({choice.text for choice in greedy.choices}) == 1, "greedy choices are equal"


def check_stream():
    whole = complete("Once upon a time", max_tokens=32)
    chunks = list(complete("Once upon a time", max_tokens=32, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].text, "streamed and whole are one answer"
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])


def check_stop():
    free = complete("One, two, three, four,", max_tokens=24).choices[0].text
    word = free.split()[2]
    answer = complete("One, two, three, four,", max_tokens=24, stop=[word, "never said"])
    (choice,) = answer.choices
    assert choice.finish_reason == "stop" and choice.stop_reason == word
    assert choice.text == free[: free.index(word)], (free, choice.text)
    stream = complete("One, two, three, four,", max_tokens=24, stop=word, stream=True)
    assert "".join(c.text for chunk in stream for c in chunk.choices) == choice.text, "no part of the stop string leaks"


def check_seed():
    def sample(seed):
        return complete("Once upon a time", temperature=1.0, max_tokens=24, seed=seed).choices[0].text

    assert sample(11) == sample(11) and sample(11) != sample(12)
    free = {complete("Once upon a time", temperature=1.0, max_tokens=24).choices[0].text for _ in range(3)}
    assert len(free) == 3, "without a seed, answers differ"


# Chat.


def check_chat():
    answer = chat()
    (choice,) = answer.choices
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and "Paris" in choice.message.content and choice.finish_reason == "stop", answer
    assert chat().choices[0].message.content == choice.message.content, "temperature 0 repeats itself"
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}]
    assert chat(parts).choices[0].message.content == choice.message.content, "text parts are text"


def check_chat_stream_with_usage():
    whole = chat()
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[0].object == "chat.completion.chunk" and chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["stop"]
    usage = chunks[-1].usage
    assert chunks[-1].choices == [] and usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def check_chat_logprobs():
    (choice,) = chat(max_tokens=8, logprobs=True, top_logprobs=3).choices
    assert len(choice.logprobs.content) > 0
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        assert close(token.logprob, token.top_logprobs[0].logprob), "greedy tokens are the likeliest"
        assert bytes(token.bytes).decode("utf-8", "replace") == token.token
        assert [t.logprob for t in token.top_logprobs] == sorted((t.logprob for t in token.top_logprobs), reverse=True)
        assert sum(math.exp(t.logprob) for t in token.top_logprobs) <= 1 + 1e-3
    streamed = [t for c in chat(max_tokens=8, logprobs=True, top_logprobs=3, stream=True) for d in c.choices if d.logprobs for t in d.logprobs.content]
    assert [t.token for t in streamed] == [t.token for t in choice.logprobs.content]


def check_chat_n_stop_and_length():
    answer = chat(n=2, temperature=1.0, seed=3, max_tokens=16)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    (choice,) = chat(stop="Paris").choices
    assert choice.finish_reason == "stop" and "Paris" not in choice.message.content
    answer = client.chat.completions.create(model=MODEL, messages=CAPITAL, max_completion_tokens=3, temperature=0)
    assert answer.usage.completion_tokens == 3 and answer.choices[0].finish_reason == "length"


def check_extra_body():
    greedy = chat().choices[0].message.content
    one = chat(temperature=1.5, extra_body={"top_k": 1}).choices[0].message.content
    assert one == greedy, "of one candidate, the best is taken at any temperature"
    sure = chat(temperature=1.5, extra_body={"min_p": 1.0}).choices[0].message.content
    assert sure == greedy, "nothing is as likely as the likeliest"
    plain = complete("a a a a a a a a", max_tokens=8).choices[0].text
    varied = complete("a a a a a a a a", max_tokens=8, extra_body={"repetition_penalty": 2.0}).choices[0].text
    assert plain != varied, "a penalty shows"
    answer = chat(max_tokens=5, extra_body={"return_token_ids": True})
    assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    full = complete("Hi", max_tokens=7, extra_body={"ignore_eos": True, "min_tokens": 7})
    assert full.usage.completion_tokens == 7


# Tools.

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


def call_of(choice, name):
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None, choice
    assert call.type == "function" and call.id.startswith("call_") and call.function.name == name
    return json.loads(call.function.arguments)


def check_tool_choice_named():
    named = {"type": "function", "function": {"name": "get_weather"}}
    for sampling in [{}, {"temperature": 1.5, "seed": 4}, {"temperature": 1.5, "seed": 5}]:
        (choice,) = chat(ASK, tools=[WEATHER, TIME], tool_choice=named, max_tokens=200, **sampling).choices
        arguments = call_of(choice, "get_weather")
        assert set(arguments) == {"city", "days"} and len(arguments["city"]) <= 20 and 1 <= arguments["days"] <= 9, arguments


def check_tool_choice_required_and_streamed():
    whole = chat(ASK, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name in ("get_weather", "get_time") and isinstance(json.loads(call.function.arguments), dict)
    name, arguments, reasons = None, "", []
    for chunk in chat(ASK, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False, max_tokens=200, stream=True):
        for choice in chunk.choices:
            for piece in choice.delta.tool_calls or []:
                assert piece.index == 0
                name = piece.function.name or name
                arguments += piece.function.arguments
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert (name, arguments) == (call.function.name, call.function.arguments) and reasons == ["tool_calls"]


def check_tools_in_a_conversation():
    (choice,) = chat(ASK, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=200).choices
    history = ASK + [choice.message.model_dump(exclude_none=True)]
    history += [{"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "Sunny, 21 degrees."}]
    answer = chat(history, tools=[WEATHER], max_tokens=24)
    assert answer.usage.prompt_tokens > 60 and answer.choices[0].message.role == "assistant"
    free = chat(history, tools=[WEATHER], tool_choice="none", max_tokens=24)
    assert free.usage.prompt_tokens < answer.usage.prompt_tokens, "without a choice the model does not see the tools"
    refused(openai.BadRequestError, ["get_wether"], lambda: chat(ASK, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "get_wether"}}))


# Structured output.

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "langs": {"type": "array", "items": {"enum": ["en", "fr", "de"]}, "maxItems": 3},
        "address": {"$ref": "#/$defs/address"},
    },
    "required": ["name", "age", "langs", "address"],
    "additionalProperties": False,
    "$defs": {"address": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"], "additionalProperties": False}},
}


def check_json_schema():
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    ask = [{"role": "user", "content": "Describe Ann, who lives in Rome."}]
    for sampling in [{}, {"temperature": 1.5, "seed": 1}, {"temperature": 1.0, "seed": 2, "logprobs": True, "top_logprobs": 2}]:
        (choice,) = chat(ask, response_format=form, max_tokens=200, **sampling).choices
        person = json.loads(choice.message.content)
        assert choice.finish_reason == "stop" and set(person) == {"name", "age", "langs", "address"}, choice
        assert 0 <= person["age"] <= 120 and set(person["langs"]) <= {"en", "fr", "de"} and set(person["address"]) == {"city"}
    whole = chat(ask, response_format=form, max_tokens=200).choices[0].message.content
    chunks = chat(ask, response_format=form, max_tokens=200, stream=True)
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == whole
    two = chat(ask, response_format=form, max_tokens=200, n=2, temperature=1.0, seed=3)
    assert len({choice.message.content for choice in two.choices}) == 2
    for choice in two.choices:
        json.loads(choice.message.content)


def check_json_object():
    (choice,) = chat(response_format={"type": "json_object"}, max_tokens=300, temperature=0.8, seed=8).choices
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    else:
        assert choice.message.content.startswith("{")


def check_guided():
    def guided(**form):
        return complete("The answer is", extra_body=form, temperature=1.0, seed=6, max_tokens=40).choices[0]

    assert guided(guided_choice=["yes", "no"]).text in ("yes", "no")
    choice = guided(guided_regex=r"[0-9]{3}-[a-f]{2}/x")
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}/x", choice.text) and choice.finish_reason == "stop", choice
    assert re.fullmatch(r"(ab)+c", guided(guided_grammar='start: "ab"+ "c"').text or "abc")
    assert set(json.loads(guided(guided_json={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}).text)) == {"a"}
    assert guided(structured_outputs={"choice": ["left", "right"]}).text in ("left", "right")
    refused(openai.BadRequestError, ["guided_regex"], lambda: guided(guided_regex="("))
    assert gauge("plimsoll_grammars") >= 4 and 0 < gauge("plimsoll_grammar_bytes") <= gauge("plimsoll_grammar_limit_bytes")


def check_many_constrained_at_once():
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    waiting = openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key="unused", max_retries=0, timeout=120)

    async def one(seed):
        ask = [{"role": "user", "content": f"Describe person number {seed}."}]
        more = {"response_format": form} if seed % 2 else {}
        answer = await waiting.chat.completions.create(model=MODEL, messages=ask, max_tokens=120, temperature=1.0, seed=seed, **more)
        return answer.choices[0]

    async def all_of_them():
        return await asyncio.gather(*map(one, range(8)))

    for seed, choice in enumerate(asyncio.run(all_of_them())):
        if seed % 2 and choice.finish_reason == "stop":
            assert set(json.loads(choice.message.content)) == set(PERSON["required"])


# Errors.


def check_errors():
    bad = openai.BadRequestError
    error = refused(bad, ["2048"], lambda: complete("word " * 3000))
    assert error.code == "context_length_exceeded" and error.type == "invalid_request_error", error.body
    refused(bad, ["2048"], lambda: complete("x", max_tokens=4000))
    error = refused(bad, ["temperature"], lambda: complete("x", temperature=-1))
    assert error.param == "temperature" and error.status_code == 400
    refused(bad, ["top_p"], lambda: chat(top_p=-1))
    refused(bad, ["n is 1000", "128"], lambda: complete("x", n=1000))
    refused(bad, ["logprobs"], lambda: complete("x", logprobs=1000))
    refused(bad, ["messages"], lambda: chat([]))
    error = refused(bad, ["json_schema"], lambda: chat(response_format={"type": "xml"}))
    assert error.param == "response_format.type" and error.code == "unsupported", error.body
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "colour"}}}
    error = refused(bad, ["colour"], lambda: chat(response_format=wrong))
    assert error.param == "response_format", error.body
    refused(bad, ["no_such_field"], lambda: complete("x", extra_body={"no_such_field": 1}))
    error = refused(openai.NotFoundError, ["gpt-4"], lambda: client.completions.create(model="gpt-4", prompt="x"))
    assert error.code == "model_not_found" and error.param == "model"
    error = refused(openai.APIStatusError, ["8388608"], lambda: complete("x" * 9_000_000))
    assert error.status_code == 413
    assert client.models.list().data, "and the server goes on"


def check_every_field_of_the_clients_types_is_walked():
    """What becomes of each field is what a test of the server says; that it knows them all is what this says."""
    here = pathlib.Path(__file__).parent
    walks = (here / "../../crates/plimsoll-server/tests/api/openai_fields.rs").read_text(encoding="utf-8")
    for test, types in (
        ("chat_completions", openai.types.chat.completion_create_params.CompletionCreateParamsStreaming),
        ("completions", openai.types.completion_create_params.CompletionCreateParamsStreaming),
        ("responses", openai.types.responses.response_create_params.ResponseCreateParamsStreaming),
        ("embeddings", openai.types.embedding_create_params.EmbeddingCreateParams),
    ):
        walk = re.search(rf"\nfn {test}\(\) {{\n(.*?)\n}}\n", walks, re.DOTALL).group(1)
        walked = set(re.findall(r'\(\s*"([a-z_]+)",', walk)) | set(re.findall(r'"([a-z_]+)": ', walk.split(";")[0]))
        missing = set(typing.get_type_hints(types)) - walked
        assert not missing, (test, missing)


# Many at once, and clients that leave.


def check_eight_streams_at_once():
    prompts = ["Listen. " * (5 * i) + f"A story about number {i}:" for i in range(8)]
    alone = [complete(prompt, max_tokens=32).choices[0].text for prompt in prompts]
    waiting = openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key="unused", max_retries=0, timeout=120)

    async def one(prompt):
        stream = await waiting.completions.create(model=MODEL, prompt=prompt, max_tokens=32, temperature=0, stream=True)
        return "".join([choice.text async for chunk in stream for choice in chunk.choices])

    async def all_of_them():
        return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(all_of_them()) == alone, "neighbours change nothing"


def check_a_client_that_leaves():
    stream = complete("Once upon a time", max_tokens=1900, stream=True, extra_body={"ignore_eos": True})
    for _ in zip(range(3), stream):
        pass
    assert gauge("plimsoll_requests_running") == 1
    stream.close()
    # Far from enough time for all that it asked for.
    nothing_is_held(within=5)


run(globals())
