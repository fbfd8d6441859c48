// Conversations in this browser: IndexedDB, and nowhere else. Every failure reaches the caller, which shows it.

const NAME = 'plimsoll';
const VERSION = 1;
/** Characters around a found word. */
const SNIPPET_BEFORE = 24;
const SNIPPET_AFTER = 56;

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const completed = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error ?? new Error('the browser ended the write'));
  });

export class Store {
  #db;

  /** Opens the database. Rejects where the browser keeps none, for example in some private windows. */
  static async open() {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      const db = request.result;
      db.createObjectStore('conversations', { keyPath: 'id' });
      db.createObjectStore('messages', { keyPath: 'id' }).createIndex('conversation', 'conversation');
      db.createObjectStore('files', { keyPath: 'id' }).createIndex('conversation', 'conversation');
      db.createObjectStore('settings', { keyPath: 'key' });
    };
    const store = new Store();
    store.#db = await done(request);
    // Another tab may bring a newer version of this app: let go of the database.
    store.#db.onversionchange = () => store.#db.close();
    return store;
  }

  /** All conversations without their messages, the last used first. */
  async conversations() {
    const all = await done(this.#read('conversations').getAll());
    return all.sort((a, b) => b.updated - a.updated);
  }

  conversation(id) {
    return done(this.#read('conversations').get(id));
  }

  messages(conversation) {
    return done(this.#read('messages').index('conversation').getAll(conversation));
  }

  files(conversation) {
    return done(this.#read('files').index('conversation').getAll(conversation));
  }

  /** A file as a Blob, or null. */
  async file(id) {
    return (await done(this.#read('files').get(id)))?.blob ?? null;
  }

  async setting(key) {
    return (await done(this.#read('settings').get(key)))?.value ?? null;
  }

  setSetting(key, value) {
    return this.#write(['settings'], (stores) => stores.settings.put({ key, value }));
  }

  /** Saves all of it or nothing. */
  save({ conversation = null, messages = [], files = [] }) {
    return this.#write(['conversations', 'messages', 'files'], (stores) => {
      if (conversation !== null) stores.conversations.put(conversation);
      for (const message of messages) stores.messages.put(message);
      for (const file of files) stores.files.put(file);
    });
  }

  remove(conversation) {
    return this.#write(['conversations', 'messages', 'files'], (stores) => {
      stores.conversations.delete(conversation);
      for (const name of ['messages', 'files']) {
        const cursor = stores[name].index('conversation').openKeyCursor(conversation);
        cursor.onsuccess = () => {
          if (!cursor.result) return;
          stores[name].delete(cursor.result.primaryKey);
          cursor.result.continue();
        };
      }
    });
  }

  /** The conversations with a message that holds `words`, each with a piece of it. `stopped()` ends the search. */
  search(words, stopped) {
    const wanted = words.toLowerCase();
    const found = new Map();
    const cursor = this.#read('messages').openCursor();
    return new Promise((resolve, reject) => {
      cursor.onerror = () => reject(cursor.error);
      cursor.onsuccess = () => {
        const at = cursor.result;
        if (!at || stopped()) return resolve(found);
        const { conversation, content } = at.value;
        const place = found.has(conversation) ? -1 : content.toLowerCase().indexOf(wanted);
        if (place >= 0) found.set(conversation, snippet(content, place, wanted.length));
        at.continue();
      };
    });
  }

  #read(name) {
    return this.#db.transaction(name, 'readonly').objectStore(name);
  }

  #write(names, change) {
    const transaction = this.#db.transaction(names, 'readwrite');
    change(Object.fromEntries(names.map((name) => [name, transaction.objectStore(name)])));
    return completed(transaction);
  }
}

function snippet(content, place, length) {
  const [from, to] = [Math.max(0, place - SNIPPET_BEFORE), place + length + SNIPPET_AFTER];
  const words = content.slice(from, to).replace(/\s+/g, ' ').trim();
  return `${from > 0 ? '…' : ''}${words}${to < content.length ? '…' : ''}`;
}

/** The same for a browser that keeps nothing: conversations last as long as the page. */
export class MemoryStore {
  #stores = { conversations: new Map(), messages: new Map(), files: new Map(), settings: new Map() };

  #of(name, conversation) {
    return [...this.#stores[name].values()].filter((one) => one.conversation === conversation);
  }

  async conversations() {
    return [...this.#stores.conversations.values()].sort((a, b) => b.updated - a.updated);
  }

  async conversation(id) {
    return this.#stores.conversations.get(id);
  }

  async messages(conversation) {
    return this.#of('messages', conversation);
  }

  async files(conversation) {
    return this.#of('files', conversation);
  }

  async file(id) {
    return this.#stores.files.get(id)?.blob ?? null;
  }

  async setting(key) {
    return this.#stores.settings.get(key) ?? null;
  }

  async setSetting(key, value) {
    this.#stores.settings.set(key, value);
  }

  async save({ conversation = null, messages = [], files = [] }) {
    if (conversation !== null) this.#stores.conversations.set(conversation.id, conversation);
    for (const message of messages) this.#stores.messages.set(message.id, message);
    for (const file of files) this.#stores.files.set(file.id, file);
  }

  async remove(conversation) {
    this.#stores.conversations.delete(conversation);
    for (const name of ['messages', 'files']) for (const one of this.#of(name, conversation)) this.#stores[name].delete(one.id);
  }

  async search(words) {
    const wanted = words.toLowerCase();
    const found = new Map();
    for (const { conversation, content } of this.#stores.messages.values()) {
      const place = content.toLowerCase().indexOf(wanted);
      if (place >= 0 && !found.has(conversation)) found.set(conversation, snippet(content, place, wanted.length));
    }
    return found;
  }
}
