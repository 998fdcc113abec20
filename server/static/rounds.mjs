// What the page computes from the server's answers. Knows neither the document nor the network.

const PREDICTED = ["hit", "late_hit", "miss"];
export const NUM_ROUNDS_SHOWN = 16;

/** Cuts a stream of server-sent events into the data of each, however the pieces fall. */
export class EventReader {
  #rest = "";

  push(text) {
    this.#rest += text;
    const blocks = this.#rest.split(/\r?\n\r?\n/);
    this.#rest = blocks.pop();
    return blocks.flatMap((block) => {
      const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      return lines.length ? [lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n")] : [];
    });
  }
}

/** The numbers of one answer, as `jetspec` of a response counts them; the prefill is no round. */
export class RoundStatistics {
  rounds = [];
  #counts = {};
  #numVerified = 0;
  #verifyMs = 0;
  #exposedMs = 0;
  #numDecoded = 0;
  #firstMs = null;
  #lastMs = null;

  /** `nowMs`: when the round's chunk arrived. */
  add(round, nowMs) {
    if (this.#firstMs === null) {
      this.#firstMs = nowMs;
    } else {
      this.#numDecoded += round.tokens.length;
    }
    this.#lastMs = nowMs;
    if (round.outcome === "prefill") return;
    this.rounds.push(round);
    if (this.rounds.length > NUM_ROUNDS_SHOWN) this.rounds.shift();
    this.#counts[round.outcome] = (this.#counts[round.outcome] ?? 0) + 1;
    this.#numVerified += round.num_accepted + 1;
    this.#verifyMs += round.verify_ms;
    this.#exposedMs += round.exposed_ms;
  }

  /** Null where there is nothing to divide by. */
  get values() {
    const count = (outcomes) => outcomes.reduce((sum, outcome) => sum + (this.#counts[outcome] ?? 0), 0);
    const ratio = (part, whole) => (whole > 0 ? part / whole : null);
    const numRounds = count(Object.keys(this.#counts));
    return {
      tau: ratio(this.#numVerified, numRounds),
      hitRate: ratio(count(["hit"]), count(PREDICTED)),
      exposedMs: ratio(this.#exposedMs, numRounds),
      verifyMs: ratio(this.#verifyMs, numRounds),
      tokensPerS: ratio(1000 * this.#numDecoded, this.#lastMs - this.#firstMs),
    };
  }
}

/**
 * Where the bars of some rounds lie, in ms from the first one's start. A round's drafts were prepared while the
 * verification before it ran; a fallback block was drafted in the gap before its own.
 */
export function timeline(rounds) {
  const bars = [];
  let endMs = 0;
  let beforeMs = null;
  rounds.forEach((round) => {
    const startMs = endMs + round.exposed_ms;
    if (beforeMs !== null && round.draft_ms !== null) {
      bars.push({ row: "drafter", kind: "drafting", startMs: beforeMs, endMs: Math.min(beforeMs + round.draft_ms, startMs) });
    }
    if (round.fallback_ms !== null) {
      bars.push({ row: "drafter", kind: "fallback", startMs: Math.max(startMs - round.fallback_ms, endMs), endMs: startMs });
    }
    beforeMs = startMs;
    endMs = startMs + round.verify_ms;
    bars.push({ row: "verifier", kind: round.outcome, startMs, endMs });
  });
  return { bars, lengthMs: endMs };
}

/** What the pointer says over a block. */
export function describeRound(round) {
  if (round.outcome === "prefill") return "first token, from the prompt";
  const drafts = round.num_drafts ? `, ${round.num_accepted} of ${round.num_drafts} drafts accepted` : "";
  const alone = round.alone_because ? ` (${round.alone_because.replaceAll("_", " ")})` : "";
  const times = `verify ${round.verify_ms.toFixed(1)} ms, exposed ${round.exposed_ms.toFixed(1)} ms`;
  return `round ${round.round}: ${round.outcome.replace("_", " ")}${alone}${drafts}; ${times}`;
}

export function requestBody(messages, settings) {
  return {
    messages,
    temperature: settings.temperature,
    max_tokens: settings.maxTokens,
    speculative: settings.speculative,
    stream: true,
    stream_options: { jetspec_rounds: true },
  };
}

/** A refused request in words. `body` is the answer's text, `retryAfter` its header or null. */
export function explainRefusal(status, body, retryAfter) {
  let message = "";
  try {
    message = JSON.parse(body).error.message;
  } catch {
    // Not from this server, but from something in between.
  }
  const known = {
    401: "This server needs an API key.",
    429: "The server is busy: its queue is full.",
    503: "The server is not ready.",
  }[status];
  const wait = (status === 429 || status === 503) && /^\d+$/.test(retryAfter ?? "") ? `Try again in ${retryAfter} s.` : "";
  return [known ?? `The server refused (${status}).`, message, wait].filter(Boolean).join(" ");
}

export const format = {
  ratio: (value) => (value === null ? "–" : value.toFixed(2)),
  share: (value) => (value === null ? "–" : `${(100 * value).toFixed(0)} %`),
  ms: (value) => (value === null ? "–" : `${value.toFixed(1)} ms`),
  speed: (value) => (value === null ? "–" : value.toFixed(1)),
};
