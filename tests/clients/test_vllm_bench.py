"""What `vllm bench serve` (vLLM 0.33) sends and reads; the program itself is too heavy to install for a test.

It asks for the models, reads the `vllm:spec_decode` counters before and after, streams completions with fields of its
own, takes the time at each chunk that has a choice, and counts tokens by the usage chunk.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from tests.clients.servers import Server

NUM_REQUESTS = 4
OUTPUT_LEN = 12
SPEC_DECODE = "vllm:spec_decode"


@dataclass
class Output:
    """What the program keeps of a request."""

    text: str = ""
    num_tokens: int = 0
    num_chunks: int = 0
    errors: list[str] = field(default_factory=list)


def request(prompt: str) -> dict[str, object]:
    """The body of the program's backend for completions, with `--ignore-eos` and `--logprobs`."""
    return {
        "model": "demo",
        "prompt": prompt,
        "repetition_penalty": 1.0,
        "max_tokens": OUTPUT_LEN,
        "logprobs": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }


def messages(response: httpx.Response) -> Iterator[str]:
    """Its own reader of events: blocks between blank lines, comments left out."""
    buffer = ""
    for chunk in response.iter_text():
        buffer += chunk
        *complete, buffer = buffer.split("\n\n")
        yield from (block.strip() for block in complete if block.strip() and not block.startswith(":"))
    assert not buffer.strip()


def measure(server: Server, prompt: str) -> Output:
    output = Output()
    headers = {"Authorization": "Bearer EMPTY"}
    with httpx.stream(
        "POST", f"{server.base_url}/completions", json=request(prompt), headers=headers, timeout=300
    ) as response:
        assert response.status_code == 200
        for message in messages(response):
            chunk = message.removeprefix("data: ")
            if chunk == "[DONE]":
                continue
            data = json.loads(chunk)
            if choices := data.get("choices"):
                output.num_chunks += 1
                output.text += choices[0].get("text") or ""
            elif usage := data.get("usage"):
                output.num_tokens = usage.get("completion_tokens")
            else:
                output.errors.append(chunk)
    return output


def spec_decode(server: Server) -> dict[str, float]:
    """The counters as the program reads them: lines by prefix, values by the last word, labels in braces."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{server.address}/metrics").text.splitlines():
        if line.startswith(SPEC_DECODE):
            name = line.partition("{")[0]
            if name.endswith("_per_pos_total"):
                name += line.partition('position="')[2].partition('"')[0]
            found[name] = found.get(name, 0.0) + float(line.split()[-1])
    return found


def test_a_run(server: Server) -> None:
    models = httpx.get(f"{server.base_url}/models").json()["data"]
    assert models[0]["id"] == "demo" and models[0]["max_model_len"] == 512
    server.wait_for_rest()
    before = spec_decode(server)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        outputs = list(pool.map(lambda number: measure(server, f"Once upon a time {number}"), range(NUM_REQUESTS)))
    server.wait_for_rest()
    after = spec_decode(server)
    for output in outputs:
        assert output.errors == []
        assert output.num_tokens == OUTPUT_LEN
        assert output.text and output.num_chunks >= 1

    change = {name: after[name] - before[name] for name in after}
    drafts = change[f"{SPEC_DECODE}_num_drafts_total"]
    drafted = change[f"{SPEC_DECODE}_num_draft_tokens_total"]
    accepted = change[f"{SPEC_DECODE}_num_accepted_tokens_total"]
    assert drafts >= NUM_REQUESTS and drafted >= drafts and 0 < accepted <= drafted
    per_position = [value for name, value in change.items() if "_per_pos_total" in name]
    assert sum(per_position) == accepted
    assert max(per_position) <= drafts
