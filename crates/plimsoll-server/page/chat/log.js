// The messages of the open conversation, and the scrolling beside them.

import { attribute, byId, el } from '../show.js';
import { MessageView } from './message.js';

/** The log follows the end while it is this near to it. */
const NEAR_END_PX = 60;

export class Log {
  #views = new Map();
  #tree = null;
  #running = null;

  constructor(actions) {
    this.actions = actions;
    this.node = byId('chat-log');
    this.inner = byId('log-inner');
    this.button = byId('to-end');
    this.node.addEventListener('scroll', () => this.#mark());
    this.button.addEventListener('click', () => {
      this.toEnd();
      byId('chat-input').focus();
    });
    // An image that is drawn later, or a window that changes, moves the end.
    new ResizeObserver(() => this.follows && this.toEnd()).observe(this.inner);
    this.follows = true;
  }

  /** Shows a path. `running`: the message that is being written, or null. */
  show(tree, path, running, all) {
    this.#tree = tree;
    this.#running = running;
    if (all) {
      this.#views.clear();
      this.inner.replaceChildren();
    }
    const shown = new Set(path.map((message) => message.id));
    for (const [id, view] of this.#views) {
      if (shown.has(id)) continue;
      view.node.remove();
      this.#views.delete(id);
    }
    this.inner.querySelector('.hint')?.remove();
    path.forEach((message, i) => {
      const view = this.#views.get(message.id) ?? new MessageView(message, this.actions);
      this.#views.set(message.id, view);
      if (this.inner.children[i] !== view.node) this.inner.insertBefore(view.node, this.inner.children[i] ?? null);
      view.show({ siblings: tree.siblings(message), running: message === running, busy: running !== null, last: i === path.length - 1 });
    });
    if (path.length === 0) this.inner.append(el('p', { class: 'hint' }, 'Send a message to start.'));
    // A log that is busy is read out when it is whole, not token by token.
    attribute(this.node, 'aria-busy', String(running !== null));
    if (this.follows) this.toEnd();
  }

  /** Draws the message that is being written. */
  update(message) {
    const view = this.#views.get(message.id);
    if (!view || message !== this.#running) return;
    view.show({ siblings: this.#tree.siblings(message), running: true, busy: true, last: true });
    view.wait(null, false);
  }

  /** Shows what the server says about a message that has not begun. */
  wait(message, row, loading) {
    this.#views.get(message.id)?.wait(row, loading);
  }

  toEnd() {
    this.node.scrollTop = this.node.scrollHeight;
    this.follows = true;
    this.button.hidden = true;
  }

  #mark() {
    const away = this.node.scrollHeight - this.node.scrollTop - this.node.clientHeight;
    this.follows = away < NEAR_END_PX;
    this.button.hidden = this.follows;
  }

  /** After a change of branch the focus stays at the same button of the new message. */
  focusBranch(message, step) {
    const view = this.#views.get(message.id);
    const wanted = step < 0 ? view?.before : view?.after;
    (wanted?.disabled ? (step < 0 ? view.after : view.before) : wanted)?.focus();
  }
}
