"""The endpoints beside generation."""

import re

import pytest

from tests.server.conftest import Stack


async def test_models(stack: Stack) -> None:
    listed = (await stack.client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["demo", "real/name"]
    assert all(model["max_model_len"] == 512 and model["object"] == "model" for model in listed["data"])
    assert (await stack.client.get("/v1/models/real/name")).json()["id"] == "real/name"


async def test_health_depends_on_the_verifier_and_not_on_the_drafter(stack: Stack) -> None:
    for path in ("/health", "/ping", "/ready"):
        assert (await stack.client.get(path)).json()["status"] == "ok"
    stack.metrics.set_drafter_up(False)
    health = await stack.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    stack.engine.fail("it is gone")
    for path in ("/health", "/ping", "/ready"):
        response = await stack.client.get(path)
        assert (response.status_code, response.json()["status"]) == (503, "it is gone")
    assert (await stack.complete()).status_code == 503
    assert (await stack.client.get("/metrics")).status_code == 200


async def test_version(stack: Stack) -> None:
    assert (await stack.client.get("/version")).json()["version"]


async def test_tokenize_and_back(stack: Stack) -> None:
    text = "naïve 日本語"
    answer = (await stack.client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == len(text.encode())
    assert answer["max_model_len"] == 512
    back = await stack.client.post("/detokenize", json={"model": "demo", "tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


async def test_tokenize_conversation(stack: Stack) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with_prompt = (await stack.client.post("/tokenize", json={"messages": messages})).json()["tokens"]
    without = {"messages": messages, "add_generation_prompt": False}
    shorter = (await stack.client.post("/tokenize", json=without)).json()["tokens"]
    assert with_prompt[: len(shorter)] == shorter
    assert stack.tokenizer.decode(with_prompt, skip_special_tokens=False).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": "a"}),
    ],
)
async def test_wrong_token_requests(stack: Stack, path: str, body: dict[str, object]) -> None:
    response = await stack.client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("prompt", "tokens")


async def test_openapi_is_complete(stack: Stack) -> None:
    schema = await stack.client.get("/openapi.json")
    names = set(re.findall(r"#/components/schemas/(\w+)", schema.text))
    assert {"ChatMessage", "StreamOptions"} <= names
    assert names <= set(schema.json()["components"]["schemas"])
    body = schema.json()["paths"]["/v1/completions"]["post"]["requestBody"]
    assert "prompt" in body["content"]["application/json"]["schema"]["properties"]
    assert (await stack.client.get("/docs")).status_code == 200
