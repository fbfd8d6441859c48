// A small chat over `/v1/chat/completions`: streamed, to be stopped, with an image if somebody wants. What it keeps is bounded by
// the server's own limit on a body.

import { announce, byId, bytes, el, number, text } from './show.js';
import { ask } from './feed.js';

const MESSAGES_MAX = 60;
/** One event of a stream is 16 KiB at most; a line longer than this is none. */
const LINE_MAX = 1 << 20;
const THUMBNAIL = 96;

export class Chat {
  /** What was said, as the API wants it. */
  #messages = [];
  #image = null;
  #answering = null;
  #bodyMax = 4 << 20;
  #images = false;
  /** The ids of this page's own requests begin with it. */
  #name = `page-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
  #asked = 0;

  constructor(unlock) {
    this.unlock = unlock;
    this.log = byId('chat-log');
    this.input = byId('chat-input');
    this.file = byId('chat-image');
    byId('chat-form').addEventListener('submit', (event) => {
      event.preventDefault();
      this.#send();
    });
    this.input.addEventListener('keydown', (event) => {
      if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    this.input.addEventListener('paste', (event) => {
      const image = [...event.clipboardData.files].find((file) => file.type.startsWith('image/'));
      if (image && this.#images) {
        event.preventDefault();
        this.#pick(image);
      }
    });
    byId('chat-box').addEventListener('keydown', (event) => {
      if (event.key === 'Escape') this.#answering?.abort();
    });
    byId('chat-stop').addEventListener('click', () => this.#answering?.abort());
    byId('chat-pick').addEventListener('click', () => this.file.click());
    this.file.addEventListener('change', () => this.file.files[0] && this.#pick(this.file.files[0]));
    byId('chat-unpick').addEventListener('click', () => {
      this.#unpick();
      byId('chat-pick').focus();
    });
    byId('chat-new').addEventListener('click', () => this.#begin());
    this.#welcome();
  }

  mine(request) {
    return request.request_id.startsWith(this.#name);
  }

  /** Takes in what the server can do. */
  show(status) {
    this.#bodyMax = status.max_body_bytes;
    byId('chat-box').hidden = !status.generates;
    byId('chat-note').hidden = status.generates;
    byId('skip-chat').hidden = !status.generates;
    byId('chat-pick').hidden = !status.images;
    this.#images = status.images;
    this.model = status.model;
  }

  #welcome() {
    this.log.replaceChildren(el('p', { class: 'note hint' }, 'Send a message to start.'));
  }

  #begin() {
    this.#answering?.abort();
    this.#messages = [];
    this.#unpick();
    this.#fail(null);
    this.#welcome();
    this.input.focus();
  }

  #fail(words) {
    text(byId('chat-error'), words ?? '');
    byId('chat-error').hidden = words === null;
  }

  async #pick(file) {
    this.#fail(null);
    // In a data URL three bytes become four characters.
    const most = Math.floor(((this.#bodyMax - 4096) * 3) / 4);
    if (file.size > most) {
      this.#fail(`${file.name} has ${bytes(file.size)}; this server takes bodies of ${bytes(this.#bodyMax)}, so images of at most ${bytes(most)} (--max-body-bytes).`);
      return;
    }
    try {
      await thumbnail(file, byId('chat-thumb'));
      this.#image = { name: file.name, url: await dataUrl(file), file };
    } catch {
      this.#fail(`${file.name} cannot be read as an image by this browser.`);
      return;
    }
    text(byId('chat-picked-name'), `${file.name} (${bytes(file.size)})`);
    byId('chat-picked').hidden = false;
    this.input.focus();
  }

  #unpick() {
    this.#image = null;
    this.file.value = '';
    byId('chat-picked').hidden = true;
  }

  async #send() {
    const words = this.input.value.trim();
    if (this.#answering || (words === '' && !this.#image)) return;
    this.#fail(null);
    const image = this.#image;
    // Whoever begins a new chat meanwhile leaves this list behind.
    const messages = this.#messages;
    messages.push({ role: 'user', content: image ? parts(words, image.url) : words });
    const asked = this.#bubble('You', 'user');
    asked.body.append(words);
    if (image) {
      const canvas = el('canvas', { class: 'thumb', role: 'img', 'aria-label': `Image: ${image.name}` });
      asked.node.append(canvas);
      thumbnail(image.file, canvas).catch(() => canvas.remove());
    }
    this.input.value = '';
    this.#unpick();
    const answer = this.#bubble(this.model ?? 'Model', 'assistant');
    const kept = await this.#answer(messages, answer);
    if (!kept && messages === this.#messages) {
      // What was refused is not part of the conversation; the words go back to where they can be changed.
      messages.pop();
      asked.node.remove();
      answer.node.remove();
      if (this.input.value === '') this.input.value = words;
    }
  }

  /** Streams one answer. Whether it, or a piece of it, is worth keeping. */
  async #answer(messages, answer) {
    const asking = new AbortController();
    this.#answering = asking;
    this.#busy(true);
    const said = { content: '', thoughts: '', tokens: null, since: null };
    let failed = null;
    try {
      const body = this.#body(messages);
      this.#asked += 1;
      const headers = { 'content-type': 'application/json', 'x-request-id': `${this.#name}-${this.#asked}` };
      const reply = await ask('v1/chat/completions', { method: 'POST', headers, body, signal: asking.signal });
      await events(reply.body, (event) => {
        if (event.error) throw new Error(event.error.message);
        this.#take(event, said, answer);
      });
    } catch (error) {
      if (!asking.signal.aborted) failed = error instanceof TypeError ? 'The server does not answer.' : error.message;
      if (error.status === 401) this.unlock(error.message);
    }
    this.#answering = null;
    this.#draw(said, answer);
    this.#busy(false);
    if (failed !== null) this.#fail(failed);
    const stopped = asking.signal.aborted;
    text(answer.foot, foot(said, stopped));
    if (said.content === '' && said.thoughts === '') return !failed && !stopped;
    messages.push({ role: 'assistant', content: said.content });
    announce(stopped ? 'Request cancelled' : 'The answer is complete');
    return true;
  }

  /** The request, without the oldest messages where all would be too many or too long. */
  #body(messages) {
    for (;;) {
      const request = { model: 'default', messages, stream: true, stream_options: { include_usage: true } };
      const body = JSON.stringify(request);
      const tooLong = messages.length > MESSAGES_MAX || new Blob([body]).size > this.#bodyMax;
      if (!tooLong || messages.length === 1) return body;
      // A question goes with its answer.
      messages.splice(0, Math.min(2, messages.length - 1));
      for (let i = 0; i < 2 && this.log.childElementCount > 2; i += 1) this.log.firstElementChild.remove();
    }
  }

  #take(event, said, answer) {
    const delta = event.choices?.[0]?.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning ?? '';
    if (delta.content || thought) said.since ??= performance.now();
    said.content += delta.content ?? '';
    said.thoughts += thought;
    said.last = performance.now();
    if (event.usage) said.tokens = event.usage.completion_tokens;
    if (!said.drawing) {
      // Tokens come faster than screens are drawn.
      said.drawing = true;
      requestAnimationFrame(() => {
        said.drawing = false;
        this.#draw(said, answer);
      });
    }
  }

  #draw(said, answer) {
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    text(answer.body, said.content);
    text(answer.thoughts, said.thoughts);
    answer.think.hidden = said.thoughts === '';
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  #bubble(who, role) {
    this.log.querySelector('.hint')?.remove();
    const body = el('div', { class: 'body' });
    const thoughts = el('div', { class: 'body' });
    const think = el('details', { hidden: '' }, el('summary', {}, 'Reasoning'), thoughts);
    const footer = el('p', { class: 'detail' });
    const node = el('article', { class: `bubble ${role}` }, el('p', { class: 'who' }, who), think, body, footer);
    this.log.append(node);
    this.log.scrollTop = this.log.scrollHeight;
    return { node, body, thoughts, think, foot: footer };
  }

