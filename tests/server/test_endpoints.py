"""The endpoints beside generation."""

import asyncio
import re
from importlib.metadata import version

import pytest

from tests.server.conftest import Stack, StackFactory
from tests.server.fakes import CHAT_TEMPLATE


async def test_models(stack: Stack) -> None:
    listed = (await stack.client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["demo", "real/name"]
    assert all(model["max_model_len"] == 512 and model["object"] == "model" for model in listed["data"])
    assert (await stack.client.get("/v1/models/real/name")).json()["id"] == "real/name"


async def test_health_depends_on_the_verifier_and_not_on_the_drafter(stack: Stack) -> None:
    for path in ("/health", "/ping", "/ready"):
        assert (await stack.client.get(path)).json()["status"] == "ok"
        assert (await stack.client.head(path)).status_code == 200
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
    answer = (await stack.client.get("/version")).json()
    assert answer["version"] == version("jetspec-pp")
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", answer["git_commit"])
    assert answer["models"] == {"target": {"name": "tiny", "revision": "sha256-0"}}
    stack.state.model = stack.state.engine = None
    assert (await stack.client.get("/version")).json()["models"] == {}


async def test_deep_health_generates_a_token(stack: Stack) -> None:
    health = await stack.client.get("/health?deep=1")
    assert (health.status_code, health.json()["probe"]) == (200, "ok")
    assert [submit.max_tokens for submit in stack.verifier.submitted] == [1]
    stack.verifier.plan.fail_after = 0
    health = await stack.client.get("/health?deep=1")
    assert (health.status_code, health.json()["probe"]) == (503, "a made-up fault")
    assert (await stack.client.get("/health")).status_code == 200
    wrong = await stack.client.get("/health?deep=perhaps")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "deep")


async def test_deep_health_has_a_limit_and_takes_its_sequence_back(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.routes.PROBE_LIMIT_S", 0.05)
    stack.verifier.plan.round_s = 1000.0
    health = await stack.client.get("/health?deep=1")
    assert (health.status_code, health.json()["probe"]) == (503, "no token within 0.05 s")
    assert stack.engine.num_live == 0
    assert stack.sample("jetspec_requests_total", finished_reason="abort") == 1


async def test_full_queue_is_no_failure_of_deep_health(make_stack: StackFactory) -> None:
    async with make_stack(max_num_seqs=1, max_num_queued_reqs=0) as stack:
        stack.verifier.plan.round_s = 1000.0
        request = asyncio.create_task(stack.complete())
        while stack.engine.num_live == 0:
            await asyncio.sleep(0.001)
        health = await stack.client.get("/health?deep=1")
        assert (health.status_code, health.json()["probe"]) == (200, "busy")
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


async def test_tokenizer_info(stack: Stack) -> None:
    info = (await stack.client.get("/tokenizer_info")).json()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", None)
    assert info["chat_template"] == CHAT_TEMPLATE
    assert "name_or_path" not in info  # a path on this machine


async def test_docs_can_be_switched_off(make_stack: StackFactory) -> None:
    async with make_stack(disable_fastapi_docs=True) as stack:
        for path in ("/docs", "/openapi.json"):
            response = await stack.client.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


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
    operations = [item for path in schema.json()["paths"].values() for item in path.values()]
    assert all("default" in item["responses"] and "422" not in item["responses"] for item in operations)
    forms = schema.json()["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(forms) == {"application/json", "text/event-stream"}
    assert set(schema.json()["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    assert (await stack.client.get("/docs")).status_code == 200
