"""What the scripts beside this share: they are started with the server's address, and each `check_` of theirs is one promise."""

import sys
import time
import urllib.request

BASE = sys.argv[1]


def gauge(name):
    """A number of the server's metrics page."""
    with urllib.request.urlopen(f"{BASE}/metrics") as page:
        lines = page.read().decode().splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(name + " ")))


def refused(kind, words, call):
    """`call` must raise exactly `kind`, with all `words` in its message; returns the exception."""
    try:
        call()
    except Exception as error:
        assert type(error) is kind, f"{kind.__name__} expected, not {error!r}"
        assert all(word in str(error) for word in words), f"{words} expected in: {error}"
        return error
    raise AssertionError(f"{kind.__name__} expected, but the call went through")


def nothing_is_held(within):
    """No request, and no byte of one, is held, or will be in so many seconds.

    The last byte of an answer is with its client before the server gets to letting go of it, and a busy machine may come between.
    """
    names = ["plimsoll_requests_running", "plimsoll_requests_in_system", "plimsoll_http_in_flight_bytes"]
    since = time.monotonic()
    while any((held := {name: gauge(name) for name in names}).values()):
        assert time.monotonic() - since < within, f"after {within} s there are still {held}"
        time.sleep(0.02)


def run(script):
    """Runs every check of a script's `globals()`. The first that does not hold ends it with a traceback and an exit code of 1."""
    for name, check in [(name, check) for name, check in script.items() if name.startswith("check_")]:
        since = time.monotonic()
        check()
        print(f"ok {name.removeprefix('check_').replace('_', ' ')} ({time.monotonic() - since:.2f} s)", flush=True)
    print("all good")
