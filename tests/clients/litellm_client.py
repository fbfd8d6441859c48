"""LiteLLM against a running Plimsoll server: python3 litellm_client.py http://127.0.0.1:PORT

A forced tool call whole and streamed, its result sent back, and a schema as `response_format`, with fields that LiteLLM adds.
"""

import json
import os

# Its table of prices would come from elsewhere.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}

import litellm

from checks import BASE, run

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASK = {"role": "user", "content": "What is the weather in Paris?"}


def complete(**more):
    return litellm.completion(
        model="openai/smollm2", api_base=f"{BASE}/v1", api_key="unused", temperature=0, max_tokens=100, num_retries=0, timeout=120, **more
    )


def check_forced_tool():
    forced = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    answer = complete(messages=[ASK], **forced)
    said = answer.choices[0].message
    (call,) = said.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in {"Paris", "Rome"}, call
    chunks = list(complete(messages=[ASK], stream=True, **forced))
    streamed = litellm.stream_chunk_builder(chunks, messages=[ASK]).choices[0].message.tool_calls[0]
    assert streamed.function.arguments == call.function.arguments, streamed
    # What LiteLLM made of the answer goes back as it is, with fields of its own.
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}
    final = complete(messages=[ASK, said.model_dump(), result], tools=[TOOL], tool_choice="none")
    assert final.choices[0].message.content, final


def check_schema():
    schema = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["days"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema, "strict": True}}
    answer = complete(messages=[{"role": "user", "content": "Plan a trip."}], response_format=form)
    assert 1 <= json.loads(answer.choices[0].message.content)["days"] <= 9, answer


run(globals())
