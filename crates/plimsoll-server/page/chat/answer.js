// One answer: the request, its stream, and how often it is drawn and saved meanwhile.

import { ask } from '../feed.js';
import { DRAW_EVERY_MS, SAVE_EVERY_MS } from './limits.js';
import { Reply, events } from './stream.js';

/**
 * Sends `body` and adds the answer to `message`, whose `end` says how it ended. `drawn()` and `saved()` are called while the
 * message grows. Throws nothing but a refused key, which the caller asks for again.
 */
export async function run({ body, requestId, message, signal, drawn, saved }) {
  const headers = { 'content-type': 'application/json', 'x-request-id': requestId };
  const reply = new Reply(message);
  const beat = pulse(drawn, saved);
  try {
    const answer = await ask('v1/chat/completions', { method: 'POST', headers, body: await body(), signal });
    await events(answer.body, (event) => {
      reply.take(event);
      beat.grown();
    });
    message.end ??= 'stop';
  } catch (error) {
    fail(message, error, signal);
    if (error.status === 401) throw error;
  } finally {
    beat.end();
  }
}

function fail(message, error, signal) {
  if (signal.aborted) {
    message.end = 'stopped';
    return;
  }
  message.end = 'error';
  // A failed fetch is a TypeError, and its words differ between browsers.
  message.error = error instanceof TypeError ? 'The server does not answer.' : error.message;
}

/** Draws and saves now and then, since tokens come faster than screens are drawn. A long answer is drawn less often. */
function pulse(drawn, saved) {
  let [drawing, saving, took_ms] = [null, null, 0];
  return {
    grown() {
      drawing ??= setTimeout(() => {
        drawing = null;
        const since = performance.now();
        drawn();
        took_ms = performance.now() - since;
      }, Math.max(DRAW_EVERY_MS, 4 * took_ms));
      saving ??= setTimeout(() => {
        saving = null;
        saved();
      }, SAVE_EVERY_MS);
    },
    end() {
      clearTimeout(drawing);
      clearTimeout(saving);
    },
  };
}
