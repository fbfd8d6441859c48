// The last two minutes as small charts. Points have a limit in count and age, whatever the server says.

import { attribute, byId, el, number, percent, svg, text } from '../show.js';

const SPAN_MS = 120000;
const POINTS_MAX = 240;
/** A longer gap between two points breaks the line: the page was hidden. */
const GAP_MS = 6000;

const WIDTH = 320;
const HEIGHT = 84;

/** Values over time, oldest first. */
export class Series {
  #points = [];

  push(at, value) {
    this.#points.push({ at, value });
    while (this.#points.length > POINTS_MAX || at - this.#points[0].at > SPAN_MS) this.#points.shift();
  }

  get last() {
    return this.#points.at(-1)?.value ?? null;
  }

  get most() {
    return this.#points.reduce((most, point) => Math.max(most, point.value), 0);
  }

  /** A line, and the area below it, of what is kept. */
  paths(now, top) {
    const x = (at) => (WIDTH * (1 - (now - at) / SPAN_MS)).toFixed(1);
    const y = (value) => (HEIGHT - (HEIGHT - 4) * Math.min(1, top > 0 ? value / top : 0)).toFixed(1);
    let [line, area, begun, before] = ['', '', null, null];
    const close = () => {
      if (begun !== null) area += `L${x(before.at)} ${HEIGHT}L${begun} ${HEIGHT}Z`;
    };
    for (const point of this.#points) {
      const place = `${x(point.at)} ${y(point.value)}`;
      if (before === null || point.at - before.at > GAP_MS) {
        close();
        begun = x(point.at);
        line += `M${place}`;
        area += `M${place}`;
      } else {
        line += `L${place}`;
        area += `L${place}`;
      }
      before = point;
    }
    close();
    return { line, area };
  }
}

/** A title, the value now, and lines over the last two minutes. */
class Chart {
  constructor(title, lines, unit) {
    this.title = title;
    this.lines = lines;
    this.unit = unit;
    this.value = el('strong', {});
    this.drawing = svg('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: 'img', preserveAspectRatio: 'none' });
    this.paths = lines.map(({ name }) => ({ area: svg('path', { class: `area ${name}` }), line: svg('path', { class: `trace ${name}` }) }));
    this.drawing.append(svg('path', { class: 'grid', d: `M0 ${HEIGHT - 0.5}H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 4H${WIDTH}` }));
    for (const { area, line } of this.paths) this.drawing.append(area, line);
    this.most = el('span', { class: 'most' });
    const head = el('div', { class: 'chart-head' }, el('h3', {}, title), this.value);
    const foot = el('div', { class: 'chart-foot', 'aria-hidden': 'true' }, el('span', {}, '2 min ago'), this.most, el('span', {}, 'now'));
    this.node = el('div', { class: 'chart' }, head, this.drawing, foot);
  }

  draw(now, top, words) {
    this.lines.forEach(({ series }, i) => {
      const { line, area } = series.paths(now, top);
      attribute(this.paths[i].line, 'd', line || 'M0 0');
      attribute(this.paths[i].area, 'd', area || 'M0 0');
    });
    text(this.value, words);
    text(this.most, `top of the chart: ${this.unit(top)}`);
    attribute(this.drawing, 'aria-label', `${this.title}, the last two minutes: now ${words}, at most ${this.unit(this.lines[0].series.most)}`);
  }
}

/** 1, 2 or 5 times a power of ten, at least `value`. */
function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value) ?? 10 * power;
}

export class Charts {
  #before = null;
  #speed = new Series();
  #kv = new Series();
  #kvHeld = new Series();
  #windows = new Series();
  #windowsHeld = new Series();
  #state = new Series();
  #stateHeld = new Series();

  constructor() {
    this.speeds = new Chart('Tokens per second', [{ name: 'speed', series: this.#speed }], number);
    this.pages = new Chart('KV cache', [{ name: 'kept', series: this.#kv }, { name: 'held', series: this.#kvHeld }], percent);
    this.windows = new Chart('KV cache of windows', [{ name: 'kept', series: this.#windows }, { name: 'held', series: this.#windowsHeld }], percent);
    this.slots = new Chart('Recurrent state', [{ name: 'kept', series: this.#state }, { name: 'held', series: this.#stateHeld }], percent);
    byId('charts').append(this.speeds.node, this.pages.node, this.windows.node, this.slots.node);
  }

  /** Takes in one answer. Returns tokens per second since the last one, or null. */
  show(status, now) {
    // A model that writes nothing is measured by what it reads.
    const tokens = status.generates ? status.totals.generated_tokens : status.totals.prompt_tokens;
    const before = this.#before;
    this.#before = { tokens, now };
    // After a restart or a rest there is nothing to compare with.
    const speed = before && tokens >= before.tokens && now - before.now < GAP_MS ? (1000 * (tokens - before.tokens)) / (now - before.now) : null;
    if (speed !== null) this.#speed.push(now, speed);
    this.speeds.draw(now, rounded(this.#speed.most), number(speed));
    this.#pool(this.pages, this.#kv, this.#kvHeld, status.pools.kv_pages, now);
    this.#pool(this.windows, this.#windows, this.#windowsHeld, status.pools.kv_window_pages, now);
    this.#pool(this.slots, this.#state, this.#stateHeld, status.pools.state_slots, now);
    return speed;
  }

  #pool(chart, used, held, pool, now) {
    chart.node.hidden = pool.total === 0;
    if (pool.total === 0) return;
    used.push(now, pool.used / pool.total);
    held.push(now, (pool.used - pool.cached) / pool.total);
    const kept = pool.cached > 0 ? `, ${percent(pool.cached / pool.total)} kept` : '';
    chart.draw(now, 1, `${percent(held.last)} in use${kept}`);
  }
}
