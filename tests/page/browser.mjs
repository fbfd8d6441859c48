// A browser for the checks: one context each, in which every error, every policy violation and every foreign address is a failure.

import assert from 'node:assert/strict';
import { createRequire } from 'node:module';

const { chromium } = createRequire(`${process.env.PLAYWRIGHT}/`)('playwright-core');

/** Markup that must stay text, wherever it comes from. */
export const HOSTILE = '<img src=x onerror=alert(1)>';

/** Starts Chromium. */
export async function launch() {
  // A test may run as root, where Chromium has no sandbox; what it opens is our own page.
  return chromium.launch({ executablePath: process.env.CHROMIUM, args: ['--no-sandbox', '--disable-dev-shm-usage'] });
}

/** Opens the page, runs `check(page, context)`, and fails on whatever the console says beyond what `expected` matches. */
export async function visit(browser, url, check, { expected = null, path = '/', prepare = null, ...options } = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const complaints = [];
  const page = await context.newPage();
  page.setDefaultTimeout(Number(process.env.PATIENCE_MS ?? 60000));
  page.on('console', (message) => {
    const text = message.text();
    if (['error', 'warning'].includes(message.type()) && !expected?.test(text)) complaints.push(`console: ${text}`);
  });
  page.on('pageerror', (error) => complaints.push(`error: ${error.stack}`));
  page.on('dialog', (dialog) => {
    complaints.push(`dialog: ${dialog.message()}`);
    dialog.dismiss().catch(() => {});
  });
  context.on('request', (request) => {
    const { host, protocol } = new URL(request.url());
    if (protocol !== 'blob:' && host !== new URL(url).host) complaints.push(`foreign: ${request.url()}`);
  });
  await context.addInitScript(() => {
    addEventListener('securitypolicyviolation', (event) => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`));
  });
  try {
    await prepare?.(page);
    await page.goto(url + path);
    await check(page, context);
  } finally {
    await context.close();
  }
  assert.deepEqual(complaints, [], 'the browser has nothing to complain about');
}

/** Waits until the page shows fresh numbers. */
export async function live(page) {
  await page.locator('#feed[data-state=live]').waitFor();
}

/** Sends a message with the keyboard. */
export async function say(page, words) {
  await page.fill('#chat-input', words);
  await page.locator('#chat-input').press('Enter');
}

/** The last answer, once it is complete. */
export async function answered(page) {
  const answer = page.locator('.message.assistant').last();
  await page.locator('#chat-send').waitFor();
  await eventually('an answer is complete', async () => (await answer.getAttribute('aria-busy')) === 'false');
  return answer;
}

/** Waits for `condition`, an async function, to be true. */
export async function eventually(what, condition, within_ms = Number(process.env.PATIENCE_MS ?? 60000)) {
  const since = Date.now();
  while (!(await condition())) {
    if (Date.now() - since > within_ms) throw new Error(`in vain: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

/** Nothing reaches over the right edge or below the page, but in boxes that scroll by themselves. */
export async function fits(page, width) {
  const wide = await page.evaluate((most) => {
    const over = [...document.querySelectorAll('body *')].filter((node) => {
      const box = node.getBoundingClientRect();
      const hidden = node.closest('.visually-hidden, .skip, svg, [hidden], pre, .md-table > *');
      return box.width > 0 && !hidden && box.right > most + 0.5;
    });
    const { scrollWidth: scroll, scrollHeight: tall } = document.documentElement;
    return { scroll, tall: tall - innerHeight, over: over.map((node) => `${node.tagName}.${node.className}`) };
  }, width);
  assert.ok(wide.scroll <= width, `scrolls to ${wide.scroll}`);
  assert.ok(wide.tall <= 0, `the page is ${wide.tall} pixels too tall`);
  assert.deepEqual(wide.over, []);
}

/** A stream of another client, until it is dropped; several choices, so that it outlasts a page that opens slowly. */
export async function neighbour(url, headers = {}) {
  const leaving = new AbortController();
  const body = JSON.stringify({ prompt: 'Count: one, two, three', n: 6, max_tokens: 1500, ignore_eos: true, stream: true });
  const answer = await fetch(`${url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json', ...headers },
    body,
    signal: leaving.signal,
  });
  assert.equal(answer.status, 200, 'the neighbour is let in');
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const read = { text: '', ended: false, leave: () => leaving.abort() };
  (async () => {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      read.text += value;
    }
  })()
    .catch(() => {})
    .finally(() => (read.ended = true));
  await eventually('the neighbour hears something', () => read.text.includes('"id":"'));
  read.id = read.text.split('"id":"')[1].split('"')[0];
  return read;
}
