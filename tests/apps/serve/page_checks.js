// Runs inside the chat page, in a browser; test_page.py reads `globalThis.checked` afterwards.

const find = (selector) => [...document.querySelectorAll(selector)];
const texts = (selector) => find(selector).map((each) => each.textContent);

function equal(found, right) {
  const [one, other] = [JSON.stringify(found), JSON.stringify(right)];
  if (one !== other) throw new Error(`${one} instead of ${other}`);
}

async function until(holds) {
  for (let tries = 0; !holds(); tries++) {
    if (tries > 400) throw new Error(`never: ${holds}`);
    await new Promise((done) => setTimeout(done, 50));
  }
}

const link = (address, label) => `<a href="${address}" title="${address}" target="_blank" rel="noopener noreferrer">${label}</a>`;
const code = (language, text) =>
  `<figure class="code"><figcaption><span>${language}</span><button type="button" class="copy">Copy</button></figcaption>` +
  `<pre tabindex="0"><code>${text}</code></pre></figure>`;

const MARKDOWN = {
  "# Head **b**\n\ntext *em* __st__ ~~d~~ `co*de`":
    "<h3>Head <strong>b</strong></h3><p>text <em>em</em> <strong>st</strong> <del>d</del> <code>co*de</code></p>",
  "***both*** and **use `a*b` x** 2 * 3 * 4 snake_case_name **open":
    "<p><strong><em>both</em></strong> and <strong>use <code>a*b</code> x</strong> 2 * 3 * 4 snake_case_name **open</p>",
  "- a\n  1. b\n- c\n\n  more": "<ul><li><p>a</p><ol start=\"1\"><li><p>b</p></li></ol></li><li><p>c</p><p>more</p></li></ul>",
  "> q\n\n---": "<blockquote><p>q</p></blockquote><hr>",
  "```py\nif x:\n\n    y(`'`)\n```\nafter": `${code("py", "if x:\n\n    y(`'`)")}<p>after</p>`,
  "1. x\n   ```\n   z\n     w\n   ```": `<ol start="1"><li><p>x</p>${code("", "z\n  w")}</li></ol>`,
  "[ok](https://a.example/x_(y)) [bad](javascript:alert(1)) ![i](data:x) see https://b.example/c.":
    `<p>${link("https://a.example/x_(y)", "ok")} [bad](javascript:alert(1)) ![i](data:x) see ${link("https://b.example/c", "https://b.example/c")}.</p>`,
  "<img src=x onerror=alert(1)> a<br>b \\*no\\*": "<p>&lt;img src=x onerror=alert(1)&gt; a<br>b *no*</p>",
};

async function markdown() {
  const { MarkdownView } = await import("./markdown.js");
  const box = document.createElement("div");
  const shown = (steps) => {
    box.replaceChildren();
    const view = new MarkdownView(box);
    for (const text of steps) view.show(text);
    return box.innerHTML;
  };
  for (const [text, html] of Object.entries(MARKDOWN)) {
    equal(shown([text]), html);
    equal(shown([...text].map((_, place) => text.slice(0, place + 1))), html); // as it grows
  }
  shown(["| a | b |\n|---|--:|\n| `x\\|y` | 2 |\nend"]);
  equal([...box.querySelectorAll("th, td")].map((cell) => cell.textContent + cell.className), ["a", "bright", "x|y", "2right"]);
  // Whatever a model repeats, its text is read in a time that grows with its length.
  for (const part of ["*a ", "[", "> ", "` ", "- ", "|", "_", "<http:", "  - x\n", "# ", "!["]) shown([part.repeat(20_000)]);
  let reason = "";
  try {
    box.innerHTML = "text";
  } catch (error) {
    reason = error.message;
  }
  equal(reason.includes("TrustedHTML"), true);
}

const isIdle = () => document.getElementById("stop").hidden;

async function ask(text) {
  document.getElementById("text").value = text;
  document.getElementById("form").requestSubmit();
  await until(isIdle);
}

async function conversation() {
  const fetched = globalThis.fetch;
  globalThis.fetch = () => Promise.reject(new TypeError("no server"));
  document.getElementById("tokens").value = "4";
  await ask("the cat");
  equal(texts(".note.error").map((note) => note.includes("Your message is kept")), [true]);
  globalThis.fetch = fetched;
  find("article.assistant .actions button").at(-1).click(); // Retry
  await until(() => isIdle() && texts(".thinking div").join("") && !texts(".note.error").length);
  equal(find(".thinking")[0].open, false);
  await ask("cat ".repeat(600));
  equal(texts(".note.error").map((note) => note.includes("context")), [true]);
  document.getElementById("temperature").value = "7"; // the field says what is wrong, and the message stays
  await ask("more");
  equal([document.getElementById("text").value, find("article").length, find("#settings.is-shown").length], ["more", 4, 1]);
  document.getElementById("temperature").value = "";
  find("article.user .actions button")[1].click(); // Edit
  document.querySelector("article textarea").value = "a mat";
  find("article textarea + .actions button")[0].click();
  await until(() => isIdle() && texts(".thinking div").join(""));
  equal(texts("article.user .content"), ["a mat"]);
  equal(Object.keys(localStorage).filter((name) => name.startsWith("edgekit.chat.")).length, 1);
}

globalThis.checked = null;
markdown().then(conversation).then(() => "right", String).then((result) => (globalThis.checked = result));
