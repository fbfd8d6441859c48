// Requests to the server, and the feed of its state: one round of questions at a time. A slow server is asked less often, one
// that does not answer even less. A hidden page asks nothing.

const EVERY_MS = 1000;
const LONGEST_WAIT_MS = 15000;
const PATIENCE_MS = 10000;
const KEY = 'plimsoll-key';
const HIDDEN = 'hidden';

/** What went wrong, in the server's own words where it had any. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let key = null;
try {
  key = sessionStorage.getItem(KEY);
} catch {
  // Storage is off: the key lives as long as the page.
}

export const hasKey = () => key !== null;

/** Keeps a key for this tab, or forgets it. */
export function setKey(value) {
  key = value;
  try {
    if (value === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, value);
  } catch {
    // As above.
  }
}

/** Asks this page's own server. Paths are relative, so that the page works below a proxy's prefix, too. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key !== null) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(path, { cache: 'no-store', credentials: 'same-origin', redirect: 'error', ...options, headers });
  if (!answer.ok) throw new Refused(answer.status, await reason(answer));
  return answer;
}

async function reason(answer) {
  try {
    const body = await answer.json();
    if (typeof body.error?.message === 'string') return body.error.message;
  } catch {
    // Not ours, or cut short.
  }
  return `the server answered ${answer.status}`;
}

export class Feed {
  #timer = null;
  #asking = null;
  #failures = 0;
  #locked = false;
  /** Whether a round was asked for while another was running. */
  #again = false;

  /** `wanted()` says which paths are asked, and how often; `data(answers)` gets them by path; `state(name, words)` hears of changes. */
  constructor(wanted, data, state) {
    this.wanted = wanted;
    this.data = data;
    this.state = state;
    document.addEventListener('visibilitychange', () => this.#look());
  }

  /** Begins, or begins again at once: after a key was given, a request was cancelled, or another view was opened. */
  now() {
    this.#locked = false;
    this.#failures = 0;
    this.#again = this.#asking !== null;
    this.#look();
  }

  #look() {
    clearTimeout(this.#timer);
    this.#timer = null;
    if (document.hidden) {
      this.#asking?.abort(HIDDEN);
      this.state('paused', 'Paused while hidden');
    } else if (this.#asking === null && !this.#locked) {
      this.#turn();
    }
  }

  async #turn() {
    const asking = new AbortController();
    this.#asking = asking;
    const patience = setTimeout(() => asking.abort(), PATIENCE_MS);
    const since = performance.now();
    let wait = EVERY_MS;
    try {
      const { paths, every_ms } = this.wanted();
      const answer = async (path) => [path, await (await ask(path, { signal: asking.signal })).json()];
      const answers = Object.fromEntries(await Promise.all(paths.map(answer)));
      this.#failures = 0;
      const took = performance.now() - since;
      // A server that needs a second to answer rests at least as long before the next question.
      wait = Math.min(LONGEST_WAIT_MS, Math.max(every_ms - took, took));
      this.data(answers);
    } catch (error) {
      wait = asking.signal.reason === HIDDEN ? 0 : this.#failed(error);
    }
    clearTimeout(patience);
    this.#asking = null;
    if (document.hidden || this.#locked) return;
    this.#timer = setTimeout(() => this.#look(), this.#again ? 0 : wait);
    this.#again = false;
  }

  #failed(error) {
    if (error instanceof Refused && error.status === 401) {
      this.#locked = true;
      this.state('locked', error.message);
      return LONGEST_WAIT_MS;
    }
    if (!(error instanceof Refused || error instanceof TypeError || error instanceof SyntaxError || error.name === 'AbortError')) {
      // Not the server's doing: let the console have it, and go on.
      reportError(error);
    }
    this.#failures += 1;
    const wait = Math.min(LONGEST_WAIT_MS, EVERY_MS * 2 ** this.#failures);
    const why = error instanceof Refused ? error.message : 'the server does not answer';
    this.state('lost', `No data: ${why}. Retrying in ${Math.round(wait / 1000)} s.`);
    return wait;
  }
}
