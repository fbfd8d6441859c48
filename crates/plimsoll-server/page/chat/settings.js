// The settings of a conversation: system prompt, sampling, reasoning, answer format, tools.

import { announce, byId, el, text } from '../show.js';
import { json } from './request.js';

/** Nothing set: the server's defaults hold. */
export const UNSET = Object.freeze({
  system: '',
  temperature: null,
  top_p: null,
  top_k: null,
  min_p: null,
  repetition_penalty: null,
  presence_penalty: null,
  frequency_penalty: null,
  max_tokens: null,
  seed: null,
  stop: '',
  thinking: 'default',
  format: 'text',
  schema: '',
  tools: '',
});

/** The numbers: name, label, least, most, step, and what an empty field means where no sampling default does. */
const NUMBERS = [
  ['temperature', 'Temperature', 0, 100, 0.05, ''],
  ['top_p', 'Top-p', 0, 1, 0.01, ''],
  ['top_k', 'Top-k (0 is off)', 0, 1000000, 1, ''],
  ['min_p', 'Min-p', 0, 1, 0.01, ''],
  ['repetition_penalty', 'Repetition penalty', 0.01, 10, 0.01, ''],
  ['presence_penalty', 'Presence penalty', -2, 2, 0.1, '0'],
  ['frequency_penalty', 'Frequency penalty', -2, 2, 0.1, '0'],
  ['max_tokens', 'Max tokens', 1, 10000000, 1, 'the context'],
  ['seed', 'Seed', 0, Number.MAX_SAFE_INTEGER, 1, 'random'],
];

const SOURCES = {
  model: 'An empty field has the default of the model (its generation_config.json).',
  server: 'An empty field has the default of the server: the model recommends no sampling.',
  page: 'An empty field has a general default: the server reports none.',
  off: 'An empty field has no effect on sampling (--generation-config off).',
};

const TEXTS = ['system', 'stop', 'thinking', 'format', 'schema', 'tools'];

/** `value` with a valid entry for each setting; what is wrong or unknown in it is left out. */
export function settled(value) {
  const valid = { ...UNSET };
  if (value === null || typeof value !== 'object') return valid;
  for (const name of TEXTS) if (typeof value[name] === 'string') valid[name] = value[name];
  for (const [name, , least, most] of NUMBERS) {
    if (Number.isFinite(value[name]) && value[name] >= least && value[name] <= most) valid[name] = value[name];
  }
  if (!['default', 'on', 'off'].includes(valid.thinking)) valid.thinking = 'default';
  if (!['text', 'json', 'schema'].includes(valid.format)) valid.format = 'text';
  return valid;
}

export class Settings {
  #value = { ...UNSET };

  /** `changed(value)` after every change; `kept(value)` when new chats shall begin with it. */
  constructor(changed, kept) {
    this.changed = changed;
    this.dialog = byId('settings');
    this.numbers = new Map(NUMBERS.map((row) => [row[0], this.#number(row)]));
    byId('settings-open').addEventListener('click', () => this.dialog.showModal());
    byId('settings-form').addEventListener('input', () => this.#take());
    byId('settings-reset').addEventListener('click', () => {
      this.show({ ...UNSET });
      this.changed(this.#value);
      announce('The settings are reset');
    });
    byId('settings-keep').addEventListener('click', () => {
      kept(this.#value);
      announce('New chats begin with these settings');
      text(byId('settings-keep'), 'Kept');
      setTimeout(() => text(byId('settings-keep'), 'Use for new chats'), 1500);
    });
    // A click beside the dialog closes it.
    this.dialog.addEventListener('click', (event) => {
      if (event.target === this.dialog) this.dialog.close();
    });
  }

  #number([name, label, least, most, step, placeholder]) {
    const id = `set-${name.replaceAll('_', '-')}`;
    const field = el('input', { type: 'number', id, min: least, max: most, step: step < 1 ? 'any' : 1, placeholder, inputmode: 'decimal', autocomplete: 'off' });
    const error = el('span', { class: 'error', id: `${id}-error`, hidden: '' });
    field.setAttribute('aria-describedby', error.id);
    byId('settings-numbers').append(el('div', {}, el('label', { for: id }, label), field, error));
    return { field, error, least, most };
  }

  /** Shows the settings of a conversation. */
  show(value) {
    this.#value = settled(value);
    for (const name of TEXTS) byId(`set-${name}`).value = this.#value[name];
    for (const [name, { field }] of this.numbers) field.value = this.#value[name] ?? '';
    this.#check();
  }

  /** Shows what an empty field means. `sampling` is null for a model that is not loaded. */
  defaults(sampling) {
    text(byId('settings-defaults'), sampling === null ? 'An empty field has the default of the server, which is known once the model is loaded.' : SOURCES[sampling.source]);
    for (const name of ['temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty']) {
      this.numbers.get(name).field.placeholder = sampling === null ? 'default' : String(sampling[name]);
    }
  }

  #take() {
    const value = { ...this.#value };
    for (const name of TEXTS) value[name] = byId(`set-${name}`).value;
    for (const [name, { field }] of this.numbers) value[name] = field.value === '' || !field.checkValidity() ? null : Number(field.value);
    this.#value = value;
    this.#check();
    this.changed(value);
  }

  /** Says what is wrong in a field; the request would be refused otherwise. */
  #check() {
    byId('schema-box').hidden = this.#value.format !== 'schema';
    for (const { field, error, least, most } of this.numbers.values()) {
      const wrong = !field.checkValidity();
      text(error, wrong ? `${least} to ${most}` : '');
      error.hidden = !wrong;
    }
    const isObject = (value) => value !== null && typeof value === 'object' && !Array.isArray(value);
    said('tools-error', this.#value.tools, (words) => json(words, 'The tools', Array.isArray, 'a list'));
    said('schema-error', this.#value.schema, (words) => json(words, 'The JSON Schema', isObject, 'an object'));
  }
}

function said(id, words, check) {
  let wrong = '';
  try {
    if (words.trim() !== '') check(words);
  } catch (error) {
    wrong = error.message;
  }
  text(byId(id), wrong);
  byId(id).hidden = wrong === '';
}
