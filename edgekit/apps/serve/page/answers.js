// What the server says: its models, its memory, and the pieces of an answer.

export class Refused extends Error {} // its message is for the user

export class Server {
  key = "";
  asksForKey = () => {};

  get headers() {
    return { "content-type": "application/json", ...(this.key ? { authorization: `Bearer ${this.key}` } : {}) };
  }

  // The models that write text; null where the server refuses to tell. Fails where no server is.
  async models() {
    const response = await fetch("v1/models", { headers: this.headers, signal: AbortSignal.timeout(10_000) });
    if (response.status === 401) this.asksForKey();
    if (!response.ok) return null;
    return (await response.json()).data.filter((model) => model.capabilities.includes("completion"));
  }

  async memory() {
    const response = await fetch("metrics", { headers: this.headers, signal: AbortSignal.timeout(5000) });
    const found = /^edgekit_process_private_bytes (\S+)$/m.exec(await response.text());
    return found ? `, ${(Number(found[1]) / 2 ** 20).toFixed(0)} MiB of memory` : "";
  }

  async *chunks(body, signal) {
    const asked = { method: "POST", headers: this.headers, body: JSON.stringify(body), signal };
    const response = await fetch("v1/chat/completions", asked);
    if (!response.ok) throw await this.refusal(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) throw new Refused("The connection ended before the answer did. Retry asks again.");
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (event === "data: [DONE]") return;
        if (!event.startsWith("data: ")) continue;
        const chunk = JSON.parse(event.slice(6));
        if (chunk.error) throw new Refused(sentence(chunk.error.message));
        yield chunk;
      }
    }
  }

  async refusal(response) {
    const { message } = (await response.json().catch(() => null))?.error ?? {};
    if (response.status === 401) {
      this.asksForKey();
      return new Refused("The server asks for a key. Write it under Settings, then Retry.");
    }
    const wait = response.headers.get("retry-after");
    const again = wait ? ` Retry in ${wait} s.` : "";
    return new Refused(sentence(message ?? `the server answered with status ${response.status}`) + again);
  }
}

const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

// What is sent of a conversation. An answer that failed before its first word is not. Many chat templates want the
// roles to alternate.
export function sent(system, messages) {
  const found = system ? [{ role: "system", content: system }] : [];
  for (const { role, content } of messages) {
    if (found.at(-1)?.role === role) found.at(-1).content += `\n\n${content}`;
    else if (content) found.push({ role, content });
  }
  return found;
}
