// A chat over /v1/chat/completions. Everything from the model is set as text, never as HTML.

import { Refused, sent, Server } from "./answers.js";
import { Chats, download, loadSettings, saveSettings, title } from "./chats.js";
import { make, MarkdownView } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const FIELDS = ["temperature", "seed", "tokens", "system"];
const SAVE_EVERY_MS = 2000;
const NO_ANSWER = "The server does not answer. Your message is kept: Retry asks again once the server is back.";
const NOTES = {
  writing: "The page was closed while this was written.",
  stopped: "Stopped.",
  length: "Cut: the most tokens, or the end of the context, was reached.",
  empty: "The model ended its answer without a word.",
};

const server = new Server();
const chats = new Chats();
let chat = chats.all()[0] ?? chats.begin();
let running = null; // {chat, message, job}: the answer that is being written
let isFollowing = true; // the view stays at the end of the answer

let isLost = false;
let nextLook = 0;
// --- The server.
// Show whether the server answers, its models, and whether the chosen one is open.
async function look() {
  clearTimeout(nextLook);
  let pause = 15_000;
  try {
    const models = await server.models();
    if (models) offer(models.map((model) => model.id));
    const isOpening = models?.find((model) => model.id === $("model").value)?.status === "loading";
    if (isOpening) pause = 1000;
    $("state").textContent = isLost ? "The server is back." : isOpening ? "Opening the model…" : "";
    if (models?.length === 0) $("state").textContent = "No model here writes text.";
    isLost = false;
  } catch {
    isLost = true;
    pause = 3000;
    $("state").textContent = "The server does not answer.";
  }
  nextLook = setTimeout(look, pause);
}

function offer(names) {
  if (names.join("\n") === [...$("model").options].map((each) => each.value).join("\n")) return; // an open list stays
  const chosen = $("model").value || loadSettings().model;
  $("model").replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
}

function request(messages) {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  return {
    model: $("model").value || undefined,
    messages: sent($("system").value.trim(), messages),
    temperature: number("temperature"),
    seed: number("seed"),
    max_completion_tokens: number("tokens"),
    stream: true,
    stream_options: { include_usage: true },
  };
}

// --- One answer.
async function answer() {
  const message = { role: "assistant", content: "", reasoning: "", state: "writing", model: $("model").value };
  const mine = { chat, message, job: new AbortController() };
  const body = request(chat.messages);
  stop();
  setRunning(mine);
  chat.messages.push(message);
  const view = show(message);
  view.article.ariaBusy = "true"; // a screen reader reads the answer once, when it is whole
  follow(true);

  const counts = { began: performance.now(), first: null, pieces: 0, usage: null, memory: "" };
  const weigh = async () => (counts.memory = await server.memory().catch(() => ""));
  const saving = setInterval(() => (keep(mine.chat), counts.first === null && look(), weigh()), SAVE_EVERY_MS);
  const counting = setInterval(() => running === mine && showFigures(counts), 250);
  try {
    look();
    for await (const chunk of server.chunks(body, mine.job.signal)) {
      counts.usage = chunk.usage || counts.usage;
      const { delta = {}, finish_reason: reason } = chunk.choices?.[0] ?? {};
      if (reason === "length") message.state = "length";
      if (!delta.content && !delta.reasoning_content) continue;
      counts.first ??= performance.now();
      counts.pieces += 1;
      message.reasoning += delta.reasoning_content ?? "";
      message.content += delta.content ?? "";
      view.later();
    }
    if (message.state !== "length") message.state = message.content ? "done" : "empty";
  } catch (error) {
    message.state = mine.job.signal.aborted ? "stopped" : "failed";
    if (message.state === "failed") message.error = error instanceof Refused ? error.message : NO_ANSWER;
    look();
  }
  clearInterval(saving);
  clearInterval(counting);
  keep(mine.chat);
  view.end();
  if (running !== mine) return;
  setRunning(null);
  list();
  await weigh();
  if (running === null && chat === mine.chat) showFigures(counts, message.state);
}

