"""Users for locust: a third of them leaves in the middle of the answer."""

import json
import random
from typing import ClassVar

from locust import HttpUser, constant

PROMPTS = ("The capital of France is", "One, two, three,", "Water boils at")


class Client(HttpUser):  # type: ignore[misc]  # locust is not installed where types are checked
    """Asks, one request after the other."""

    wait_time = constant(0.05)

    def body(self, *, stream: bool) -> dict[str, object]:
        """A request."""
        return {
            "prompt": random.choice(PROMPTS),
            "max_tokens": random.randint(2, 16),
            "temperature": random.choice((0, 1)),
            "n": random.choice((1, 1, 2)),
            "stream": stream,
        }

    def waits(self) -> None:
        """A whole answer."""
        with self.client.post("/v1/completions", json=self.body(stream=False), catch_response=True) as response:
            if response.status_code == 200 and not response.json()["usage"]["completion_tokens"]:
                response.failure("no tokens")

    def streams(self) -> None:
        """A stream, read to its end."""
        body = self.body(stream=True)
        with self.client.post(
            "/v1/completions", json=body, stream=True, catch_response=True, name="stream"
        ) as response:
            lines = [line for line in response.iter_lines() if line]
            if lines[-1:] != [b"data: [DONE]"] or any("error" in json.loads(line[6:]) for line in lines[:-1]):
                response.failure(f"the stream ends with {lines[-1:]}")

    def leaves(self) -> None:
        """A stream, left after its first bytes."""
        body = {**self.body(stream=True), "max_tokens": 300}
        with self.client.post(
            "/v1/completions", json=body, stream=True, catch_response=True, name="leaves"
        ) as response:
            next(response.iter_content(random.randint(1, 300)), b"")
            response.close()

    tasks: ClassVar = [waits, streams, leaves]
