// Keeps conversations in the browser's storage, tells other tabs, and shows what could not be kept.

import { announce, byId, text } from '../show.js';
import { CONVERSATIONS_MAX } from './limits.js';
import { MemoryStore, Store } from './store.js';
import { download, exported, imported } from './transfer.js';

export class Keeper {
  store = new MemoryStore();
  count = 0;
  /** Conversations that were deleted here: an answer that is still being written must not bring one back. */
  #removed = new Set();

  /** `failed(words)` says that something is not kept; `changed()` is called when the list is another. */
  constructor(failed, changed) {
    this.failed = failed;
    this.changed = changed;
    const file = byId('list-file');
    byId('list-import').addEventListener('click', () => file.click());
    file.addEventListener('change', async () => {
      if (file.files[0]) await this.#import(file.files[0]);
      file.value = '';
    });
    byId('list-export').addEventListener('click', async () => this.exportOnes((await this.list()).map((one) => one.id)));
    this.channel = new BroadcastChannel('plimsoll');
    this.channel.onmessage = () => this.changed();
  }

  async open() {
    try {
      this.store = await Store.open();
    } catch (error) {
      this.failed(`This browser keeps no conversations (${error.message}). They last until the page is closed.`);
    }
  }

  async list() {
    try {
      const all = await this.store.conversations();
      this.count = all.length;
      return all;
    } catch (error) {
      this.failed(`The conversations cannot be read: ${error.message}`);
      return [];
    }
  }

  /** Whether one more conversation may be kept. */
  room() {
    return this.count < CONVERSATIONS_MAX;
  }

  /** Saves what is given; a failure is shown, and the chat goes on. */
  async save({ conversation, messages = [], files = [] }) {
    const { saved, ...kept } = conversation;
    if (!saved || this.#removed.has(conversation.id)) return;
    try {
      await this.store.save({ conversation: kept, messages, files });
      this.channel.postMessage('changed');
    } catch (error) {
      this.failed(`Not saved: ${error.message}`);
    }
  }

  async rename(id, title) {
    const conversation = await this.store.conversation(id);
    if (conversation) await this.save({ conversation: { ...conversation, title, named: true, saved: true } });
  }

  /** Deletes a conversation if the user agrees. Whether it is gone. */
  async remove(id) {
    const conversation = await this.store.conversation(id);
    const title = conversation?.title ?? 'this conversation';
    if (!(await agreed('Delete this conversation?', `“${title}” and its files are deleted from this browser. This cannot be undone.`))) return false;
    this.#removed.add(id);
    try {
      await this.store.remove(id);
      this.channel.postMessage('changed');
      return true;
    } catch (error) {
      this.#removed.delete(id);
      this.failed(`Not deleted: ${error.message}`);
      return false;
    }
  }

  async exportOnes(ids) {
    try {
      const day = new Date().toISOString().slice(0, 10);
      download(await exported(this.store, ids), `plimsoll-conversations-${day}.json`);
    } catch (error) {
      this.failed(`Not exported: ${error.message}`);
    }
  }

  async #import(file) {
    byId('list-error').hidden = true;
    try {
      const count = await imported(this.store, file, CONVERSATIONS_MAX - this.count);
      announce(count === 1 ? '1 conversation is imported' : `${count} conversations are imported`);
      this.channel.postMessage('changed');
    } catch (error) {
      this.failed(`Not imported: ${error.message}`);
    }
    this.changed();
  }
}

/** Asks in a dialog. Whether the answer is yes. */
function agreed(title, words) {
  const dialog = byId('ask');
  text(byId('ask-title'), title);
  text(byId('ask-words'), words);
  dialog.returnValue = 'no';
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener('close', () => resolve(dialog.returnValue === 'yes'), { once: true });
  });
}
