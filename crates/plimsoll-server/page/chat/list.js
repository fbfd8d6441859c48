// The list of conversations: open, search, rename, export, delete.

import { announce, attribute, byId, el, text } from '../show.js';
import { icon } from './icons.js';
import { TITLE_CHARS_MAX } from './limits.js';

/** A search begins when no key was pressed for this long. */
const TYPING_MS = 150;

class Row {
  constructor(id, actions) {
    this.id = id;
    this.name = el('span', { class: 'list-name' });
    this.found = el('span', { class: 'detail' });
    this.link = el('a', { href: `#chat/${id}` }, this.name, this.found);
    const button = (name, label, action) => {
      const made = el('button', { type: 'button', class: 'icon-button', title: label }, icon(name));
      made.addEventListener('click', action);
      return made;
    };
    this.buttons = [
      ['Rename', button('edit', 'Rename', () => this.#edit(actions))],
      ['Export', button('export', 'Export', () => actions.exportOne(id))],
      ['Delete', button('trash', 'Delete', () => actions.remove(id))],
    ];
    this.tools = el('span', { class: 'list-tools' }, ...this.buttons.map(([, made]) => made));
    this.node = el('li', { 'data-id': id }, this.link, this.tools);
  }

  show(conversation, open, found) {
    this.title = conversation.title;
    text(this.name, conversation.title);
    attribute(this.link, 'title', conversation.title);
    text(this.found, found);
    this.found.hidden = found === '';
    for (const [label, button] of this.buttons) attribute(button, 'aria-label', `${label} ${conversation.title}`);
    if (open) attribute(this.link, 'aria-current', 'true');
    else this.link.removeAttribute('aria-current');
  }

  #edit(actions) {
    const field = el('input', { type: 'text', class: 'list-rename', maxlength: TITLE_CHARS_MAX, 'aria-label': `New name of ${this.title}` });
    field.value = this.title;
    let ended = false;
    const end = (save) => {
      if (ended) return;
      ended = true;
      field.replaceWith(this.link);
      this.tools.hidden = false;
      const name = field.value.trim();
      if (save && name !== '' && name !== this.title) actions.rename(this.id, name);
      this.buttons[0][1].focus();
    };
    field.addEventListener('keydown', (event) => {
      if (!['Enter', 'Escape'].includes(event.key) || event.isComposing) return;
      // The focus goes to a button, which must not take the same key.
      event.preventDefault();
      event.stopPropagation();
      end(event.key === 'Enter');
    });
    field.addEventListener('blur', () => end(true));
    this.link.replaceWith(field);
    this.tools.hidden = true;
    field.focus();
    field.select();
  }
}

export class List {
  #rows = new Map();
  #conversations = [];
  #found = null;
  #round = 0;
  #typing = null;
  #open = null;

  /** `actions`: `rename(id, name)`, `exportOne(id)`, `remove(id)`, `search(words, stopped)`. */
  constructor(actions) {
    this.actions = actions;
    this.node = byId('list');
    this.items = byId('list-items');
    this.field = byId('list-search');
    this.field.addEventListener('input', () => {
      clearTimeout(this.#typing);
      this.#typing = setTimeout(() => this.#search(), TYPING_MS);
    });
    this.field.addEventListener('keydown', (event) => {
      // The first Escape empties the field, the next one closes the list.
      if (event.key === 'Escape' && this.field.value !== '') event.stopPropagation();
    });
    byId('list-open').addEventListener('click', () => this.unfold(!this.node.classList.contains('open')));
    byId('list-close').addEventListener('click', () => this.unfold(false));
    this.node.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') this.unfold(false);
    });
    this.items.addEventListener('click', (event) => {
      if (event.target.closest('a')) this.unfold(false);
    });
    addEventListener('keydown', (event) => {
      if (event.key.toLowerCase() !== 'k' || !(event.ctrlKey || event.metaKey) || document.querySelector('dialog[open]')) return;
      event.preventDefault();
      this.unfold(true);
      this.field.select();
    });
  }

  /** On a narrow screen the list covers the chat while it is open. */
  unfold(open) {
    const was = this.node.classList.contains('open');
    this.node.classList.toggle('open', open);
    attribute(byId('list-open'), 'aria-expanded', String(open));
    if (was && !open && this.node.contains(document.activeElement)) byId('list-open').focus();
    if (open && !was) this.field.focus();
  }

  show(conversations, open) {
    this.#conversations = conversations;
    this.#open = open;
    this.#draw();
  }

  async #search() {
    const words = this.field.value.trim();
    this.#round += 1;
    const round = this.#round;
    const found = words === '' ? null : await this.actions.search(words, () => round !== this.#round);
    if (round !== this.#round) return;
    this.#found = found;
    this.#draw();
    if (found) announce(`${this.items.childElementCount} conversations found`);
  }

  #draw() {
    const words = this.field.value.trim().toLowerCase();
    const inTitle = (one) => one.title.toLowerCase().includes(words);
    const shown = this.#conversations.filter((one) => this.#found === null || this.#found.has(one.id) || inTitle(one));
    const ids = new Set(shown.map((one) => one.id));
    for (const [id, row] of this.#rows) {
      if (ids.has(id)) continue;
      row.node.remove();
      this.#rows.delete(id);
    }
    shown.forEach((one, i) => {
      const row = this.#rows.get(one.id) ?? new Row(one.id, this.actions);
      this.#rows.set(one.id, row);
      row.show(one, one.id === this.#open, this.#found?.get(one.id) ?? '');
      if (this.items.children[i] !== row.node) this.items.insertBefore(row.node, this.items.children[i] ?? null);
    });
    const none = byId('list-none');
    none.hidden = shown.length > 0;
    text(none, this.#found === null ? 'No conversations yet.' : 'No conversation holds these words.');
  }
}
