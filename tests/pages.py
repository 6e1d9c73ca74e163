"""Pages in a browser."""

import time


def until(page, expression: str, limit: float = 20) -> None:
    """Wait for something true. Not playwright's wait_for_function, which evaluates text in the page, and its policy forbids that."""
    end = time.monotonic() + limit
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not within {limit} s: {expression}"
        page.wait_for_timeout(50)