  #busy(busy) {
    // A log that is busy is read out when it is whole, not token by token.
    this.log.setAttribute('aria-busy', String(busy));
    const [send, stop] = [byId('chat-send'), byId('chat-stop')];
    const focused = document.activeElement;
    send.hidden = busy;
    stop.hidden = !busy;
    if (busy && focused === send) stop.focus();
    if (!busy && focused === stop) this.input.focus();
  }
}

function parts(words, url) {
  const image = { type: 'image_url', image_url: { url } };
  return words === '' ? [image] : [{ type: 'text', text: words }, image];
}

function foot(said, stopped) {
  const words = [];
  if (stopped) words.push('stopped');
  if (said.tokens !== null) {
    words.push(`${number(said.tokens)} tokens`);
    const seconds = (said.last - said.since) / 1000;
    if (said.tokens > 1 && seconds > 0) words.push(`${number((said.tokens - 1) / seconds)} a second`);
  }
  return words.join(' · ');
}

/** Hands every event's JSON to `take`, up to the stream's terminator. */
async function events(stream, take) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let pending = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error('The connection closed before the answer was complete.');
    pending += value;
    const lines = pending.split('\n');
    pending = lines.pop();
    if (pending.length > LINE_MAX) throw new Error('The server sent an incomplete line.');
    for (const line of lines) {
      const data = line.trimEnd();
      if (data === 'data: [DONE]') {
        reader.cancel().catch(() => {});
        return;
      }
      if (data.startsWith('data: ')) take(JSON.parse(data.slice(6)));
    }
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** Draws a small copy; on a canvas, so that the page's policy need not allow images from anywhere. */
async function thumbnail(file, canvas) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, THUMBNAIL / Math.max(image.width, image.height));
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
  image.close();
}
