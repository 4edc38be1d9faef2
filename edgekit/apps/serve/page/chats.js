// The conversations, kept in this browser's storage: one entry each, so that a long one is not written with every other.

const PREFIX = "edgekit.chat.";

// A browser may forbid its storage, or have no room left.
function stored(use, otherwise = null) {
  try {
    return use(localStorage);
  } catch {
    return otherwise;
  }
}

const read = (name) => stored((storage) => JSON.parse(storage.getItem(name)));
const names = () => stored((storage) => Object.keys(storage).filter((name) => name.startsWith(PREFIX)), []);
const write = (name, value) => stored((storage) => (storage.setItem(name, JSON.stringify(value)), true), false);

const isMessage = (each) => typeof each?.content === "string" && ["user", "assistant"].includes(each.role);
const isChat = (found) => typeof found?.id === "string" && Array.isArray(found.messages) && found.messages.every(isMessage);

export class Chats {
  deleted = new Set(); // an answer that ends later must not bring its conversation back

  begin() {
    return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, changed: 0, messages: [] };
  }

  // The newest first. What cannot be read is left where it is and not shown.
  all() {
    return names().map(read).filter(isChat).sort((one, other) => other.changed - one.changed);
  }

  // Return false if the browser did not keep it.
  save(chat) {
    if (this.deleted.has(chat.id) || chat.messages.length === 0) return true;
    chat.changed = Date.now();
    return write(PREFIX + chat.id, chat);
  }

  delete(id) {
    this.deleted.add(id);
    stored((storage) => storage.removeItem(PREFIX + id));
  }
}

export const loadSettings = () => read("edgekit.settings") ?? {};
export const saveSettings = (values) => write("edgekit.settings", values);

export function title(chat) {
  const first = chat.messages.find((message) => message.role === "user")?.content ?? "";
  return first.trim().split("\n")[0].slice(0, 80) || "Empty chat";
}

export function download(name, content) {
  const href = URL.createObjectURL(new Blob([JSON.stringify(content, null, 2)], { type: "application/json" }));
  const file = `${name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.json`;
  Object.assign(document.createElement("a"), { href, download: file }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}
