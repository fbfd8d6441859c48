// The running requests: a row each with its phase, tokens, speed and the memory it holds, and a button that ends it.

import { announce, attribute, byId, bytes, duration, el, number, spoken, text } from '../show.js';
import { Refused, ask } from '../feed.js';

/** Rows that are shown; the rest is a number. */
const ROWS_MAX = 100;

/** What the server calls a request that came without a name. */
const OWN_NAME = /^(req-[0-9a-f]{32})?$/;

const PHASES = {
  waiting: 'Waiting',
  prefill: 'Prefill',
  decode: 'Decode',
  ended: 'Sending',
};

const PHASES_MEAN = {
  waiting: 'Waiting in the queue.',
  prefill: 'Computing the prompt.',
  decode: 'Generating tokens.',
  ended: 'Finished; the client is still reading.',
};

class Row {
  constructor(request, cancel) {
    const cell = (label, kind, ...children) => el('td', { role: 'cell', class: kind, 'data-label': label }, ...children);
    const small = () => el('span', { class: 'detail' });
    this.id = el('span', { class: 'name mono' });
    this.from = small();
    this.phase = el('span', { class: 'phase' });
    this.tokens = el('span', {});
    this.tokensMore = small();
    this.speed = cell('Speed', 'n');
    this.memory = el('span', {});
    this.memoryMore = small();
    this.age = cell('Age', 'n');
    this.button = el('button', { type: 'button', class: 'quiet cancel', 'aria-label': `Cancel ${request.id}` }, 'Cancel');
    this.button.addEventListener('click', () => cancel(request.id, this.button));
    const head = el('th', { role: 'rowheader', scope: 'row' }, this.id, this.from);
    this.node = el(
      'tr',
      { role: 'row', 'data-id': request.id },
      head,
      cell('Phase', '', this.phase),
      cell('Prompt + output', 'n', this.tokens, this.tokensMore),
      this.speed,
      cell('Memory', 'n', this.memory, this.memoryMore),
      this.age,
      cell('', 'n action', this.button),
    );
  }

  show(request, ours) {
    text(this.id, request.id);
    // A name the client has chosen; one that the server made up says nothing.
    const name = ours || OWN_NAME.test(request.request_id) ? '' : ` · ${request.request_id}`;
    const choices = request.choices > 1 ? ` · ${request.choices} choices` : '';
    text(this.from, `${ours ? 'this page · ' : ''}${request.endpoint}${choices}${name}`);
    text(this.phase, PHASES[request.phase] ?? spoken(request.phase));
    attribute(this.phase, 'data-phase', request.phase);
    attribute(this.phase, 'title', PHASES_MEAN[request.phase] ?? '');
    const reading = request.phase === 'prefill';
    const { prompt_tokens: prompt, cached_tokens: cached, computed_tokens: computed, generated_tokens: written } = request;
    text(this.tokens, reading ? `${number(computed)} of ${number(prompt + written)}` : `${number(prompt)} + ${number(written)}`);
    text(this.tokensMore, reading ? 'computed' : cached > 0 ? `${number(cached)} cached` : '');
    text(this.speed, request.tokens_per_second === null ? '–' : `${number(request.tokens_per_second)}/s`);
    text(this.memory, bytes(request.memory_bytes));
    const holds = [`${number(request.kv_pages)} pages`];
    if (request.state_slots > 0) holds.push(`${number(request.state_slots)} slots`);
    text(this.memoryMore, holds.join(', '));
    text(this.age, duration(request.age_seconds));
    this.node.dataset.memory = request.memory_bytes;
  }
}

export class Requests {
  #rows = new Map();

  /** `mine(request)` says whether this page asked it; `changed()` is called when one was cancelled. */
  constructor(mine, changed) {
    this.mine = mine;
    this.changed = changed;
    this.body = byId('requests');
  }

  show(status, refused) {
    const shown = status.requests.slice(0, ROWS_MAX);
    const alive = new Set(shown.map((request) => request.id));
    for (const [id, row] of this.#rows) {
      if (!alive.has(id)) this.#remove(id, row);
    }
    for (const request of shown) {
      let row = this.#rows.get(request.id);
      if (!row) {
        row = new Row(request, (id, button) => this.#cancel(id, button));
        this.#rows.set(request.id, row);
        this.body.append(row.node);
      }
      row.show(request, this.mine(request));
    }
    const more = status.requests.length - shown.length;
    const none = byId('requests-none');
    none.hidden = shown.length > 0 && more === 0;
    text(none, more > 0 ? `And ${number(more)} more.` : 'No requests are running.');
    const { finished, aborted, failed } = status.totals;
    const parts = [`${number(finished)} finished`, `${number(aborted)} aborted`, `${number(failed)} failed`];
    if (refused.refused_full > 0) parts.push(`${number(refused.refused_full)} refused, queue full (429)`);
    if (refused.refused_memory > 0) parts.push(`${number(refused.refused_memory)} refused for memory (503)`);
    if (refused.preemptions > 0) parts.push(`${number(refused.preemptions)} preemptions`);
    text(byId('requests-since'), `Since start: ${parts.join(', ')}.`);
  }

  /** Removes a row. The focus goes to the next one, or to the heading. */
  #remove(id, row) {
    if (row.node.contains(document.activeElement)) {
      const next = row.node.nextElementSibling ?? row.node.previousElementSibling;
      (next?.querySelector('button') ?? byId('requests-title')).focus();
    }
    row.node.remove();
    this.#rows.delete(id);
  }

  async #cancel(id, button) {
    button.setAttribute('aria-disabled', 'true');
    text(button, 'Cancelling');
    try {
      await ask(`v1/requests/${encodeURIComponent(id)}`, { method: 'DELETE', signal: AbortSignal.timeout(10000) });
      announce(`${id} was cancelled`);
    } catch (error) {
      announce(`${id} was not cancelled: ${error instanceof Refused ? error.message : 'the server does not answer'}`);
      button.title = error.message;
      text(button, 'Not cancelled');
    }
    button.removeAttribute('aria-disabled');
    this.changed();
  }
}
