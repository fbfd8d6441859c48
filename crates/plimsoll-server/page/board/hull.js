// The load line: the plan's components as cargo in a ship's hull, stacked under the line, and the same in figures beside it.
//
// In the hold a component's area is its planned bytes, and the solid part of it what is committed. Of pools the solid part is what
// is in use, then the cached prefixes, then what is free.

import { attribute, byId, bytes, el, signedBytes, spoken, svg, text } from '../show.js';

const NAMES = {
  weights: 'Weights',
  kv_pages: 'KV cache',
  state_slots: 'Recurrent state',
  step_workspace: 'Workspace',
  transfers: 'GPU transfers',
  device_reserve: 'GPU driver',
  encoder_outputs: 'Encoder outputs',
  media_staging: 'Media input',
  request_table: 'Requests',
  prefix_index: 'Prefix index',
  tokenizer: 'Tokenizer',
  host_heap: 'HTTP and parsing',
  process_baseline: 'Process',
  emergency_reserve: 'Emergency reserve',
};

/** The pool behind a component, in `/v1/memory`. */
const POOLS = { kv_pages: 'kv_pages', state_slots: 'state_slots', encoder_outputs: 'encoder_outputs' };

// The hold, in units of the drawing.
const HOLD = { left: 138, right: 350, top: 72, bottom: 576 };
const SIZE = { width: 440, height: 620 };
const WIDTH = HOLD.right - HOLD.left;
const LABEL_HEIGHT = 16;
/** Below this share of the limit a plan drawn to scale could not be read. */
const TO_SCALE = 0.5;
/** How much of the hold the plan takes then. */
const NOT_TO_SCALE = 0.68;

const nameOf = (component) => NAMES[component] ?? spoken(component);

/** Where a component's solid part ends and its shades change, as shares of its planned bytes. */
function shades(row, pools) {
  if (row.planned_bytes === 0) return { full: 0, kept: 0, committed: 0 };
  const committed = Math.min(1, row.committed_bytes / row.planned_bytes);
  const pool = pools[POOLS[row.component]];
  if (!pool || pool.total === 0) return { full: committed, kept: committed, committed };
  const full = Math.min(committed, (pool.used - pool.cached) / pool.total);
  return { full, kept: Math.min(committed, pool.used / pool.total), committed };
}

class Cargo {
  constructor(component) {
    this.title = svg('title');
    this.node = svg('g', { class: `cargo c-${component}` }, this.title);
    this.parts = ['planned', 'held', 'kept', 'full'].map((name) => svg('rect', { class: name, x: HOLD.left }));
    this.tick = svg('path', { class: 'tick' });
    this.label = svg('text', { class: 'label', 'text-anchor': 'end', x: HOLD.left - 24 });
    this.node.append(...this.parts, this.tick, this.label);
  }

  place(row, pools, top, height) {
    const { full, kept, committed } = shades(row, pools);
    // Solid parts lie over lighter ones: each begins at the left.
    [1, committed, kept, full].forEach((share, i) => {
      attribute(this.parts[i], 'y', top.toFixed(2));
      attribute(this.parts[i], 'height', Math.max(0, height - (height > 3 ? 1 : 0)).toFixed(2));
      attribute(this.parts[i], 'width', (WIDTH * share).toFixed(2));
    });
    text(this.title, `${nameOf(row.component)}: ${bytes(row.committed_bytes)} of ${bytes(row.planned_bytes)}. ${row.detail}`);
    const labelled = height >= LABEL_HEIGHT;
    const middle = top + height / 2;
    text(this.label, labelled ? nameOf(row.component) : '');
    attribute(this.label, 'y', (middle + 4).toFixed(2));
    attribute(this.tick, 'd', labelled ? `M${HOLD.left - 20} ${middle.toFixed(2)}h14` : 'M0 0');
  }
}

/** One row of the table. */
class Line {
  constructor(component) {
    const cell = (name) => el('td', { class: name });
    this.name = el('span', { class: 'name' });
    this.detail = el('span', { class: 'detail' });
    this.committed = cell('n');
    this.planned = cell('n');
    this.peak = cell('n peak');
    const head = el('th', { scope: 'row' }, el('span', { class: `swatch c-${component}` }), this.name);
    this.node = el('tr', { 'data-component': component }, head, this.committed, this.planned, this.peak);
    this.more = el('tr', { class: 'more' }, el('td', { colspan: 4 }, this.detail));
  }

