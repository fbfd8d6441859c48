// The load-line page: what `/v1/memory` and `/v1/status` say, drawn once a second, and a small chat.
//
// One file for each thing that is seen (`hull`, `charts`, `requests`, `chat`), `feed` for where numbers come from, `show` for how they
// are written. Nothing is fetched from anywhere but this page's own server, and none of its words become markup.

import { Charts } from './charts.js';
import { Chat } from './chat.js';
import { Feed, ask, hasKey, setKey } from './feed.js';
import { Hull } from './hull.js';
import { Requests } from './requests.js';
import { announce, attribute, byId, bytes, duration, el, number, spoken, text } from './show.js';

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

/** The degradation levels as a list, the most expensive on top. */
class Degradation {
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

const hull = new Hull();
const degradation = new Degradation();
const charts = new Charts();
const chat = new Chat(locked);
const requests = new Requests(
  (request) => chat.mine(request),
  () => feed.now(),
);
const feed = new Feed(draw, feeds);

function draw(memory, status) {
  text(byId('model'), status.model);
  document.title = `${status.model} · Plimsoll`;
  hull.show(memory);
  degradation.show(status.degradation);
  requests.show(status, memory.requests);
  chat.show(status);
  const speed = charts.show(status, performance.now());
  tiles(memory, status, speed);
  const [state, words] = mood(status);
  feeds(state, `${words} · up ${duration(status.uptime_seconds)}`);
}

function mood(status) {
  if (!status.healthy) return ['sick', 'The engine makes no progress'];
  return status.draining ? ['paused', 'Draining'] : ['live', 'Live'];
}

function tiles(memory, status, speed) {
  text(byId('tile-free'), bytes(memory.line_bytes - memory.committed_bytes));
  text(byId('tile-free-of'), `${bytes(memory.committed_bytes)} committed, ${bytes(memory.planned_bytes)} planned`);
  text(byId('tile-speed'), number(speed));
  const { generated_tokens: written, prompt_tokens: read, running, waiting } = status.totals;
  text(byId('tile-tokens'), status.generates ? `${number(read)} read, ${number(written)} generated` : `${number(read)} read`);
  const places = status.pools.requests;
  text(byId('tile-requests'), `${number(running)} running`);
  text(byId('tile-waiting'), `of ${number(places.running_max)}; ${number(waiting)} of ${number(places.waiting_max)} waiting`);
}

/** How the page's own news are: live, paused, lost, locked. */
function feeds(state, words) {
  if (state === 'locked') locked(words);
  const box = byId('feed');
  if (box.dataset.state !== state && [state, box.dataset.state].some((one) => one === 'lost' || one === 'sick')) announce(words);
  box.dataset.state = state;
  const lost = state === 'lost';
  text(byId('feed-text'), lost ? 'No data' : state === 'locked' ? 'Locked' : words);
  byId('main').classList.toggle('stale', lost || state === 'locked');
  text(byId('banner'), lost ? words : '');
  byId('banner').hidden = !lost;
  byId('forget-key').hidden = !hasKey();
  // A link carries no key.
  byId('links').hidden = hasKey();
}

/** Asks for a key. */
function locked(words) {
  const dialog = byId('key-dialog');
  // Who has given one was given the wrong one.
  text(byId('key-error'), hasKey() ? words : '');
  byId('key-error').hidden = !hasKey();
  setKey(null);
  if (!dialog.open) dialog.showModal();
  byId('key-input').focus();
}

byId('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  const field = byId('key-input');
  const key = field.value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    text(byId('key-error'), 'A key has visible ASCII characters only, without spaces.');
    byId('key-error').hidden = false;
    return;
  }
  setKey(key);
  field.value = '';
  byId('key-dialog').close();
  feed.now();
  version();
});
// Without a key there is nothing to see behind the dialog; browsers let Escape close it all the same.
byId('key-dialog').addEventListener('close', () => {
  if (!hasKey()) locked('');
});
byId('forget-key').addEventListener('click', () => {
  setKey(null);
  location.reload();
});

const dark = matchMedia('(prefers-color-scheme: dark)');
const theme = () => document.documentElement.dataset.theme ?? (dark.matches ? 'dark' : 'light');
const other = () => (theme() === 'dark' ? 'light' : 'dark');
const nameTheme = () => text(byId('theme'), other() === 'dark' ? 'Dark' : 'Light');

byId('theme').addEventListener('click', () => {
  document.documentElement.dataset.theme = other();
  nameTheme();
  try {
    localStorage.setItem('plimsoll-theme', theme());
  } catch {
    // Storage is off: the choice lasts as long as the page.
  }
});
dark.addEventListener('change', nameTheme);
nameTheme();

async function version() {
  try {
    const { version: number } = await (await ask('version')).json();
    text(byId('version'), `Plimsoll ${number}`);
  } catch {
    // The feed says what is wrong.
  }
}

feed.now();
version();
