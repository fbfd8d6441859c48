"""Instructor against a running Plimsoll server: python3 instructor_client.py http://127.0.0.1:PORT

Two of its modes: a forced tool call, and a schema as `response_format`.
"""

import typing

import instructor
import openai
import pydantic

from checks import BASE, run

client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="unused", max_retries=0, timeout=120)


class Trip(pydantic.BaseModel):
    city: typing.Literal["Paris", "Rome"]
    days: int = pydantic.Field(ge=1, le=9)


def gives_a_trip(mode):
    asks = instructor.from_openai(client, mode=mode)
    messages = [{"role": "user", "content": "Plan a trip."}]
    trip = asks.chat.completions.create(model="smollm2", response_model=Trip, messages=messages, temperature=0, max_tokens=100, max_retries=0)
    assert isinstance(trip, Trip), trip


def check_tools():
    gives_a_trip(instructor.Mode.TOOLS)


def check_json_schema():
    gives_a_trip(instructor.Mode.JSON_SCHEMA)


run(globals())
