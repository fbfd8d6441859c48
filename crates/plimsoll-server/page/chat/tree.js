// A conversation as a tree. An edited question and a regenerated answer are new branches beside the old ones. What is shown is
// the path from the root to one leaf.

/** `{id, conversation, parent, role, content, …}`; `parent` is null for a first message. */
export class Tree {
  #messages = new Map();
  #children = new Map();

  constructor(messages = []) {
    const oldestFirst = [...messages].sort((a, b) => a.created - b.created || a.order - b.order);
    for (const message of oldestFirst) this.add(message);
  }

  get size() {
    return this.#messages.size;
  }

  get(id) {
    return this.#messages.get(id) ?? null;
  }

  all() {
    return [...this.#messages.values()];
  }

  add(message) {
    this.#messages.set(message.id, message);
    const siblings = this.#children.get(message.parent);
    if (siblings) siblings.push(message);
    else this.#children.set(message.parent, [message]);
  }

  /** The messages from the root to `leaf`. A cycle, which only an edited file can hold, ends the path. */
  path(leaf) {
    const path = [];
    const seen = new Set();
    for (let message = this.get(leaf); message !== null && !seen.has(message.id); message = this.get(message.parent)) {
      seen.add(message.id);
      path.push(message);
    }
    return path.reverse();
  }

  /** The branches at a message: itself and its siblings, oldest first. */
  siblings(message) {
    return this.#children.get(message.parent) ?? [message];
  }

  /** The newest message at or below a message: where the conversation went on last. */
  newest(id) {
    const open = [this.get(id)];
    const seen = new Set();
    let newest = open[0];
    while (open.length > 0) {
      const message = open.pop();
      if (seen.has(message.id)) continue;
      seen.add(message.id);
      if (message.created > newest.created || (message.created === newest.created && message.order > newest.order)) newest = message;
      open.push(...(this.#children.get(message.id) ?? []));
    }
    return newest.id;
  }
}
