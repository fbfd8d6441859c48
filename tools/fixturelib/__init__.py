"""Parts of the fixture generator; see tools/make_fixtures.py for what it makes and how to run it."""
