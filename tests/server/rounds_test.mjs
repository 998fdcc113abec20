// The page's own arithmetic, in Node: `node --test tests/server/rounds_test.mjs`; tests/server/test_page.py runs it.

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  EventReader, NUM_ROUNDS_SHOWN, RoundStatistics, describeRound, explainRefusal, format, requestBody, timeline,
} from "../../server/static/rounds.mjs";

function round(outcome, changes = {}) {
  const tokens = ["draft", "draft", "bonus"].map((source) => ({ id: 1, text: "a", source }));
  return {
    round: 1, outcome, num_drafts: 4, num_accepted: 2, num_cached: 4, verify_ms: 20, exposed_ms: 2, draft_ms: 15,
    fallback_ms: null, tokens, ...changes,
  };
}

test("events are found however the stream is cut", () => {
  const stream = 'data: {"a":"x\\n\\ny"}\n\n: a comment\n\nevent: b\r\ndata: 1\r\ndata: 2\r\n\r\ndata: [DONE]\n\n';
  for (let size = 1; size <= stream.length; size += 1) {
    const reader = new EventReader();
    const found = [];
    for (let start = 0; start < stream.length; start += size) found.push(...reader.push(stream.slice(start, start + size)));
    assert.deepEqual(found, ['{"a":"x\\n\\ny"}', "1\n2", "[DONE]"], `pieces of ${size}`);
  }
  assert.deepEqual(new EventReader().push("data: unfinished\n"), []);
});

test("numbers are those of the server's own statistics", () => {
  const statistics = new RoundStatistics();
  assert.deepEqual(statistics.values, { tau: null, hitRate: null, exposedMs: null, verifyMs: null, tokensPerS: null });
  statistics.add(round("prefill", { tokens: [{ id: 1, text: "a", source: "bonus" }] }), 1000);
  assert.equal(statistics.values.tau, null);
  statistics.add(round("first", { num_accepted: 0, exposed_ms: 10, tokens: [] }), 1100);
  statistics.add(round("hit"), 1200);
  statistics.add(round("late_hit", { num_accepted: 4 }), 1300);
  statistics.add(round("miss", { exposed_ms: 6 }), 1500);
  assert.deepEqual(statistics.values, { tau: 3, hitRate: 1 / 3, exposedMs: 5, verifyMs: 20, tokensPerS: 18 });
  assert.deepEqual(statistics.rounds.map((one) => one.outcome), ["first", "hit", "late_hit", "miss"]);
});

test("plain decoding has no hit rate, and only the last rounds are kept", () => {
  const statistics = new RoundStatistics();
  for (let number = 0; number < NUM_ROUNDS_SHOWN + 5; number += 1) {
    statistics.add(round("autoregressive", { round: number, num_drafts: 0, num_accepted: 0 }), number);
  }
  assert.equal(statistics.values.hitRate, null);
  assert.equal(statistics.values.tau, 1);
  assert.equal(statistics.rounds.length, NUM_ROUNDS_SHOWN);
  assert.equal(statistics.rounds[0].round, 5);
});

test("drafting lies under the verification before, a fallback in the gap", () => {
  const { bars, lengthMs } = timeline([
    round("first", { draft_ms: null, exposed_ms: 8, fallback_ms: 7 }),
    round("hit"),
    round("late_hit", { draft_ms: 30, exposed_ms: 5 }),
    round("miss", { exposed_ms: 9, fallback_ms: 50 }),
  ]);
  assert.deepEqual(bars, [
    { row: "drafter", kind: "fallback", startMs: 1, endMs: 8 },
    { row: "verifier", kind: "first", startMs: 8, endMs: 28 },
    { row: "drafter", kind: "drafting", startMs: 8, endMs: 23 },
    { row: "verifier", kind: "hit", startMs: 30, endMs: 50 },
    { row: "drafter", kind: "drafting", startMs: 30, endMs: 55 }, // not beyond the start of the block itself
    { row: "verifier", kind: "late_hit", startMs: 55, endMs: 75 },
    { row: "drafter", kind: "drafting", startMs: 55, endMs: 70 },
    { row: "drafter", kind: "fallback", startMs: 75, endMs: 84 },
    { row: "verifier", kind: "miss", startMs: 84, endMs: 104 },
  ]);
  assert.equal(lengthMs, 104);
  assert.deepEqual(timeline([]), { bars: [], lengthMs: 0 });
});

test("rounds in words", () => {
  assert.equal(
    describeRound(round("late_hit", { round: 7 })),
    "round 7: late hit, 2 of 4 drafts accepted; verify 20.0 ms, exposed 2.0 ms",
  );
  assert.equal(describeRound(round("prefill")), "first token, from the prompt");
  assert.equal(
    describeRound(round("autoregressive", { num_drafts: 0, alone_because: "switched_off" })),
    "round 1: autoregressive (switched off); verify 20.0 ms, exposed 2.0 ms",
  );
});

test("refusals in words", () => {
  const body = JSON.stringify({ error: { message: "Too many." } });
  assert.equal(explainRefusal(429, body, "3"), "The server is busy: its queue is full. Too many. Try again in 3 s.");
  assert.equal(explainRefusal(503, body, null), "The server is not ready. Too many.");
  assert.equal(explainRefusal(400, body, "3"), "The server refused (400). Too many.");
  assert.equal(explainRefusal(502, "<html>", null), "The server refused (502).");
  assert.equal(explainRefusal(401, '{"error":null}', null), "This server needs an API key.");
});

test("a request asks for its rounds", () => {
  const messages = [{ role: "user", content: "hi" }];
  assert.deepEqual(requestBody(messages, { temperature: 0.5, maxTokens: 9, speculative: false }), {
    messages, temperature: 0.5, max_tokens: 9, speculative: false, stream: true, stream_options: { jetspec_rounds: true },
  });
});

test("numbers as shown", () => {
  assert.deepEqual([format.ratio(2.345), format.share(0.756), format.ms(1.26), format.speed(31)], ["2.35", "76 %", "1.3 ms", "31.0"]);
  assert.deepEqual(Object.values(format).map((show) => show(null)), ["–", "–", "–", "–"]);
});