function showFigures({ began, first, pieces, usage, memory }, state) {
  const now = performance.now();
  let text = "";
  if (first === null) {
    text = state ? "" : `${$("state").textContent || "Reading the prompt…"} ${((now - began) / 1000).toFixed(0)} s`;
  } else if (state !== "stopped" && state !== "failed") {
    const [count, unit] = usage ? [usage.completion_tokens, "tokens"] : [pieces, "pieces"];
    const rate = count > 1 ? ((count - 1) * 1000) / (now - first) : 0;
    const read = usage ? `${usage.prompt_tokens} tokens read, ${count} written, ` : "";
    text = `${read}first token after ${(first - began).toFixed(0)} ms, ${rate.toFixed(1)} ${unit}/s${memory}`;
  }
  $("figures").textContent = text;
}

const stop = () => running?.job.abort();

function areSettingsRight() {
  const wrong = FIELDS.find((id) => !$(id).checkValidity());
  if (!wrong) return true;
  toggle("settings", true);
  $(wrong).reportValidity();
  return false;
}

function ask(text) {
  const message = { role: "user", content: text };
  chat.messages.push(message);
  show(message);
  answer();
  keep(chat);
  list();
}

// Ask again from a message on, with another text if it is the user's. It and what follows are replaced.
function askAgain(message, article, text) {
  if (!areSettingsRight()) return;
  stop();
  chat.messages.length = chat.messages.indexOf(message);
  while (article.nextSibling) article.nextSibling.remove();
  article.remove();
  if (text === undefined) answer();
  else ask(text);
}

function keep(changed) {
  const isKept = chats.save(changed);
  $("status").textContent = isKept ? "" : "This chat is not kept: the browser's storage is full or forbidden.";
}

// --- The conversation.
function show(message) {
  const isUser = message.role === "user";
  const content = make("div", { className: "content" });
  const who = make("span", { className: "who", textContent: isUser ? "You:" : `${message.model || "The model"}:` });
  const article = make("article", { className: message.role }, who, content);
  $("messages").append(article);
  $("empty").hidden = true;
  if (isUser) {
    content.textContent = message.content;
    article.append(actions({ Copy: copier(message), Edit: () => edit(message, article) }));
    return { article };
  }
  const view = new AnswerView(message, article, content);
  if (running?.message !== message) view.end();
  return view;
}

class AnswerView {
  isWaiting = false; // for the next frame
  shown = 0; // characters
  notBefore = 0;

  constructor(message, article, content) {
    Object.assign(this, { message, article, content, markdown: new MarkdownView(content) });
  }

  // Paint with the next frame, and for a fifth of the time at most, however long the answer becomes.
  later() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    setTimeout(() => requestAnimationFrame(() => this.paint()), Math.max(0, this.notBefore - performance.now()));
  }

  paint() {
    const began = performance.now();
    const { reasoning, content } = this.message;
    this.isWaiting = false;
    if (reasoning) this.think(reasoning, content);
    if (content.length > this.shown) this.markdown.show(content);
    this.shown = content.length;
    if (this.article.isConnected) follow();
    const now = performance.now();
    this.notBefore = now + 4 * (now - began);
  }

  think(reasoning, content) {
    if (!this.thought) {
      this.thought = new Text();
      this.summary = make("summary");
      this.content.before(make("details", { className: "thinking" }, this.summary, make("div", {}, this.thought)));
    }
    this.summary.textContent = content || this.message.state !== "writing" ? "Thoughts" : "Thinking…";
    this.thought.appendData(reasoning.slice(this.thought.length));
  }

  end() {
    const { message, article } = this;
    this.paint();
    article.ariaBusy = null;
    const note = message.error ?? NOTES[message.state];
    if (note) article.append(make("p", { className: message.error ? "note error" : "note", textContent: note }));
    article.append(actions({ ...(message.content && { Copy: copier(message) }), Retry: () => askAgain(message, article) }));
    if (article.isConnected) follow();
  }
}

const button = (textContent, onclick, more) => make("button", { type: "button", textContent, onclick, ...more });

function actions(named) {
  return make("div", { className: "actions" }, ...Object.entries(named).map(([name, run]) => button(name, run)));
}

function edit(message, article) {
  const field = make("textarea", { value: message.content, ariaLabel: "Edit the message" });
  const done = () => field.value.trim() && askAgain(message, article, field.value);
  const back = () => {
    const fresh = show(message).article;
    article.replaceWith(fresh);
    fresh.querySelector(".actions button:last-child").focus();
  };
  field.onkeydown = (event) => (event.key === "Escape" ? back() : sends(event) && done());
  article.replaceChildren(field, actions({ "Send; later messages go": done, Cancel: back }));
  field.focus();
}

