// Where a message is written: its text and its files, by button, by paste and by drop.

import { announce, attribute, byId, bytes, el, text } from '../show.js';
import { ACCEPT, kindOf, thumbnail } from './attach.js';
import { icon } from './icons.js';
import { FILES_MAX, MESSAGE_CHARS_MAX } from './limits.js';

export class Composer {
  /** `{name, type, size, kind, format, blob}` each. */
  #files = [];
  #takes = ['text'];
  #bodyMax = 4 << 20;
  #busy = false;

  /** `send(text, files)` is called with a message; `stop()` when the answer shall end. */
  constructor(send, stop) {
    this.input = byId('chat-input');
    this.picker = byId('chat-file');
    byId('chat-form').addEventListener('submit', (event) => {
      event.preventDefault();
      this.#submit(send);
    });
    this.input.addEventListener('keydown', (event) => {
      if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#submit(send);
      }
    });
    this.input.addEventListener('input', () => this.#grow());
    byId('chat-stop').addEventListener('click', stop);
    byId('chat-pick').addEventListener('click', () => this.picker.click());
    this.picker.addEventListener('change', () => {
      this.add([...this.picker.files]);
      this.picker.value = '';
    });
    this.input.addEventListener('paste', (event) => {
      const files = [...event.clipboardData.files];
      if (files.length === 0) return;
      event.preventDefault();
      this.add(files);
    });
    this.#dropped(byId('chat-box'));
  }

  #dropped(box) {
    const holdsFiles = (event) => event.dataTransfer?.types.includes('Files');
    // A file that is dropped beside the chat must not replace the page.
    for (const name of ['dragover', 'drop']) addEventListener(name, (event) => holdsFiles(event) && event.preventDefault());
    box.addEventListener('dragover', (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      box.classList.add('dropping');
    });
    box.addEventListener('dragleave', (event) => {
      if (!box.contains(event.relatedTarget)) box.classList.remove('dropping');
    });
    box.addEventListener('drop', (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      box.classList.remove('dropping');
      this.add([...event.dataTransfer.files]);
    });
  }

  /** Takes in what the model takes and how much the server takes. */
  allow(takes, bodyMax) {
    this.#takes = takes;
    this.#bodyMax = bodyMax;
    attribute(this.picker, 'accept', takes.map((kind) => ACCEPT[kind]).join(','));
  }

  async add(files) {
    this.fail(null);
    for (const file of files) {
      try {
        if (this.#files.length >= FILES_MAX) throw new Error(`A message takes ${FILES_MAX} files at most.`);
        const kind = await kindOf(file, this.#takes, this.#bodyMax);
        const added = { name: file.name || `pasted.${file.type.split('/').at(-1)}`, type: file.type, size: file.size, ...kind, blob: file };
        await this.#show(added);
        this.#files.push(added);
      } catch (error) {
        this.fail(error.message);
      }
    }
    byId('chat-files').hidden = this.#files.length === 0;
    this.input.focus();
  }

  async #show(file) {
    const canvas = file.kind === 'image' ? el('canvas', { class: 'thumb', 'aria-hidden': 'true' }) : null;
    if (canvas) {
      await thumbnail(file.blob, canvas).catch(() => {
        throw new Error(`${file.name} cannot be read as an image by this browser.`);
      });
    }
    const remove = el('button', { type: 'button', class: 'quiet icon-button', 'aria-label': `Remove ${file.name}` }, icon('close'));
    const node = el('li', { class: 'file' }, ...(canvas ? [canvas] : []), el('span', { class: 'file-name' }, `${file.name} (${bytes(file.size)})`), remove);
    remove.addEventListener('click', () => {
      this.#files.splice(this.#files.indexOf(file), 1);
      node.remove();
      byId('chat-files').hidden = this.#files.length === 0;
      announce(`${file.name} removed`);
      this.input.focus();
    });
    byId('chat-files').append(node);
  }

  #submit(send) {
    const words = this.input.value.trim();
    if (this.#busy || (words === '' && this.#files.length === 0)) return;
    if (words.length > MESSAGE_CHARS_MAX) {
      this.fail(`The message has ${words.length} characters, more than the limit of ${MESSAGE_CHARS_MAX}.`);
      return;
    }
    const files = this.#files;
    this.fail(null);
    this.clear();
    send(words, files);
  }

  /** Puts back what could not be sent. */
  async restore(words, files) {
    if (this.input.value === '') this.input.value = words;
    for (const file of files) await this.#show(file).then(() => this.#files.push(file));
    byId('chat-files').hidden = this.#files.length === 0;
    this.#grow();
  }

  clear() {
    this.input.value = '';
    this.#files = [];
    byId('chat-files').replaceChildren();
    byId('chat-files').hidden = true;
    this.#grow();
  }

  focus() {
    this.input.focus();
  }

  fail(words) {
    text(byId('chat-error'), words ?? '');
    byId('chat-error').hidden = words === null;
  }

  /** Shows the button that stops in place of the one that sends. */
  busy(busy) {
    this.#busy = busy;
    const [send, stop] = [byId('chat-send'), byId('chat-stop')];
    const focused = document.activeElement;
    send.hidden = busy;
    stop.hidden = !busy;
    if (busy && focused === send) stop.focus();
    if (!busy && focused === stop) this.input.focus();
  }

  #grow() {
    this.input.style.height = 'auto';
    this.input.style.height = `${this.input.scrollHeight + 2}px`;
  }
}
