"""LangChain against a running Plimsoll server: python3 langchain_client.py http://127.0.0.1:PORT

Tools by `bind_tools`, structured output, and an agent whose first turn must call its tool.
"""

import os
import typing

# Traces would go to LangSmith.
os.environ |= {"LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"}

import pydantic
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from checks import BASE, run

model = ChatOpenAI(model="smollm2", base_url=f"{BASE}/v1", api_key="unused", temperature=0, max_tokens=100, max_retries=0, timeout=120)
ASK = "What is the weather in Paris?"


@tool
def get_weather(city: typing.Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return "Sunny, 21 degrees."


class Trip(pydantic.BaseModel):
    city: typing.Literal["Paris", "Rome"]
    days: int = pydantic.Field(ge=1, le=9)


def check_bound_tools():
    bound = model.bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
    called = bound.invoke(ASK)
    (call,) = called.tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in {"Paris", "Rome"}, call
    streamed = None
    for chunk in bound.stream(ASK):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == call["args"], streamed
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage), result
    assert model.invoke([HumanMessage(ASK), called, result]).content


def check_structured_output():
    for method in ["function_calling", "json_schema"]:
        trip = model.with_structured_output(Trip, method=method, strict=True).invoke("Plan a trip.")
        assert isinstance(trip, Trip), (method, trip)


@wrap_model_call
def first_turn_calls(request, handler):
    answered = any(isinstance(message, ToolMessage) for message in request.messages)
    return handler(request.override(tool_choice="none" if answered else "required"))


def check_agent():
    agent = create_agent(model, [get_weather], middleware=[first_turn_calls])
    kinds = [message.type for message in agent.invoke({"messages": [("user", ASK)]})["messages"]]
    assert kinds[:2] == ["human", "ai"] and "tool" in kinds and kinds[-1] == "ai", kinds


run(globals())
