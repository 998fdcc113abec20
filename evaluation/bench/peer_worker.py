"""`python -m evaluation.bench.peer_worker`: one peer library with one model, in a process of its own.

Reads a request a line on stdin and answers a line on stdout. Runs under any interpreter that has the library, so that
it may live in another environment: nothing of this project is imported here.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

CONTEXT_TOKENS = 2048
MODULES = {"transformers": "transformers", "llama.cpp": "llama_cpp"}
INSTALL = {"transformers": "transformers", "llama.cpp": "llama-cpp-python (pip install 'jetspec-pp[peers]')"}


@dataclass(frozen=True)
class Request:
    """What to generate, greedily. num_lookup_tokens: drafts a block of the prompt-lookup drafter, None for none."""

    prompt_token_ids: list[int]
    max_tokens: int
    stop_token_ids: list[int]
    num_lookup_tokens: int | None


Generate = Callable[[Request], Iterator[list[int]]]
"""Yields tokens as they become known, those of one step together, the one that stops the text included."""


def load_transformers(path: str, dtype: str, uses_lookup: bool) -> Generate:
    """transformers' own `generate`; prompt lookup is an argument of each call."""
    import queue
    import threading

    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
    model.eval()

    class Queue(BaseStreamer):
        """Hands tokens over as they come; the first thing it is given is the prompt."""

        def __init__(self) -> None:
            self.items: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
            self.has_prompt = False

        def put(self, value: Any) -> None:
            if self.has_prompt:
                self.items.put(value.flatten().tolist())
            self.has_prompt = True

        def end(self) -> None:
            self.items.put(None)

    def generate(request: Request) -> Iterator[list[int]]:
        stream = Queue()
        prompt = torch.tensor([request.prompt_token_ids])
        settings: dict[str, Any] = {"max_new_tokens": request.max_tokens, "do_sample": False, "streamer": stream}
        if request.stop_token_ids:
            settings |= {"eos_token_id": request.stop_token_ids, "pad_token_id": request.stop_token_ids[0]}
        if request.num_lookup_tokens is not None:
            settings["prompt_lookup_num_tokens"] = request.num_lookup_tokens
        failure: list[BaseException] = []

        def run() -> None:
            torch.set_num_threads(1)
            try:
                model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
                failure.append(error)
                stream.end()

        thread = threading.Thread(target=run)
        thread.start()
        while (tokens := stream.items.get()) is not None:
            yield tokens
        thread.join()
        if failure:
            raise failure[0]

    return generate


def load_llama_cpp(path: str, dtype: str, uses_lookup: bool) -> Generate:
    """llama.cpp through llama-cpp-python; its prompt-lookup drafter is part of the model object."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = LlamaPromptLookupDecoding() if uses_lookup else None
    model = Llama(
        model_path=path, n_ctx=CONTEXT_TOKENS, n_threads=1, n_threads_batch=1, draft_model=lookup, verbose=False
    )

    def generate(request: Request) -> Iterator[list[int]]:
        if lookup is not None and request.num_lookup_tokens is not None:
            lookup.num_pred_tokens = request.num_lookup_tokens
        model.reset()  # else a prompt seen before costs no prefill
        tokens = model.generate(request.prompt_token_ids, temp=0.0, top_k=1, repeat_penalty=1.0)
        for number, token_id in enumerate(tokens, start=1):
            yield [int(token_id)]
            if number >= request.max_tokens or token_id in request.stop_token_ids:
                return

    return generate


LOADERS: dict[str, Callable[[str, str, bool], Generate]] = {
    "transformers": load_transformers,
    "llama.cpp": load_llama_cpp,
}


def answer(generate: Generate, request: Request) -> dict[str, object]:
    """Generate and time; the answer's fields are those of `evaluation.bench.client.Generation`."""
    token_ids: list[int] = []
    num_first = 0
    first_s = end_s = 0.0
    started = time.perf_counter()
    for tokens in generate(request):
        end_s = time.perf_counter() - started
        token_ids += tokens
        if not num_first:
            num_first, first_s = len(token_ids), end_s
    token_ids = token_ids[: request.max_tokens]
    num_tokens = len(token_ids)
    if token_ids and token_ids[-1] in request.stop_token_ids:
        token_ids.pop()
    return {
        "token_ids": token_ids,
        "num_tokens": num_tokens,
        "num_first": num_first,
        "first_s": first_s,
        "end_s": end_s,
    }


def main() -> int:
    """Load, say so, and answer until stdin ends."""
    parser = argparse.ArgumentParser(prog="peer_worker")
    parser.add_argument("--library", choices=sorted(LOADERS), required=True)
    parser.add_argument("--model", help="without one, only say whether the library is there")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lookup", action="store_true")
    parser.add_argument("--core", type=int)
    parsed = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    if parsed.core is not None:
        os.sched_setaffinity(0, {parsed.core})

    def say(**message: object) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    if importlib.util.find_spec(MODULES[parsed.library]) is None:
        say(status="missing", reason=f"{INSTALL[parsed.library]} is not installed")
        return 0
    if parsed.model is None:
        say(status="ready")
        return 0
    generate = LOADERS[parsed.library](parsed.model, parsed.dtype, parsed.lookup)
    say(status="ready")
    for line in sys.stdin:
        say(status="done", **answer(generate, Request(**json.loads(line))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
