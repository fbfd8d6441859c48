"""Starts a server as systemd does: with a socket that listens already, and a socket for its notices.

    python3 activation.py PROGRAM MODEL
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request

PROGRAM, MODEL = sys.argv[1:]


def start(listener, notices):
    """A child that has the listener as descriptor 3. LISTEN_PID is its own number, so the shell sets it."""
    command = 'exec 3<&%d; export LISTEN_PID=$$; exec "$0" "$@"' % listener.fileno()
    environment = {**os.environ, "LISTEN_FDS": "1", "NOTIFY_SOCKET": notices}
    arguments = ["sh", "-c", command, PROGRAM, "serve", MODEL, "--port", "1"]
    return subprocess.Popen(arguments, env=environment, pass_fds=[listener.fileno()])


with tempfile.TemporaryDirectory() as folder:
    notices = os.path.join(folder, "notices")
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(notices)
    manager.settimeout(60)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    # This client comes before the server is there. It waits in the socket's queue.
    early = socket.create_connection(("127.0.0.1", port))
    early.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    server = start(listener, notices)
    try:
        assert manager.recv(256) == b"READY=1\n", "the manager hears of ready"
        early.settimeout(10)
        assert early.recv(64).startswith(b"HTTP/1.1 200"), "the early client is answered"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
            assert answer.status == 200, "later clients are answered"
        server.send_signal(signal.SIGTERM)
        assert manager.recv(256) == b"STOPPING=1\n", "the manager hears of the end"
        assert server.wait(timeout=30) == 0, "the server ends by itself"
    finally:
        server.kill()
print("all good")
