"""OpenAI's Agents SDK against a running Plimsoll server: python3 agents_client.py http://127.0.0.1:PORT

The agent must call its tool in the first turn and answers in the second, through the Responses API and through chat completions.
"""

import typing

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

from checks import BASE, run

# Traces would go to OpenAI.
set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key="unused", max_retries=0, timeout=120)


def calls_a_tool(model):
    cities = []

    @function_tool
    def get_weather(city: typing.Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        cities.append(city)
        return "Sunny, 21 degrees."

    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=100)
    # The SDK sets the choice back to auto after the first call, so that the loop ends.
    agent = Agent(name="weather", instructions="Use the tool.", model=model, tools=[get_weather], model_settings=settings)
    result = Runner.run_sync(agent, "What is the weather in Paris?", max_turns=4)
    kinds = [item.type for item in result.new_items]
    assert cities and set(cities) <= {"Paris", "Rome"}, cities
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"] and kinds[-1] == "message_output_item", kinds
    assert result.final_output, result


def check_responses():
    calls_a_tool(OpenAIResponsesModel(model="smollm2", openai_client=client))


def check_chat_completions():
    calls_a_tool(OpenAIChatCompletionsModel(model="smollm2", openai_client=client))


run(globals())