const copier = (message) => (event) => copy(event.target, message.content);
async function copy(button, text) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copyBySelection(text); // a page that came without TLS from another machine has no clipboard
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function copyBySelection(text) {
  const field = make("textarea", { value: text });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

function follow(always = isFollowing) {
  if (always) $("view").scrollTop = $("view").scrollHeight;
  $("to-end").hidden = isFollowing = always;
}

// --- The list of conversations.
function open(found) {
  stop();
  chat = found;
  $("messages").ariaLive = "off"; // what is old is not read out
  $("messages").replaceChildren();
  $("empty").hidden = false;
  $("figures").textContent = "";
  chat.messages.forEach(show);
  setTimeout(() => ($("messages").ariaLive = "polite"));
  follow(true);
  list();
  toggle("chats", false);
}

function list() {
  const rows = chats.all().map((each) => {
    const name = title(each);
    const isOpen = each.id === chat.id;
    const current = { className: "open", ariaCurrent: isOpen ? "true" : null };
    const opening = button(name, () => (isOpen ? toggle("chats", false) : open(each)), current);
    const exporting = button("↓", () => download(name, each), { title: "Export", ariaLabel: `Export ${name}` });
    const deleting = button("×", null, { title: "Delete", ariaLabel: `Delete ${name}` });
    atSecondPress(deleting, () => {
      chats.delete(each.id);
      if (isOpen) open(chats.begin());
      else list();
    });
    return make("li", {}, opening, exporting, deleting);
  });
  $("list").replaceChildren(...rows);
}

function atSecondPress(button, run) {
  const name = button.textContent;
  button.onclick = () => {
    if (button.textContent !== name) {
      run();
      $("text").focus();
    }
    button.textContent = button.textContent === name ? "Delete?" : name;
    setTimeout(() => (button.textContent = name), 4000);
  };
}

// --- Controls.
function setRunning(found) {
  running = found;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
}

function toggle(id, isShown = $(`show-${id}`).ariaExpanded !== "true") {
  $(`show-${id}`).ariaExpanded = String(isShown);
  $(id).classList.toggle("is-shown", isShown);
}

const hasKeys = matchMedia("(hover: hover)"); // on a phone Enter begins a new line
const sends = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && hasKeys.matches;

$("form").noValidate = true; // a field in folded settings could not be shown
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value;
  if (running || !text.trim() || !areSettingsRight()) return;
  $("text").value = "";
  ask(text);
});
$("text").onkeydown = (event) => {
  if (!sends(event)) return;
  event.preventDefault();
  $("form").requestSubmit();
};
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") $("show-chats").ariaExpanded === "true" ? toggle("chats", false) : stop();
});
$("messages").addEventListener("click", (event) => {
  if (event.target.matches(".copy")) copy(event.target, event.target.closest("figure").querySelector("code").textContent);
});
$("view").addEventListener("scroll", ({ target }) => {
  $("to-end").hidden = isFollowing = target.scrollHeight - target.scrollTop - target.clientHeight < 40;
});
new ResizeObserver(() => follow()).observe($("view")); // a phone's keyboard
$("to-end").onclick = () => follow(true);
$("stop").onclick = () => (stop(), $("text").focus());
$("reset").onclick = () => (open(chats.begin()), $("text").focus());
for (const id of ["chats", "settings"]) $(`show-${id}`).onclick = () => toggle(id);
$("export-all").onclick = () => download("edgekit chats", chats.all());
atSecondPress($("delete-all"), () => (chats.all().forEach((each) => chats.delete(each.id)), open(chats.begin())));
const given = () => Object.fromEntries([...FIELDS, "model"].map((id) => [id, $(id).value]));
for (const id of [...FIELDS, "model"]) $(id).addEventListener("change", () => (saveSettings(given()), look()));
$("key").addEventListener("change", () => ((server.key = $("key").value), look()));
server.asksForKey = () => (($("key-label").hidden = false), toggle("settings", true));
addEventListener("pagehide", () => running && chats.save(running.chat));
addEventListener("storage", list); // another tab

for (const id of FIELDS) $(id).value = loadSettings()[id] ?? "";
open(chat);
look();
