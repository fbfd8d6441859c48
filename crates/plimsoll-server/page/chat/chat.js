// The chat: which conversation is open, what is sent, and what is kept. The other files of this folder hold its parts.

import { announce, byId, text } from '../show.js';
import { run } from './answer.js';
import { Composer } from './composer.js';
import { Keeper } from './keeper.js';
import { MESSAGES_MAX, TITLE_CHARS_MAX } from './limits.js';
import { List } from './list.js';
import { Log } from './log.js';
import { Models } from './models.js';
import { requestBody } from './request.js';
import { Settings, settled } from './settings.js';
import { newId } from './transfer.js';
import { Tree } from './tree.js';

export class Chat {
  /** The conversation that is open; it is saved with its first message. */
  #open = null;
  #tree = new Tree();
  /** Answers that are being written, by conversation: `{tree, message, stop, requestId}`. One may go on while another chat is open. */
  #running = new Map();
  #defaults = settled(null);
  #status = null;
  #bodyMax = 4 << 20;
  /** The ids of this page's own requests begin with it. */
  #name = `page-${newId().slice(0, 7)}`;
  #asked = 0;

  /** `unlock(words)` asks for a key; `begun()` is called when an answer begins, whose progress the server reports. */
  constructor(unlock, begun) {
    this.unlock = unlock;
    this.begun = begun;
    this.keeper = new Keeper((words) => this.#notSaved(words), () => this.#list());
    this.models = new Models(() => this.#able());
    this.composer = new Composer((words, files) => this.#send(words, files), () => this.#stop());
    this.log = new Log({
      edit: (message, words) => this.#edit(message, words),
      regenerate: (message) => this.#answer(message.parent),
      resume: (message) => this.#resume(message),
      results: (message, results) => this.#results(message, results),
      branch: (message, step) => this.#branch(message, step),
      file: (id) => this.keeper.store.file(id),
    });
    this.list = new List({
      rename: (id, name) => this.keeper.rename(id, name).then(() => this.#renamed(id, name)),
      exportOne: (id) => this.keeper.exportOnes([id]),
      remove: (id) => this.#remove(id),
      search: (words, stopped) => this.keeper.store.search(words, stopped),
    });
    this.settings = new Settings((value) => this.#set(value), (value) => this.#keep(value));
    byId('chat-new').addEventListener('click', () => this.#newChat());
    byId('chat-box').addEventListener('keydown', (event) => {
      if (event.key === 'Escape') this.#stop();
    });
    /** Settles when the browser's storage has answered. */
    this.ready = this.#begin();
  }

  async #begin() {
    await this.keeper.open();
    this.#defaults = settled(await this.keeper.store.setting('defaults').catch(() => null));
    this.#fresh();
    await this.#list();
  }

  /** Whether an answer of this page is being computed. */
  get waits() {
    return this.#running.size > 0;
  }

  /** The address of what is open. */
  get address() {
    return this.#open?.saved ? `#chat/${this.#open.id}` : '#chat';
  }

  mine(request) {
    return request.request_id.startsWith(this.#name);
  }

  /** Takes in the server's state. */
  show(status, models) {
    this.#status = status;
    this.#bodyMax = status.max_body_bytes;
    if (models !== null) this.models.show(models);
    const generates = status.generates && (models === null || this.models.generates);
    byId('chat-box').hidden = !generates;
    byId('chat-note').hidden = generates;
    byId('skip-chat').hidden = !generates;
    byId('settings-open').hidden = !generates;
    this.#able();
    this.#progress();
  }

  #able() {
    this.composer.allow(this.models.takes, this.#bodyMax);
    this.settings.defaults(this.models.sampling);
  }

  /** What the server says about the answer that is open and has not begun. */
  #progress() {
    const running = this.#running.get(this.#open?.id);
    if (!running || this.#status === null) return;
    const row = this.#status.requests.find((request) => request.request_id === running.requestId) ?? null;
    const part = this.#status.models?.find((model) => model.model === running.message.model);
    this.log.wait(running.message, row, part !== undefined && part.state !== 'loaded');
  }

  /** Opens a conversation; null opens a new one. */
  async open(id) {
    if (id === null) {
      if (this.#open.saved) this.#fresh();
      return;
    }
    if (id === this.#open.id) return;
    const running = this.#running.get(id);
    const conversation = await this.keeper.store.conversation(id);
    const messages = running ? [] : await this.keeper.store.messages(id);
    if (!conversation) {
      history.replaceState(null, '', '#chat');
      this.#fresh();
      this.composer.fail('This conversation is not in this browser any more.');
      return;
    }
    this.#open = running?.conversation ?? { ...conversation, saved: true };
    this.#tree = running?.tree ?? new Tree(messages.map(reloaded));
    this.settings.show(this.#open.settings);
    if (this.#open.model && this.models.all.some((model) => model.id === this.#open.model)) this.models.choose(this.#open.model);
    this.composer.fail(null);
    this.#draw({ all: true });
    this.log.toEnd();
    this.#list();
  }

  #fresh() {
    const now = Date.now();
    this.#open = { id: newId(), title: 'New chat', named: false, created: now, updated: now, leaf: null, model: null, settings: { ...this.#defaults }, saved: false };
    this.#tree = new Tree();
    this.settings.show(this.#open.settings);
    this.composer.fail(null);
    this.#draw({ all: true });
    this.#list();
  }

  #newChat() {
    this.#fresh();
    if (location.hash !== '#chat') history.pushState(null, '', '#chat');
    this.list.unfold(false);
    this.composer.focus();
  }

  async #list() {
    const conversations = await this.keeper.list();
    this.list.show(conversations, this.#open?.id ?? null);
    byId('list-export').disabled = conversations.length === 0;
  }

  /** Draws the open conversation; `all` makes every message anew. */
  #draw({ all = false } = {}) {
    const running = this.#running.get(this.#open.id) ?? null;
    text(byId('talk-title'), this.#open.title);
    this.composer.busy(running !== null);
    this.log.show(this.#tree, this.#tree.path(this.#open.leaf), running?.message ?? null, all);
    this.#progress();
  }

  #message(role, parent, fields) {
    const blank = { content: '', reasoning: '', calls: [], files: [], callId: null, name: null, model: null, format: null, end: null, error: null, stats: null };
    return { ...blank, id: newId(), conversation: this.#open.id, parent, role, created: Date.now(), order: this.#tree.size, ...fields };
  }

  /** Adds messages to the open conversation and saves them. False when there is no room for them. */
  async #add(messages, files = []) {
    const open = this.#open;
    if (this.#tree.size + messages.length > MESSAGES_MAX) {
      this.composer.fail(`This conversation has ${this.#tree.size} messages with all versions; ${MESSAGES_MAX} are the limit. Start a new chat.`);
      return false;
    }
    if (!open.saved && !this.keeper.room()) {
      this.composer.fail(`This browser keeps ${this.keeper.count} conversations, which is the limit. Delete one first.`);
      return false;
    }
    for (const message of messages) this.#tree.add(message);
    open.leaf = messages.at(-1).id;
    open.updated = Date.now();
    if (!open.saved) {
      open.saved = true;
      history.replaceState(null, '', `#chat/${open.id}`);
    }
    await this.keeper.save({ conversation: open, messages, files });
    return true;
  }

  async #send(words, files) {
    const open = this.#open;
    const leaf = this.#tree.get(open.leaf);
    // An answer that ended before its first word is no part of the conversation: the question becomes a version of the one before.
    const empty = leaf?.role === 'assistant' && leaf.content === '' && leaf.calls.length === 0;
    const question = empty ? this.#tree.get(leaf.parent) : null;
    const parent = question?.role === 'user' ? question.parent : open.leaf;
    await this.#ask(parent, words, files.map((file) => ({ ...file, id: newId() })));
  }

  /** A question, and its answer. */
  async #ask(parent, words, files) {
    const open = this.#open;
    const known = files.map(({ blob, ...file }) => file);
    const message = this.#message('user', parent, { content: words, files: known });
    if (!open.named && parent === null) open.title = titled(words || files[0]?.name);
    const blobs = files.filter((file) => file.blob).map(({ id, blob }) => ({ id, conversation: open.id, blob }));
    if (!(await this.#answer(message.id, [message], blobs))) this.composer.restore(words, files.filter((file) => file.blob));
  }

  async #edit(message, words) {
    if (this.#running.has(this.#open.id)) return;
    await this.#ask(message.parent, words, message.files);
  }

  async #results(call, results) {
    const messages = [];
    for (const [i, content] of results.entries()) {
      const { id, name } = call.calls[i];
      messages.push(this.#message('tool', messages.at(-1)?.id ?? call.id, { content, callId: id, name, order: this.#tree.size + i }));
    }
    await this.#answer(messages.at(-1).id, messages);
  }

  /**
   * A new answer to the message `parent`: the first, or one more version. `before` are new messages that lead to it. False when there
   * is no room for them.
   */
  async #answer(parent, before = [], files = []) {
    const open = this.#open;
    if (this.#running.has(open.id)) return true;
    const format = open.settings.format === 'text' ? null : 'json';
    open.model = this.models.chosen?.id ?? null;
    const message = this.#message('assistant', parent, { model: open.model, format, order: this.#tree.size + before.length });
    // Known as running before it is saved: the button that sends must not act twice.
    const running = this.#start(message, false);
    if (!(await this.#add([...before, message], files))) {
      this.#running.delete(open.id);
      this.#draw();
      return false;
    }
    await this.#run(running);
    return true;
  }

  async #resume(message) {
    if (this.#running.has(this.#open.id)) return;
    message.end = null;
    message.error = null;
    await this.#run(this.#start(message, true));
  }

  #start(message, continues) {
    this.#asked += 1;
    const requestId = `${this.#name}-${this.#asked}`;
    const running = { conversation: this.#open, tree: this.#tree, message, continues, stop: new AbortController(), requestId };
    this.#running.set(this.#open.id, running);
    this.composer.busy(true);
    this.begun();
    return running;
  }

  async #run({ conversation, tree, message, continues, stop, requestId }) {
    const isOpen = () => this.#open === conversation;
    const drawn = () => isOpen() && this.log.update(message);
    const saved = () => this.keeper.save({ conversation, messages: [message] });
    const path = tree.path(continues ? message.id : message.parent);
    const body = () =>
      requestBody({
        path,
        settings: conversation.settings,
        model: message.model ?? 'default',
        sampling: this.models.sampling,
        bodyMax: this.#bodyMax,
        continues,
        read: (id) => this.keeper.store.file(id),
      });
    this.#draw();
    this.log.toEnd();
    this.#list();
    try {
      await run({ body, requestId, message, signal: stop.signal, drawn, saved });
    } catch (error) {
      this.unlock(error.message);
    }
    this.#running.delete(conversation.id);
    conversation.updated = Date.now();
    await saved();
    if (isOpen()) this.#draw();
    this.#list();
    announce(spokenEnd(message));
  }

  #stop() {
    this.#running.get(this.#open.id)?.stop.abort();
  }

  #branch(message, step) {
    const siblings = this.#tree.siblings(message);
    const next = siblings[siblings.indexOf(message) + step];
    if (next === undefined || this.#running.has(this.#open.id)) return;
    this.#open.leaf = this.#tree.newest(next.id);
    this.keeper.save({ conversation: this.#open });
    this.#draw();
    this.log.focusBranch(next, step);
  }

  #set(value) {
    this.#open.settings = value;
    if (this.#open.saved) this.keeper.save({ conversation: this.#open });
  }

  #keep(value) {
    this.#defaults = { ...value };
    this.keeper.store.setSetting('defaults', this.#defaults).catch((error) => this.#notSaved(error.message));
  }

  #renamed(id, name) {
    if (id === this.#open.id) {
      Object.assign(this.#open, { title: name, named: true });
      text(byId('talk-title'), name);
    }
    this.#list();
  }

  async #remove(id) {
    if (!(await this.keeper.remove(id))) return;
    this.#running.get(id)?.stop.abort();
    if (id === this.#open.id) this.#newChat();
    await this.#list();
    byId('list-search').focus();
    announce('The conversation is deleted');
  }

  #notSaved(words) {
    text(byId('list-error'), words);
    byId('list-error').hidden = false;
  }
}

/** A message whose answer was being written when the page was closed. */
function reloaded(message) {
  return message.role === 'assistant' && message.end === null ? { ...message, end: 'interrupted' } : message;
}

function titled(words) {
  const line = words.trim().replace(/\s+/g, ' ');
  return line.length > TITLE_CHARS_MAX / 2 ? `${line.slice(0, TITLE_CHARS_MAX / 2)}…` : line;
}

function spokenEnd(message) {
  if (message.end === 'error') return `The answer failed: ${message.error}`;
  return message.end === 'stopped' ? 'Request cancelled' : 'The answer is complete';
}
