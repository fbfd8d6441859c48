"""An MCP server of the official `mcp` package, over streamable HTTP: python3 mcp_server.py [json]

Its first line is its address. With `json` its answers are JSON, otherwise they are streams.
"""

import socket
import sys

from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("calculator")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def fail(loud: bool) -> str:
    """Always fails."""
    raise ValueError("the disk is on fire")


with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
print(f"http://127.0.0.1:{port}/mcp", flush=True)
server.run("streamable-http", host="127.0.0.1", port=port, json_response="json" in sys.argv)
