"""Pydantic AI against a running Plimsoll server: python3 pydantic_ai_client.py http://127.0.0.1:PORT

An agent with a typed output, which is a forced tool call, and one whose output is the server's structured output.
"""

import typing

import openai
import pydantic
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from checks import BASE, run

client = openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key="unused", max_retries=0, timeout=120)
model = OpenAIChatModel("smollm2", provider=OpenAIProvider(openai_client=client))
SETTINGS = {"temperature": 0, "max_tokens": 100}


class Trip(pydantic.BaseModel):
    city: typing.Literal["Paris", "Rome"]
    days: int = pydantic.Field(ge=1, le=9)


def gives_a_trip(output_type):
    result = Agent(model, output_type=output_type, retries=0, model_settings=SETTINGS).run_sync("Plan a trip.")
    assert isinstance(result.output, Trip), result
    return result


def check_output_by_a_tool():
    messages = gives_a_trip(Trip).all_messages()
    kinds = [part.part_kind for message in messages for part in message.parts]
    assert "tool-call" in kinds, kinds


def check_native_output():
    gives_a_trip(NativeOutput(Trip))


run(globals())
