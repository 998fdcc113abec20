// The page itself: asks, reads the stream, shows it. Text from the model reaches the document as text nodes only.

import {
  EventReader, RoundStatistics, describeRound, explainRefusal, format, requestBody, timeline,
} from "./rounds.mjs";

const SVG = "http://www.w3.org/2000/svg";
const STRIP_WIDTH = 1000;
const ROWS = { verifier: { y: 4, height: 17 }, drafter: { y: 25, height: 17 } };
const RETRY_MS = 2000;

const at = (id) => document.getElementById(id);
const conversation = at("conversation");
const messages = [];
let apiKey = "";
let running = null; // the AbortController of the answer that is being written

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) {
    const body = await response.text();
    throw new Refused(response.status, explainRefusal(response.status, body, response.headers.get("Retry-After")));
  }
  return response;
}

async function connect() {
  try {
    const served = await (await ask("v1/models")).json();
    at("model").textContent = served.data[0].id;
    at("key-form").hidden = true;
    notify("");
  } catch (error) {
    at("model").textContent = "not connected";
    if (error.status === 401) {
      askForKey(apiKey ? "This key is not known to the server." : error.message);
      return;
    }
    notify(error instanceof Refused ? error.message : "The server cannot be reached.");
    setTimeout(connect, RETRY_MS);
  }
}

function askForKey(message) {
  notify(message);
  at("key-form").hidden = false;
  at("key").focus();
}

function notify(message) {
  at("notice").textContent = message;
  at("notice").hidden = !message;
}

function addArticle(kind, label) {
  const article = document.createElement("article");
  article.className = kind;
  article.setAttribute("aria-label", label);
  conversation.append(article);
  return article;
}

function addSpan(parent, className, text) {
  const span = document.createElement("span");
  span.className = className;
  span.textContent = text;
  parent.append(span);
  return span;
}

function addBlock(article, round) {
  const block = addSpan(article, `block ${round.outcome}`, "");
  block.title = describeRound(round);
  for (const token of round.tokens) addSpan(block, token.source, token.text);
}

function showNumbers(statistics) {
  const { tau, hitRate, exposedMs, verifyMs, tokensPerS } = statistics.values;
  at("tau").textContent = format.ratio(tau);
  at("hit-rate").textContent = format.share(hitRate);
  at("exposed").textContent = format.ms(exposedMs);
  at("verify").textContent = format.ms(verifyMs);
  at("speed").textContent = format.speed(tokensPerS);
  const { bars, lengthMs } = timeline(statistics.rounds);
  at("strip").replaceChildren(...bars.map((bar) => drawBar(bar, STRIP_WIDTH / lengthMs)));
}

function drawBar(bar, scale) {
  const rect = document.createElementNS(SVG, "rect");
  rect.setAttribute("class", bar.kind);
  rect.setAttribute("x", bar.startMs * scale);
  rect.setAttribute("y", ROWS[bar.row].y);
  rect.setAttribute("width", Math.max((bar.endMs - bar.startMs) * scale - 1, 1));
  rect.setAttribute("height", ROWS[bar.row].height);
  return rect;
}

/** Read the events of an answer into `article`; returns the text, also when it ends early, through `onText`. */
async function readAnswer(response, article, statistics, onText) {
  const reader = new EventReader();
  const stream = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await stream.read();
    if (done) throw new Error("The connection broke before the answer was complete.");
    for (const data of reader.push(value)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(`The server gave up: ${event.error.message}`);
      for (const choice of event.choices) showChoice(choice, article, statistics, onText);
    }
  }
}

function showChoice(choice, article, statistics, onText) {
  const wasAtEnd = conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 40;
  const text = choice.delta?.content ?? "";
  onText(text);
  if (choice.jetspec_round) {
    statistics.add(choice.jetspec_round, performance.now());
    addBlock(article, choice.jetspec_round);
    showNumbers(statistics);
  } else if (text) {
    article.append(text);
  }
  if (choice.finish_reason === "length") addSpan(article, "ending", " [cut at max tokens]");
  if (wasAtEnd) conversation.scrollTop = conversation.scrollHeight;
}

async function answer() {
  notify("");
  const article = addArticle("assistant", "Answer");
  const statistics = new RoundStatistics();
  let text = "";
  let failure = null;
  setRunning(new AbortController());
  try {
    const body = JSON.stringify(requestBody(messages, settings()));
    const response = await ask("v1/chat/completions", { method: "POST", body, signal: running.signal });
    await readAnswer(response, article, statistics, (piece) => { text += piece; });
  } catch (error) {
    failure = error;
  }
  setRunning(null);
  finish(article, text, failure);
}

/** What is left of an answer: kept when it is complete or was stopped, to be tried again when it failed. */
function finish(article, text, failure) {
  const isStopped = failure?.name === "AbortError";
  if (failure && !isStopped) {
    if (!text) article.remove();
    at("retry").hidden = false;
    const message = failure instanceof TypeError ? "The server cannot be reached." : failure.message;
    if (failure.status === 401) askForKey(message);
    else notify(message);
    return;
  }
  if (isStopped) addSpan(article, "ending", " [stopped]");
  messages.push({ role: "assistant", content: text });
  at("prompt").focus();
}

function settings() {
  return {
    temperature: at("temperature").valueAsNumber,
    maxTokens: at("max-tokens").valueAsNumber,
    speculative: at("speculative").checked,
  };
}

function setRunning(controller) {
  running = controller;
  at("stop").disabled = controller === null;
  at("send").disabled = controller !== null;
  at("clear").disabled = controller !== null;
  if (controller) at("retry").hidden = true;
  conversation.setAttribute("aria-busy", String(controller !== null));
}

function send() {
  const text = at("prompt").value.trim();
  if (running || !text || !at("form").reportValidity()) return;
  // A question without an answer, because that failed, is replaced: the model is asked one thing at a time.
  if (messages.at(-1)?.role === "user") messages.pop();
  messages.push({ role: "user", content: text });
  addArticle("user", "You").textContent = text;
  conversation.scrollTop = conversation.scrollHeight;
  at("prompt").value = "";
  answer();
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("retry").addEventListener("click", () => {
  if (!running) answer();
});
at("clear").addEventListener("click", () => {
  messages.length = 0;
  conversation.replaceChildren();
  at("retry").hidden = true;
  notify("");
  showNumbers(new RoundStatistics());
  at("prompt").focus();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = at("key").value.trim();
  connect();
});

connect();
