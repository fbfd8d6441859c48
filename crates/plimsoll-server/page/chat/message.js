// One message as it is seen: its words, files, reasoning, tool calls, figures and buttons.

import { attribute, bytes, duration, el, number, text } from '../show.js';
import { thumbnail } from './attach.js';
import { codeBlock } from './code.js';
import { copyButton } from './copy.js';
import { icon } from './icons.js';
import { showMarkdown } from './markdown.js';

const ENDS = {
  length: 'ended at the token limit',
  stopped: 'stopped',
  interrupted: 'interrupted',
  content_filter: 'filtered',
};

function button(name, label, action) {
  const made = el('button', { type: 'button', class: 'small-button', title: label, 'aria-label': label }, icon(name));
  made.addEventListener('click', action);
  return made;
}

export class MessageView {
  /** `actions`: `edit(message, words)`, `regenerate(message)`, `resume(message)`, `results(message, list)`, `branch(message, step)`, `file(id)`. */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.head = el('h3', { class: 'message-head' }, this.#author());
    this.files = el('ul', { class: 'files', 'aria-label': 'Files', hidden: '' });
    this.thinking = el('div', { class: 'md' });
    this.summary = el('summary', {}, 'Reasoning');
    this.reasoning = el('details', { class: 'reasoning', hidden: '' }, this.summary, this.thinking);
    this.body = el('div', { class: 'body' });
    this.calls = el('div', { class: 'calls', hidden: '' });
    this.progressWords = el('span', {});
    this.progressBar = el('progress', { 'aria-label': 'Prompt computed', max: 1, value: 0, hidden: '' });
    this.progress = el('p', { class: 'progress', hidden: '' }, el('span', { class: 'dots', 'aria-hidden': 'true' }, el('i'), el('i'), el('i')), this.progressWords, this.progressBar);
    this.error = el('p', { class: 'error', hidden: '' });
    this.figures = el('span', { class: 'detail' });
    this.buttons = this.#buttons();
    this.foot = el('div', { class: 'message-foot' }, this.branches, el('span', { class: 'message-buttons' }, ...this.buttons), this.figures);
    this.node = el('article', { class: `message ${message.role}`, 'data-id': message.id }, this.head, this.files, this.reasoning, this.body, this.calls, this.progress, this.error, this.foot);
    this.#showFiles();
  }

