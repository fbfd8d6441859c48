"""MCP servers as tools, by the official `openai` client against a running Plimsoll server and servers of the official `mcp`
package: python3 mcp_client.py http://127.0.0.1:PORT LABEL=URL LABEL=URL

The small model calls a tool only if it must: `tool_choice` names the tool.
"""

import json
import sys

import openai

from checks import BASE, nothing_is_held, refused, run

client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="unused", max_retries=0, timeout=120)
SERVERS = dict(pair.split("=", 1) for pair in sys.argv[2:])
ASK = "What is 2 + 3?"


def fields(label, name, approval="never", said=ASK, **more):
    tool = {"type": "mcp", "server_label": label, "server_url": SERVERS[label], "require_approval": approval}
    choice = {"type": "mcp", "server_label": label, "name": name} if name else "none"
    own = {"model": "smollm2", "input": said, "tools": [tool], "tool_choice": choice}
    return own | {"max_output_tokens": 200, "temperature": 0} | more


def ask(*arguments, **more):
    return client.responses.create(**fields(*arguments, **more))


def check_call():
    for label in SERVERS:
        response = ask(label, "add")
        listed, call, message = response.output[0], response.output[1], response.output[-1]
        assert listed.type == "mcp_list_tools" and [tool.name for tool in listed.tools] == ["add", "fail"], listed
        # The package's own spelling, whichever it is, is passed on.
        assert listed.tools[0].annotations and listed.tools[0].input_schema["required"] == ["a", "b"]
        arguments = json.loads(call.arguments)
        assert (call.type, call.status, call.name) == ("mcp_call", "completed", "add"), call
        assert call.output == str(arguments["a"] + arguments["b"]), call
        assert response.status == "completed" and message.type == "message", response


def check_stream():
    for label in SERVERS:
        with client.responses.stream(**fields(label, "add")) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        for kind in ["mcp_list_tools.in_progress", "mcp_list_tools.completed", "mcp_call.in_progress"]:
            assert f"response.{kind}" in kinds, kinds
        for kind in ["mcp_call_arguments.delta", "mcp_call_arguments.done", "mcp_call.completed"]:
            assert f"response.{kind}" in kinds, kinds
        assert final.output[1].type == "mcp_call" and final.output[1].output


def check_failing_tool():
    for label in SERVERS:
        response = ask(label, "fail")
        call = response.output[1]
        assert call.status == "failed" and call.error.type == "mcp_tool_execution_error", call
        assert "Error executing tool fail" in json.dumps(call.error.content), call
        assert response.status == "completed"


def check_approval():
    for label in SERVERS:
        asked = ask(label, "add", approval="always")
        request = asked.output[-1]
        assert request.type == "mcp_approval_request" and request.name == "add", request
        answer = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}
        done = ask(label, None, approval="always", said=[answer], previous_response_id=asked.id)
        call = done.output[0]
        assert call.type == "mcp_call" and call.approval_request_id == request.id, call
        arguments = json.loads(call.arguments)
        assert call.output == str(arguments["a"] + arguments["b"]) and done.output[-1].type == "message"


def check_other_server():
    tool = {"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:9/mcp"}
    create = lambda: client.responses.create(model="smollm2", input=ASK, tools=[tool])
    refused(openai.BadRequestError, ["--mcp-server"], create)


def check_nothing_is_held():
    nothing_is_held(10)


run(globals())
