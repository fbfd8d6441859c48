// The web app: a chat, and a view of the server in a second tab.
//
// `chat` and `board` hold the two views, `feed` asks the server, `show` writes numbers and makes elements. Nothing is fetched
// from anywhere but this page's own server, and no string becomes markup.

import { Board } from './board/board.js';
import { Chat } from './chat/chat.js';
import { drawIcons } from './chat/icons.js';
import { Feed, ask, hasKey, setKey } from './feed.js';
import { announce, attribute, byId, duration, text } from './show.js';

drawIcons(document);
const chat = new Chat(locked, () => feed.now());
const board = new Board(
  (request) => chat.mine(request),
  () => feed.now(),
);
const feed = new Feed(wanted, draw, feeds);

const view = () => document.body.dataset.view;

/** What the view that is open needs, and how often. */
function wanted() {
  const every_ms = view() === 'server' || chat.waits ? 1000 : 3000;
  return { paths: view() === 'server' ? ['v1/status', 'v1/memory'] : ['v1/status', 'v1/models'], every_ms };
}

function draw({ 'v1/status': status, 'v1/memory': memory, 'v1/models': models }) {
  document.title = `${status.model} · Plimsoll`;
  if (memory) board.show(memory, status);
  chat.show(status, models?.data ?? null);
  const [state, words] = mood(status);
  feeds(state, `${words} · up ${duration(status.uptime_seconds)}`);
}

function mood(status) {
  if (!status.healthy) return ['sick', 'The engine makes no progress'];
  return status.draining ? ['paused', 'Draining'] : ['live', 'Live'];
}

/** The connection's state: live, paused, lost, locked. */
function feeds(state, words) {
  if (state === 'locked') locked(words);
  const box = byId('feed');
  if (box.dataset.state !== state && [state, box.dataset.state].some((one) => one === 'lost' || one === 'sick')) announce(words);
  box.dataset.state = state;
  const lost = state === 'lost';
  text(byId('feed-text'), lost ? 'No data' : state === 'locked' ? 'Locked' : words);
  board.stale(lost || state === 'locked');
  text(byId('banner'), lost ? words : '');
  byId('banner').hidden = !lost;
  byId('forget-key').hidden = !hasKey();
  // A link carries no key.
  byId('links').hidden = hasKey();
}

/** The address says what is open: `#server`, `#chat`, or `#chat/ID` for a conversation. */
function route() {
  const [name, id] = location.hash.slice(1).split('/');
  const next = name === 'server' ? 'server' : 'chat';
  const changed = view() !== next;
  document.body.dataset.view = next;
  byId('chat-view').hidden = next !== 'chat';
  byId('board-view').hidden = next !== 'server';
  for (const tab of ['chat', 'server']) {
    if (tab === next) attribute(byId(`tab-${tab}`), 'aria-current', 'page');
    else byId(`tab-${tab}`).removeAttribute('aria-current');
  }
  if (next === 'chat') chat.open(id ?? null);
  if (changed) feed.now();
}
addEventListener('hashchange', route);

// The tab leads back to the conversation that is open.
byId('tab-chat').addEventListener('click', (event) => {
  event.preventDefault();
  location.hash = chat.address;
});
byId('skip-chat').addEventListener('click', (event) => {
  event.preventDefault();
  if (view() !== 'chat') location.hash = chat.address;
  // The view changes with the address, which the browser reports later.
  setTimeout(() => byId('chat-input').focus());
});

/** Asks for a key. */
function locked(words) {
  const dialog = byId('key-dialog');
  // A key that was given is wrong.
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

chat.ready.then(() => {
  route();
  feed.now();
});
version();