  show(row) {
    text(this.name, nameOf(row.component));
    text(this.detail, row.detail);
    text(this.committed, bytes(row.committed_bytes));
    text(this.planned, bytes(row.planned_bytes));
    text(this.peak, bytes(row.peak_bytes));
    this.node.dataset.committed = row.committed_bytes;
    this.node.dataset.planned = row.planned_bytes;
  }
}

/** A row below the components. */
function sum(id, title) {
  const cells = ['n', 'n', 'n peak'].map((name) => el('td', { class: name }));
  const words = el('span', { class: 'detail' });
  const node = el('tr', { id }, el('th', { scope: 'row' }, el('span', { class: 'name' }, title)), ...cells);
  return { node, more: el('tr', { class: 'more' }, el('td', { colspan: 4 }, words)), words, cells };
}

export class Hull {
  #cargo = new Map();
  #lines = new Map();

  constructor() {
    this.drawing = byId('hull');
    this.hold = svg('g');
    this.gap = svg('g', { class: 'gap' });
    this.gapWords = svg('text', { class: 'label', 'text-anchor': 'middle', x: (HOLD.left + HOLD.right) / 2 });
    this.gapScale = svg('text', { class: 'label faint', 'text-anchor': 'middle', x: (HOLD.left + HOLD.right) / 2 });
    this.gapBreak = svg('path', { class: 'break' });
    this.gap.append(this.gapBreak, this.gapWords, this.gapScale);
    this.limit = svg('text', { class: 'limit', x: HOLD.left - 30, y: HOLD.top + 5, 'text-anchor': 'end' });
    this.sea = svg('path', { class: 'sea' });
    this.waves = svg('path', { class: 'waves' });
    // Red below the water, as ships are painted: a window that begins at its level.
    this.below = svg('svg', { x: 0, width: SIZE.width, overflow: 'hidden' }, svg('path', { class: 'paint', d: plating() }));
    this.drawing.append(this.sea, svg('path', { class: 'plating', d: plating() }), this.below, inside(), this.hold, this.gap, this.waves, ...mark(), this.limit);
    this.together = sum('sum-together', 'Together');
    this.unaccounted = sum('sum-unaccounted', 'Unaccounted');
    this.emergency_reserve = sum('sum-emergency_reserve', 'Emergency reserve');
    const explained = [this.unaccounted, this.emergency_reserve].flatMap(({ node, more }) => [node, more]);
    byId('sums').append(this.together.node, ...explained);
  }

  show(memory) {
    const rows = memory.components;
    const table = byId('components');
    for (const row of rows) {
      if (!this.#lines.has(row.component)) {
        const [cargo, line] = [new Cargo(row.component), new Line(row.component)];
        this.#cargo.set(row.component, cargo);
        this.#lines.set(row.component, line);
        this.hold.append(cargo.node);
        table.append(line.node, line.more);
      }
      const line = this.#lines.get(row.component);
      line.show(row);
      line.node.hidden = row.planned_bytes === 0 && row.committed_bytes === 0;
      line.more.hidden = line.node.hidden || row.detail === '';
    }
    this.#stack(memory);
    this.#sums(memory);
  }

