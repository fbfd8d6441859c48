// The models of this server: what each takes and makes, and the sampling that the server uses by default.

import { attribute, byId, el } from '../show.js';

/** A general default, for a server that reports none for a model. */
export const GENERAL_SAMPLING = { temperature: 0.7, top_p: 0.95, top_k: 0, min_p: 0.05, repetition_penalty: 1, source: 'page' };

const FILE_KINDS = ['image', 'audio'];

export class Models {
  #models = [];
  #chosen = null;

  /** `changed()` is called when another model is chosen, or when the chosen one can do something else than before. */
  constructor(changed) {
    this.changed = changed;
    this.select = byId('model-select');
    this.select.addEventListener('change', () => {
      this.#chosen = this.select.value;
      this.changed();
    });
  }

  /** Takes in `/v1/models`. Each model counts once, by its first name. */
  show(list) {
    const before = JSON.stringify([this.#models, this.chosen?.id]);
    this.#models = list.filter((model) => model.id === model.root);
    const names = this.#models.map((model) => model.id).join('\n');
    if (this.names !== names) {
      this.names = names;
      this.select.replaceChildren(...this.#models.map((model) => el('option', { value: model.id }, model.id)));
      this.select.value = this.chosen?.id ?? '';
    }
    for (const [i, option] of [...this.select.options].entries()) {
      const { id, state } = this.#models[i];
      attribute(option, 'label', state === undefined || state === 'loaded' ? id : `${id} (${state})`);
    }
    if (JSON.stringify([this.#models, this.chosen?.id]) !== before) this.changed();
  }

  /** The chosen model, or the first one. Null before the server has answered. */
  get chosen() {
    return this.#models.find((model) => model.id === this.#chosen) ?? this.#models[0] ?? null;
  }

  get all() {
    return this.#models;
  }

  choose(id) {
    this.#chosen = id;
    if (this.chosen) this.select.value = this.chosen.id;
    this.changed();
  }

  /** Whether a model writes text. One that is not loaded may. */
  get generates() {
    return this.#models.some((model) => model.output_modalities === undefined || model.output_modalities.includes('text'));
  }

  /** Kinds of files that the chosen model takes. Text files become text. */
  get takes() {
    const inputs = this.chosen?.input_modalities ?? [];
    return ['text', ...FILE_KINDS.filter((kind) => inputs.includes(kind))];
  }

  /** The default sampling of the chosen model; null while it is not loaded, since the server knows it then. */
  get sampling() {
    const model = this.chosen;
    if (model === null || model.input_modalities === undefined) return null;
    return model.default_sampling ?? GENERAL_SAMPLING;
  }
}
