// A chat over /v1/chat/completions. Everything from the model is set as text, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const messages = [];
let running = null;

const headers = () => ({
  "content-type": "application/json",
  ...($("key").value ? { authorization: `Bearer ${$("key").value}` } : {}),
});

async function loadModels() {
  const response = await fetch("v1/models", { headers: headers() });
  $("key-label").hidden = response.status !== 401 && !$("key").value;
  if (!response.ok) return;
  const chosen = $("model").value;
  const names = (await response.json()).data.map((model) => model.id);
  $("model").replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
}

async function memory() {
  const response = await fetch("metrics", { headers: headers() });
  if (!response.ok) return "";
  const found = /^edgekit_process_private_bytes (\S+)$/m.exec(await response.text());
  return found ? `, ${(Number(found[1]) / 2 ** 20).toFixed(0)} MiB of memory` : "";
}

function show(role, text) {
  const article = document.createElement("article");
  article.className = role;
  article.textContent = text;
  $("messages").append(article);
  article.scrollIntoView({ block: "end" });
  return article;
}

function request() {
  const system = $("system").value.trim();
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  return {
    model: $("model").value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: number("temperature"),
    seed: number("seed"),
    max_completion_tokens: number("tokens"),
    stream: true,
    stream_options: { include_usage: true },
  };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

async function answer() {
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  const article = show("assistant", "");
  const thinking = document.createElement("span");
  const content = document.createElement("span");
  thinking.className = "thinking";
  article.append(thinking, content);
  let first = null;
  let pieces = 0;
  let usage = null;
  let held = await memory();
  const watching = setInterval(async () => (held = await memory()), 1000);
  try {
    const began = performance.now();
    const options = { method: "POST", headers: headers(), body: JSON.stringify(request()), signal: running.signal };
    const response = await fetch("v1/chat/completions", options);
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage || usage;
      const delta = chunk.choices?.[0]?.delta ?? {};
      if (!delta.content && !delta.reasoning_content) continue;
      first ??= performance.now();
      pieces += 1;
      thinking.textContent += delta.reasoning_content ?? "";
      content.textContent += delta.content ?? "";
      const rate = pieces > 1 ? ((pieces - 1) * 1000) / (performance.now() - first) : 0;
      const times = `first token after ${(first - began).toFixed(0)} ms, ${rate.toFixed(1)} pieces/s`;
      $("figures").textContent = times + held;
    }
    if (usage && first !== null) {
      const rate = ((usage.completion_tokens - 1) * 1000) / (performance.now() - first);
      const counts = `${usage.prompt_tokens} tokens read, ${usage.completion_tokens} written`;
      const times = `first token after ${(first - began).toFixed(0)} ms, ${rate.toFixed(1)} tokens/s`;
      $("figures").textContent = `${counts}, ${times}${await memory()}`;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      article.classList.add("error");
      content.textContent += `\n${error.message}`;
    }
  } finally {
    clearInterval(watching);
    if (content.textContent && !article.classList.contains("error")) {
      messages.push({ role: "assistant", content: content.textContent });
    } else {
      messages.pop();
    }
    running = null;
    $("send").hidden = false;
    $("stop").hidden = true;
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value;
  if (running || !text.trim()) return;
  $("text").value = "";
  messages.push({ role: "user", content: text });
  show("user", text);
  answer();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("reset").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  $("messages").replaceChildren();
  $("figures").textContent = "";
});
$("key").addEventListener("change", loadModels);
loadModels();
