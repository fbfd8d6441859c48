// The degradation levels as a list, the most expensive on top.

import { announce, attribute, byId, bytes, el, number, spoken, text } from '../show.js';

const CALM = 'calm';

const LEVELS = {
  calm: ['Calm', 'Normal operation.'],
  evict_prefix: ['Evict prefixes', 'Unused cached prefixes are evicted.'],
  small_chunks: ['Small chunks', 'Prompts are computed in small pieces.'],
  speculation_off: ['Speculation paused', 'Speculative decoding paused.'],
  stop_admitting: ['Stop admitting', 'New requests get a 503 with Retry-After.'],
  preempt: ['Preempt', 'The newest running request goes back to the queue.'],
  fail: ['Fail one', 'The newest request fails. The oldest never does.'],
};

const levelName = (level) => LEVELS[level]?.[0] ?? spoken(level);

export class Degradation {
  #levels = new Map();
  #stands = null;

  show(degradation) {
    const entered = [...degradation.entered].reverse();
    for (const { level, times } of [...entered, { level: CALM, times: 0 }]) {
      const row = this.#levels.get(level) ?? this.#add(level);
      text(row.times, times > 0 ? `entered ${number(times)}×` : '');
      if (level === degradation.level) attribute(row.node, 'aria-current', 'step');
      else row.node.removeAttribute('aria-current');
    }
    if (this.#stands !== null && this.#stands !== degradation.level) announce(`Degradation level: ${levelName(degradation.level)}`);
    this.#stands = degradation.level;
    text(byId('tile-level'), levelName(degradation.level));
    text(byId('tile-level-means'), LEVELS[degradation.level]?.[1] ?? '');
    byId('tile-level-box').classList.toggle('alert', degradation.level !== CALM);
    const { available, untouched, some_avg10: some } = degradation.reading;
    const stalls = some > 0 ? `${number(some)} % of the last ten seconds were memory stalls` : 'no memory stalls';
    text(byId('reading'), `Last reading: ${bytes(available)} available, ${bytes(untouched)} of the plan not yet used, ${stalls}.`);
  }

  #add(level) {
    const times = el('span', { class: 'detail times' });
    const means = el('span', { class: 'detail' }, LEVELS[level]?.[1] ?? '');
    const node = el('li', { 'data-level': level }, el('span', { class: 'name' }, levelName(level)), times, means);
    byId('levels').append(node);
    const row = { node, times };
    this.#levels.set(level, row);
    return row;
  }
}
