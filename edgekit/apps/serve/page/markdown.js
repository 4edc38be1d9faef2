// Markdown of a model as elements. Every text becomes a text node: there is no way from here to HTML.

// No pattern may try a text in more ways than its length: a model can write anything.
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const DEEPEST = 8; // lists in lists, quotes in quotes: deeper ones stay text, whatever a model writes

export function make(tag, properties = {}, ...children) {
  const found = Object.assign(document.createElement(tag), properties);
  found.append(...children);
  return found;
}

const begins = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));

function until(lines, at, isPast) {
  while (at < lines.length && !isPast(lines[at], at)) at++;
  return at;
}

// --- Blocks: each is {kind, from, to, ...}, with the numbers of its lines.
function fence(lines, at) {
  const [, indent, mark, language] = FENCE.exec(lines[at]);
  const code = [];
  let next = at + 1;
  for (; next < lines.length; next++) {
    const line = lines[next];
    const end = /^ {0,3}(`{3,}|~{3,})[ \t]*$/.exec(line);
    if (end && end[1][0] === mark[0] && end[1].length >= mark.length) break;
    code.push(line.startsWith(indent) ? line.slice(indent.length) : line.trimStart());
  }
  return { kind: "code", code: code.join("\n"), language: language.trim().split(/\s/)[0], to: next + 1 };
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && DELIMITERS.test(lines[at + 1])
    && cells(lines[at]).length === cells(lines[at + 1]).length;
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines, at) {
  const aligned = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") && cell[0] !== ":" ? "right" : ""));
  const to = until(lines, at + 2, (line) => !line.includes("|"));
  return { kind: "table", head: cells(lines[at]), rows: lines.slice(at + 2, to).map(cells), aligned, to };
}

function quote(lines, at) {
  const to = until(lines, at, (line) => !QUOTE.test(line));
  return { kind: "quote", lines: lines.slice(at, to).map((line) => line.replace(QUOTE, "")), to };
}

function list(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isNumbered = /\d/.test(mark);
  const items = [];
  let to = at;
  let inner = 0; // the column where the text of the item begins
  let isBlank = false;
  for (; to < lines.length; to++) {
    const line = lines[to];
    const item = ITEM.exec(line);
    const column = line.search(/\S/);
    if (column < 0) {
      items.at(-1).push("");
    } else if (item && item[1].length < indent.length + 2 && item[1].length < (inner || Infinity)) {
      if (/\d/.test(item[2]) !== isNumbered || RULE.test(line)) break;
      inner = item[0].length;
      items.push([line.slice(inner)]);
    } else if (column >= Math.min(inner, indent.length + 2)) {
      items.at(-1).push(line.slice(Math.min(column, inner)));
    } else if (isBlank || begins(line)) {
      break;
    } else {
      items.at(-1).push(line.trimStart());
    }
    isBlank = column < 0;
  }
  return { kind: "list", items, start: isNumbered ? parseInt(mark, 10) : null, to };
}

function paragraph(lines, at) {
  const to = until(lines, at + 1, (line, next) => !line.trim() || begins(line) || isTable(lines, next));
  return { kind: "text", text: lines.slice(at, to).join("\n"), to };
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return fence(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2].trim(), to: at + 1 };
  if (RULE.test(line)) return { kind: "rule", to: at + 1 };
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at);
  return isTable(lines, at) ? table(lines, at) : paragraph(lines, at);
}

function blocks(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    at = until(lines, at, (line) => line.trim());
    if (at === lines.length) break;
    const block = blockAt(lines, at, depth);
    found.push({ ...block, from: at });
    at = block.to;
  }
  return found;
}

const BUILD = {
  code: ({ code, language }) => {
    const copy = make("button", { type: "button", className: "copy", textContent: "Copy" });
    const bar = make("figcaption", {}, make("span", { textContent: language }), copy);
    return make("figure", { className: "code" }, bar, make("pre", { tabIndex: 0 }, make("code", { textContent: code })));
  },
  heading: ({ level, text }) => inline(make(`h${Math.min(6, level + 2)}`), text), // the page has h1 and h2
  rule: () => make("hr"),
  quote: ({ lines }, depth) => make("blockquote", {}, ...built(lines, depth + 1)),
  list: ({ items, start }, depth) => {
    const rows = items.map((lines) => make("li", {}, ...built(lines, depth + 1)));
    return start === null ? make("ul", {}, ...rows) : make("ol", { start }, ...rows);
  },
  table: ({ head, rows, aligned }) => {
    const cell = (tag, texts, place) => inline(make(tag, { className: aligned[place] }), texts[place] ?? "");
    const row = (tag, texts) => make("tr", {}, ...head.map((_, place) => cell(tag, texts, place)));
    const body = make("tbody", {}, ...rows.map((texts) => row("td", texts)));
    // A table wider than a phone scrolls by itself; with the keyboard too.
    return make("div", { className: "table", tabIndex: 0 }, make("table", {}, make("thead", {}, row("th", head)), body));
  },
  text: ({ text }) => inline(make("p"), text),
};

const built = (lines, depth) => blocks(lines, depth).map((block) => BUILD[block.kind](block, depth));

// --- Text inside a block.
const SPECIAL = /[\\`*_~[!<h]/g;
const LINK = /!?\[((?:[^[\]\\]|\\.)*)\]\( ?<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?: "[^"]*")? ?\)/y;
const ADDRESS = /<?(https?:\/\/[^\s<>"`]{1,2000})>?/iy;
const BREAK = /<br\s*\/?>/iy;
const MARKS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

function matched(pattern, text, from) {
  pattern.lastIndex = from;
  return pattern.exec(text);
}

function link(address, label) {
  if (!/^https?:\/\//i.test(address) || !URL.canParse(address)) return null; // no script, no file
  return make("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer" }, label);
}

// Readers of what a character may begin: [node, end], or null where it is plain text.

function escaped(text, from) {
  return /[!-/:-@[-`{-~]/.test(text[from + 1] ?? "") ? [text[from + 1], from + 2] : null;
}

function code(text, from, unclosed) {
  const [run] = matched(/`+/y, text, from);
  const begin = from + run.length;
  const end = unclosed.has(run.length) ? -1 : closing(text, run, begin);
  if (end < 0) {
    unclosed.add(run.length); // nothing is searched twice
    return [run, begin];
  }
  const inner = text.slice(begin, end).replaceAll("\n", " ");
  const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
  return [make("code", { textContent: isPadded ? inner.slice(1, -1) : inner }), end + run.length];
}

function closing(text, run, from) {
  for (let end = text.indexOf(run, from); end >= 0; end = text.indexOf(run, end)) {
    const [found] = matched(/`+/y, text, end);
    if (found.length === run.length) return end;
    end += found.length;
  }
  return -1;
}

function labelled(text, from) {
  const parts = matched(LINK, text, from);
  const node = parts && link(parts[2], parts[1].replace(/\\(.)/g, "$1") || parts[2]);
  return node && [node, from + parts[0].length];
}

function address(text, from) {
  if (matched(BREAK, text, from)) return [make("br"), BREAK.lastIndex];
  const parts = /\w/.test(text[from - 1] ?? " ") ? null : matched(ADDRESS, text, from);
  if (!parts) return null;
  if (/^<.*>$/.test(parts[0])) return [link(parts[1], parts[1]) ?? parts[0], from + parts[0].length];
  const bare = parts[1].replace(/(?:[.,;:!?'*_~\]]|\)(?<!\([^)]*\)))+$/, ""); // the end of a sentence is not part of it
  const node = parts[0].startsWith("<") ? null : link(bare, bare);
  return node && [node, from + bare.length];
}

const READERS = { "\\": escaped, "`": code, "[": labelled, "!": labelled, "<": address, h: address };

function inline(root, text) {
  const open = [{ mark: "", element: root }]; // emphasis that is not closed yet
  const unclosed = new Set(); // lengths of the runs of backquotes that have no end
  let at = 0;
  const add = (node, from, to) => {
    open.at(-1).element.append(text.slice(at, from), node);
    at = SPECIAL.lastIndex = to;
  };
  const undo = () => {
    const { mark, element } = open.pop();
    element.replaceWith(mark, ...element.childNodes);
  };
  const emphasise = (char, from) => {
    const isThree = text[from + 2] === char && open.at(-1).mark === char; // the end of ***both***
    const mark = text[from + 1] === char && !isThree ? char + char : char;
    const to = (SPECIAL.lastIndex = from + mark.length);
    const [before, after] = [text[from - 1] ?? " ", text[to] ?? " "];
    if (!MARKS[mark] || (char === "_" && /\w/.test(before) && /\w/.test(after))) return;
    const place = open.findLastIndex((each) => each.mark === mark);
    if (place > 0 && /\S/.test(before)) {
      add("", from, to);
      while (open.length > place + 1) undo();
      open.pop();
    } else if (/\S/.test(after) && !(char === "_" && /\w/.test(before)) && open.length < DEEPEST) {
      const element = make(MARKS[mark]);
      add(element, from, to);
      open.push({ mark, element });
    }
  };

  SPECIAL.lastIndex = 0;
  for (let found = SPECIAL.exec(text); found; found = SPECIAL.exec(text)) {
    const from = found.index;
    const next = SPECIAL.lastIndex;
    if (READERS[found[0]]) {
      const read = READERS[found[0]](text, from, unclosed);
      SPECIAL.lastIndex = next;
      if (read) add(read[0], from, read[1]);
    } else {
      emphasise(found[0], from);
    }
  }
  add("", text.length, text.length);
  while (open.length > 1) undo();
  return root;
}

// --- An answer that grows. Only its last block is built again.
export class MarkdownView {
  done = 0; // characters whose blocks are final
  last = []; // the elements of the last block

  constructor(element) {
    this.element = element;
  }

  show(text) {
    const rest = text.slice(this.done);
    const lines = rest.split(/\r?\n/);
    const found = blocks(lines, 0);
    for (const each of this.last) each.remove();
    const made = found.map((block) => BUILD[block.kind](block, 0));
    this.element.append(...made);
    this.last = made.slice(-1);
    if (found.length < 2) return;
    let offset = 0;
    for (let line = 0; line < found.at(-1).from; line++) offset = rest.indexOf("\n", offset) + 1;
    this.done += offset;
  }
}