  #author() {
    const { role, model, name } = this.message;
    if (role === 'user') return 'You';
    return role === 'tool' ? `Result of ${name || 'a tool'}` : model || 'Model';
  }

  #buttons() {
    const { message, actions } = this;
    this.place = el('span', { class: 'branch-place' });
    this.before = button('left', 'Previous version', () => actions.branch(message, -1));
    this.after = button('right', 'Next version', () => actions.branch(message, 1));
    this.branches = el('span', { class: 'branches', hidden: '' }, this.before, this.place, this.after);
    this.edit = button('edit', 'Edit the message', () => this.#edit());
    this.again = button('regenerate', 'Regenerate the answer', () => actions.regenerate(message));
    this.more = el('button', { type: 'button', class: 'small-button', hidden: '' }, 'Continue');
    this.more.addEventListener('click', () => actions.resume(message));
    const copy = (this.copy = copyButton('Copy the message', () => message.content, ''));
    if (message.role === 'user') return [copy, this.edit];
    return message.role === 'assistant' ? [copy, this.again, this.more] : [copy];
  }

  #showFiles() {
    const { files } = this.message;
    this.files.hidden = files.length === 0;
    for (const file of files) {
      const canvas = file.kind === 'image' ? el('canvas', { class: 'preview', role: 'img', 'aria-label': `Image: ${file.name}`, width: 1, height: 1 }) : null;
      this.files.append(el('li', { class: `file ${file.kind}` }, ...(canvas ? [canvas] : []), el('span', { class: 'file-name' }, `${file.name} (${bytes(file.size)})`)));
      if (canvas) this.actions.file(file.id).then((blob) => thumbnail(blob, canvas)).catch(() => canvas.remove());
    }
  }

  /** `running`: whether this answer is being written; `busy`: whether any answer of the conversation is. */
  show({ siblings, running, busy, last }) {
    const { message } = this;
    const at = siblings.indexOf(message);
    this.branches.hidden = siblings.length < 2;
    text(this.place, `${at + 1} of ${siblings.length}`);
    this.before.disabled = busy || at === 0;
    this.after.disabled = busy || at === siblings.length - 1;
    this.edit.disabled = busy;
    this.copy.hidden = message.content === '';
    this.again.disabled = busy;
    this.more.hidden = busy || !last || message.content === '' || !['length', 'stopped', 'interrupted'].includes(message.end);
    attribute(this.node, 'aria-busy', String(running));
    this.node.classList.toggle('running', running);
    this.foot.classList.toggle('pending', running);
    this.#words(running);
    this.#calls(running, last && !busy);
    if (!running) this.progress.hidden = true;
    text(this.error, message.error ?? '');
    this.error.hidden = !message.error;
    text(this.figures, figures(message));
  }

  #words(running) {
    const { role, content, reasoning, format } = this.message;
    if (this.editing) return;
    if (role === 'user') text(this.body, content);
    else if (role === 'tool') this.body.replaceChildren(codeBlock(content, '', this.body.firstElementChild));
    else if (format === 'json') this.#structured(content);
    else {
      this.body.classList.add('md');
      showMarkdown(this.body, content);
    }
    this.body.hidden = content === '';
    if (!reasoning) return;
    const first = this.reasoning.hidden;
    this.reasoning.hidden = false;
    // Open while nothing else is to be seen, folded from the first word of the answer on.
    if (running && content === '' && first) this.reasoning.open = true;
    if (content !== '' && !this.folded) {
      this.folded = true;
      this.reasoning.open = false;
    }
    text(this.summary, running && content === '' ? 'Reasoning …' : 'Reasoning');
    showMarkdown(this.thinking, reasoning);
  }

  #structured(content) {
    const block = codeBlock(pretty(content), 'json', this.body.querySelector('.code'));
    text(block.querySelector('.code-language'), 'Structured output');
    if (!block.isConnected) this.body.replaceChildren(block);
  }

  /** Tool calls, and below the last ones of a conversation a field for each result. */
  #calls(running, open) {
    const { calls } = this.message;
    this.calls.hidden = calls.length === 0;
    if (calls.length === 0) return;
    const key = JSON.stringify([calls, running, open]);
    if (this.callsKey === key) return;
    this.callsKey = key;
    const fields = [];
    const blocks = calls.map((call, i) => {
      const node = el('div', { class: 'call' }, el('p', { class: 'call-name' }, 'Tool call: ', el('code', {}, call.name)), codeBlock(pretty(call.arguments), 'json'));
      if (open) {
        const field = el('textarea', { rows: 2, id: `result-${this.message.id}-${i}`, placeholder: 'What the tool returns' });
        fields.push(field);
        node.append(el('label', { for: field.id }, `Result of ${call.name}`), field);
      }
      return node;
    });
    this.calls.replaceChildren(...blocks);
    if (!open) return;
    const send = el('button', { type: 'button', class: 'go' }, calls.length > 1 ? 'Send the results' : 'Send the result');
    send.addEventListener('click', () => this.actions.results(this.message, fields.map((field) => field.value)));
    this.calls.append(send);
  }

  /** What the server says about a request that has no answer yet; `row` is its row in `/v1/status`, or null. */
  wait(row, loading) {
    const { content, reasoning, calls } = this.message;
    const begun = content !== '' || reasoning !== '' || calls.length > 0;
    this.progress.hidden = begun && row?.phase !== 'prefill';
    const reading = row?.phase === 'prefill' && row.prompt_tokens > 0;
    this.progressBar.hidden = !reading;
    let words = '';
    if (loading) words = 'Loading the model';
    else if (row?.phase === 'waiting') words = 'Waiting in the queue';
    else if (reading) {
      const total = row.prompt_tokens + row.generated_tokens;
      words = `Computing the prompt: ${number(row.computed_tokens)} of ${number(total)} tokens`;
      this.progressBar.value = Math.min(1, row.computed_tokens / total);
    }
    text(this.progressWords, words);
  }

  #edit() {
    if (this.editing) return;
    this.editing = true;
    const field = el('textarea', { class: 'edit', rows: Math.min(12, this.message.content.split('\n').length + 1), 'aria-label': 'Edit the message' });
    field.value = this.message.content;
    const send = el('button', { type: 'button', class: 'go' }, 'Send');
    const cancel = el('button', { type: 'button', class: 'quiet' }, 'Cancel');
    const box = el('div', { class: 'edit-box' }, field, el('div', { class: 'dialog-buttons' }, el('span', { class: 'grow' }), cancel, send));
    const end = () => {
      this.editing = false;
      box.replaceWith(this.body);
      this.foot.hidden = false;
      this.edit.focus();
    };
    cancel.addEventListener('click', end);
    send.addEventListener('click', () => {
      const words = field.value.trim();
      end();
      if (words !== '' || this.message.files.length > 0) this.actions.edit(this.message, words);
    });
    box.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') {
        event.stopPropagation();
        end();
      } else if (event.key === 'Enter' && !event.shiftKey && !event.isComposing && event.target === field) {
        event.preventDefault();
        send.click();
      }
    });
    this.body.replaceWith(box);
    this.foot.hidden = true;
    field.focus();
  }
}

function pretty(words) {
  try {
    return JSON.stringify(JSON.parse(words), null, 2);
  } catch {
    // Not complete yet, or no JSON.
    return words;
  }
}

/** Tokens, speed and times of an answer. */
function figures({ stats, end }) {
  const words = [];
  if (ENDS[end]) words.push(ENDS[end]);
  if (stats?.tokens > 0) {
    words.push(`${number(stats.tokens)} ${stats.tokens === 1 ? 'token' : 'tokens'}`);
    if (stats.tokens_per_second !== null) words.push(`${number(stats.tokens_per_second)} tokens/s`);
    if (stats.ttft_ms !== null) words.push(`first token after ${latency(stats.ttft_ms)}`);
    if (stats.prompt_tokens !== null) {
      const cached = stats.cached_tokens > 0 ? ` (${number(stats.cached_tokens)} cached)` : '';
      words.push(`prompt ${number(stats.prompt_tokens)}${cached}`);
    }
  }
  return words.join(' · ');
}

const latency = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : duration(ms / 1000));