  #stack(memory) {
    const height = HOLD.bottom - HOLD.top;
    const share = memory.planned_bytes / memory.line_bytes;
    const toScale = share >= TO_SCALE;
    const scale = (toScale ? height / memory.line_bytes : (height * NOT_TO_SCALE) / memory.planned_bytes) || 0;
    let top = HOLD.bottom;
    for (const row of memory.components.filter((row) => !row.on_device)) {
      const tall = row.planned_bytes * scale;
      top -= tall;
      this.#cargo.get(row.component).place(row, memory.pools, top, tall);
    }
    const free = memory.line_bytes - memory.planned_bytes;
    const middle = (HOLD.top + top) / 2;
    const room = top - HOLD.top;
    text(this.gapWords, room >= 24 ? `${bytes(free)} above the plan` : '');
    text(this.gapScale, !toScale && room >= 44 ? 'this gap is not to scale' : '');
    attribute(this.gapWords, 'y', (middle + (toScale ? 4 : -4)).toFixed(1));
    attribute(this.gapScale, 'y', (middle + 14).toFixed(1));
    attribute(this.gapBreak, 'd', toScale ? 'M0 0' : zigzags(middle));
    this.#water(top);
    text(this.limit, bytes(memory.line_bytes));
    const words = rowsInWords(memory);
    attribute(this.drawing, 'aria-label', words);
  }

  /** The sea stands as high as the ship is loaded. */
  #water(level) {
    const y = level.toFixed(1);
    attribute(this.sea, 'd', `M0 ${y}H${SIZE.width}V${SIZE.height}H0Z`);
    const depth = (SIZE.height - level).toFixed(1);
    attribute(this.below, 'y', y);
    attribute(this.below, 'height', depth);
    attribute(this.below, 'viewBox', `0 ${y} ${SIZE.width} ${depth}`);
    const swell = (from, to) => `M${from} ${y}${'q4.5 -4 9 0t9 0'.repeat(Math.floor((to - from) / 18))}`;
    attribute(this.waves, 'd', swell(4, HOLD.left - 14) + swell(HOLD.right + 17, SIZE.width));
  }

  #sums(memory) {
    const { together, unaccounted, emergency_reserve } = this;
    text(together.cells[0], bytes(memory.committed_bytes));
    text(together.cells[1], bytes(memory.planned_bytes));
    together.node.dataset.committed = memory.committed_bytes;
    together.node.dataset.planned = memory.planned_bytes;
    text(unaccounted.cells[0], signedBytes(memory.unaccounted_bytes));
    const promised = memory.committed_bytes / 100;
    text(unaccounted.words, `memory of the process that is in no component; at most ${bytes(promised)} is promised`);
    unaccounted.node.classList.toggle('bad', memory.unaccounted_bytes > promised);
    const { reserve_blocks_missing: missing, reserve_blocks_released: released } = memory.degradation;
    text(emergency_reserve.cells[0], missing > 0 ? 'in use' : 'whole');
    const blocks = (count) => `${count} ${count === 1 ? 'block' : 'blocks'}`;
    const so = missing > 0 ? `${blocks(missing)} missing: no requests are admitted` : 'a reserve for refused allocations';
    text(emergency_reserve.words, released > 0 ? `${so}; ${blocks(released)} released since start` : so);
    emergency_reserve.node.classList.toggle('bad', missing > 0);
    text(byId('line-source'), `Memory limit: ${bytes(memory.line_bytes)}, from ${memory.line_source}.`);
  }
}

function rowsInWords(memory) {
  const rows = memory.components.filter((row) => row.planned_bytes > 0 && !row.on_device);
  const parts = rows.map((row) => `${nameOf(row.component)} ${bytes(row.planned_bytes)}`);
  const gpu = memory.device;
  const there = gpu ? `; on the GPU ${bytes(gpu.planned_bytes)} planned, limit ${bytes(gpu.line_bytes)}` : '';
  return `${bytes(memory.planned_bytes)} planned, limit ${bytes(memory.line_bytes)}: ${parts.join(', ')}${there}`;
}

/** Two breaks in the hull's sides, as on a drawing whose middle was left out. */
function zigzags(y) {
  const at = (x) => `M${x - 9} ${y + 3}l6 -8l6 8l6 -8M${x - 9} ${y + 9}l6 -8l6 8l6 -8`;
  return at(HOLD.left - 6) + at(HOLD.right + 6);
}

/** The hull around the hold. */
function plating() {
  const { left, right, top, bottom } = HOLD;
  const [deck, keel] = [top - 44, bottom + 22];
  const side = `M${left - 14} ${deck}L${left - 12} ${bottom - 30}Q${left - 10} ${keel} ${left + 40} ${keel}`;
  const back = `H${right - 40}Q${right + 10} ${keel} ${right + 12} ${bottom - 30}L${right + 14} ${deck}`;
  return `${side}${back}H${right + 6}V${bottom}H${left - 6}V${deck}Z`;
}

function inside() {
  const { left, right, top, bottom } = HOLD;
  return svg('path', { class: 'inside', d: `M${left - 6} ${top - 44}V${bottom}H${right + 6}V${top - 44}` });
}

/** Samuel Plimsoll's mark, on the line. */
function mark() {
  const x = HOLD.right + 52;
  return [
    svg('path', { class: 'line-across', d: `M${HOLD.left - 26} ${HOLD.top}H${SIZE.width - 2}` }),
    svg('circle', { class: 'mark', cx: x, cy: HOLD.top, r: 15 }),
    svg('path', { class: 'mark-line', d: `M${x - 26} ${HOLD.top}H${x + 26}` }),
    svg('text', { class: 'mark-letter', x: x - 25, y: HOLD.top - 7, 'text-anchor': 'middle' }, 'P'),
    svg('text', { class: 'mark-letter', x: x + 25, y: HOLD.top - 7, 'text-anchor': 'middle' }, 'L'),
  ];
}
