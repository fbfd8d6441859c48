// The load-line page in a real Chromium. Run by `cargo test -p plimsoll --test blackbox page`, which starts the servers and names
// them: PLAIN serves the default model, KEYED a hybrid model behind KEY and under a hostile name, ENCODER an embedding model, SEEING
// one that takes images.
// With SHOTS set to a directory, it leaves pictures there.

import assert from 'node:assert/strict';

import { eventually, fits, launch, live, neighbour, visit } from './browser.mjs';

const { PLAIN, KEYED, KEY, ENCODER, SEEING, SHOTS } = process.env;
const HOSTILE = '<img src=x onerror=alert(1)>';

/** A reddish square of 8 x 8. */
const PNG = Buffer.from(
  'iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEUlEQVR4nGM4YSSPFTEMLQkAnZ1GQTJxATgAAAAASUVORK5CYII=',
  'base64',
);

const checks = {
  async 'components are the ledger and lie under the line'(browser) {
    // One answer, held, so that the page and the test speak of the same moment.
    let memory = null;
    const prepare = (page) =>
      page.route('**/v1/memory', async (route) => {
        if (memory === null) memory = await (await route.fetch()).json();
        await route.fulfill({ json: memory });
      });
    const check = async (page) => {
      await live(page);
      const rows = await page.$$eval('#components tr[data-component]', (rows) => rows.map((row) => ({ ...row.dataset, seen: row.offsetHeight > 0 })));
      assert.deepEqual(rows.map((row) => row.component), memory.components.map((row) => row.component));
      for (const [row, from] of rows.map((row, i) => [row, memory.components[i]])) {
        assert.deepEqual([+row.planned, +row.committed], [from.planned_bytes, from.committed_bytes], row.component);
        assert.equal(row.seen, from.planned_bytes > 0, row.component);
      }
      const sum = (of) => rows.reduce((sum, row) => sum + Number(row[of]), 0);
      assert.equal(sum('planned'), memory.planned_bytes);
      const together = await page.$eval('#sum-together', (row) => ({ ...row.dataset }));
      assert.deepEqual([+together.planned, +together.committed], [memory.planned_bytes, memory.committed_bytes]);
      const drawn = await page.$$eval('.cargo .planned', (rects) => rects.map((rect) => [+rect.getAttribute('y'), +rect.getAttribute('height')]));
      const line = await page.$eval('.mark', (mark) => +mark.getAttribute('cy'));
      assert.ok(Math.min(...drawn.map(([y]) => y)) > line, 'the cargo lies below the line');
      assert.ok(drawn.some(([, height]) => height > 40), 'and can be seen');
      assert.match(await page.textContent('#line-source'), /Memory limit: .* from /);
    };
    await visit(browser, PLAIN, check, { prepare });
  },

  async 'a request appears with what it holds, and its button ends it'(browser) {
    const other = await neighbour(PLAIN, { 'x-request-id': HOSTILE });
    const check = async (page) => {
      await live(page);
      const row = page.locator(`#requests tr[data-id="${other.id}"]`);
      await row.waitFor();
      await eventually('it is writing', async () => (await row.locator('.phase').textContent()) === 'Decode');
      assert.ok(+(await row.getAttribute('data-memory')) > 1000, 'it holds memory');
      assert.ok((await row.textContent()).includes(HOSTILE), 'its id is text');
      assert.equal(await page.locator('#requests img').count(), 0);
      await eventually('it has a speed', async () => /\d\/s/.test(await row.locator('[data-label=Speed]').textContent()));
      await eventually('the chart draws', async () => ((await page.getAttribute('.trace.speed', 'd')) ?? '').includes('L'));
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/requests.png`, fullPage: true });
      await row.locator('button').focus();
      await page.keyboard.press('Enter');
      await eventually('its stream ends', () => other.ended);
      await row.waitFor({ state: 'detached' });
      assert.ok(other.text.includes('request_cancelled'), other.text.slice(-300));
      assert.equal(await page.evaluate(() => document.activeElement.id), 'requests-title', 'the focus goes to a place that stays');
    };
    await visit(browser, PLAIN, check);
  },

  async 'chat by keyboard alone'(browser) {
    let stream = '';
    const read = async (route) => {
      const response = await route.fetch({ postData: { ...route.request().postDataJSON(), max_tokens: 24 }, timeout: 60000 });
      stream = await response.text();
      await route.fulfill({ response, body: stream });
    };
    const endless = (route) => route.continue({ postData: { ...route.request().postDataJSON(), ignore_eos: true } });
    // There before the page is: on a busy machine a page that runs learns of it only after its next request.
    let way = read;
    const prepare = (page) => page.route('**/v1/chat/completions', (route) => way(route));
    const check = async (page) => {
      await live(page);
      const focused = () => page.evaluate(() => document.activeElement.id);
      for (let i = 0; (await focused()) !== 'skip-chat'; i += 1) {
        assert.ok(i < 5, 'the way to the chat is short');
        await page.keyboard.press('Tab');
      }
      await page.keyboard.press('Enter');
      assert.equal(await focused(), 'chat-input');
      await page.keyboard.type('What is the capital of France?');
      await page.keyboard.press('Enter');
      const answer = page.locator('.bubble.assistant').last();
      await eventually('it answers', async () => /\d tokens/.test(await answer.locator('> .detail').textContent()));
      assert.equal(await answer.locator('> .body').textContent(), said(stream));
      // Again, and stopped: Escape.
      way = endless;
      await page.keyboard.type('Tell a very long story about the sea.');
      await page.keyboard.press('Enter');
      const story = page.locator('.bubble.assistant').last();
      await eventually('it has begun', async () => (await story.locator('> .body').textContent()).length > 10);
      await page.locator('#requests tr', { hasText: 'this page' }).waitFor();
      await page.keyboard.press('Escape');
      await eventually('it stops', async () => (await story.locator('> .detail').textContent()).startsWith('stopped'));
      await page.locator('#requests tr').first().waitFor({ state: 'detached' });
      assert.equal(await page.locator('#chat-send').isVisible(), true);
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/chat.png`, fullPage: true });
      // Everything that can be reached shows that it is.
      const seen = new Set();
      for (let i = 0; i < 40; i += 1) {
        await page.keyboard.press('Tab');
        const [name, outline] = await page.evaluate(() => {
          const node = document.activeElement;
          const style = getComputedStyle(node);
          return [node.id || node.textContent.slice(0, 20), node === document.body ? 'body' : style.outlineStyle];
        });
        seen.add(name);
        assert.notEqual(outline, 'none', `${name} has no visible focus`);
      }
      for (const name of ['theme', 'chat-input', 'chat-new', 'chat-send']) assert.ok(seen.has(name), `${name} is reached: ${[...seen]}`);
    };
    await visit(browser, PLAIN, check, { prepare });
  },

  async 'an image goes along, and what the server says to it is shown'(browser) {
    const check = async (page) => {
      await live(page);
      assert.equal(await page.locator('#chat-pick').isVisible(), false, 'a model of text alone is offered no image');
      await page.setInputFiles('#chat-image', { name: '<b>red</b>.png', mimeType: 'image/png', buffer: PNG });
      await page.locator('#chat-picked').waitFor();
      assert.match(await page.textContent('#chat-picked-name'), /^<b>red<\/b>\.png/);
      const sent = page.waitForRequest('**/v1/chat/completions');
      await page.fill('#chat-input', 'What is this?');
      await page.click('#chat-send');
      const [text, image] = JSON.parse((await sent).postData()).messages[0].content;
      assert.deepEqual([text, image.type], [{ type: 'text', text: 'What is this?' }, 'image_url']);
      assert.equal(image.image_url.url, `data:image/png;base64,${PNG.toString('base64')}`);
      await page.locator('#chat-error').waitFor();
      assert.match(await page.textContent('#chat-error'), /type/, 'the words of the server');
      assert.equal(await page.inputValue('#chat-input'), 'What is this?', 'nothing that was written is lost');
      // The conversation goes on without it.
      await page.fill('#chat-input', 'Say yes.');
      await page.keyboard.press('Enter');
      await eventually('it answers', async () => (await page.locator('.bubble.assistant > .body').last().textContent()).length > 0);
      await page.keyboard.press('Escape');
      // As many bytes as a body may have are too many in a data URL.
      const { max_body_bytes: most } = await (await fetch(`${PLAIN}/v1/status`)).json();
      await page.setInputFiles('#chat-image', { name: 'big.png', mimeType: 'image/png', buffer: Buffer.alloc(most) });
      await eventually('too large is said', async () => (await page.textContent('#chat-error')).includes('--max-body-bytes'));
      await page.setInputFiles('#chat-image', { name: 'no.png', mimeType: 'image/png', buffer: Buffer.from('no image') });
      await eventually('broken is said', async () => (await page.textContent('#chat-error')).includes('cannot be read as an image'));
    };
    await visit(browser, PLAIN, check, { expected: /status of 400/ });
  },

  async 'a model that sees is shown an image and answers'(browser) {
    const check = async (page) => {
      await live(page);
      await page.locator('#chat-pick').waitFor();
      await page.setInputFiles('#chat-image', { name: 'red.png', mimeType: 'image/png', buffer: PNG });
      await page.locator('#chat-picked').waitFor();
      await page.fill('#chat-input', 'What is this?');
      await page.click('#chat-send');
      const said = () => page.locator('.bubble.assistant > .body').last().textContent();
      await eventually('it answers', async () => (await said()).length > 0);
      await page.keyboard.press('Escape');
      await page.locator('#chat-send').waitFor();
      assert.equal(await page.locator('.bubble.user canvas').count(), 1);
      assert.equal(await page.locator('#chat-error').isVisible(), false);
      // The conversation goes on with it.
      const sent = page.waitForRequest('**/v1/chat/completions');
      await page.fill('#chat-input', 'And now?');
      await page.keyboard.press('Enter');
      const { messages } = JSON.parse((await sent).postData());
      assert.deepEqual(messages[0].content.map((part) => part.type), ['text', 'image_url']);
      await eventually('it answers again', async () => (await page.locator('.bubble.assistant').count()) === 2 && (await said()).length > 0);
      await page.keyboard.press('Escape');
      await page.locator('#chat-send').waitFor();
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/seeing.png`, fullPage: true });
    };
    await visit(browser, SEEING, check);
  },

  async 'answers are text, thoughts apart, errors in a stream are said'(browser) {
    let reply = '';
    const chunk = (delta) => `data: ${JSON.stringify({ choices: [{ delta }] })}\n\n`;
    let [asked, held] = [null, null];
    const prepare = (page) =>
      page.route('**/v1/chat/completions', async (route) => {
        asked = route.request().postDataJSON();
        await held;
        await route.fulfill({ contentType: 'text/event-stream', body: reply }).catch(() => {});
      });
    const check = async (page) => {
      await live(page);
      reply = `: still there\n\n${chunk({ reasoning_content: `hm ${HOSTILE}` })}${chunk({ content: `no ${HOSTILE}` })}data: [DONE]\n\n`;
      await page.fill('#chat-input', HOSTILE);
      await page.keyboard.press('Enter');
      const answer = page.locator('.bubble.assistant');
      await eventually('it is there', async () => (await answer.locator('> .body').textContent()) === `no ${HOSTILE}`);
      assert.equal(await answer.locator('details .body').textContent(), `hm ${HOSTILE}`);
      assert.equal(await page.textContent('.bubble.user > .body'), HOSTILE);
      assert.equal(await page.locator('main img').count(), 0);
      reply = `${chunk({ content: 'half' })}data: ${JSON.stringify({ error: { message: `gone ${HOSTILE}` } })}\n\ndata: [DONE]\n\n`;
      await page.fill('#chat-input', 'again');
      await page.keyboard.press('Enter');
      await eventually('the error is said', async () => (await page.textContent('#chat-error')) === `gone ${HOSTILE}`);
      reply = chunk({ content: 'no end' });
      await page.fill('#chat-input', 'and again');
      await page.keyboard.press('Enter');
      await eventually('a cut stream is said', async () => (await page.textContent('#chat-error')).includes('before the answer was complete'));
      assert.deepEqual(asked.messages.map((message) => message.role), ['user', 'assistant', 'user', 'assistant', 'user']);
      // A new chat knows nothing of the old one, whose answer was still to come.
      held = new Promise(() => {});
      await page.fill('#chat-input', 'never answered');
      await page.keyboard.press('Enter');
      await page.locator('#chat-stop').waitFor();
      await page.click('#chat-new');
      held = null;
      reply = `${chunk({ content: 'fresh' })}data: [DONE]\n\n`;
      await page.locator('#chat-send').waitFor();
      await page.fill('#chat-input', 'hello');
      await page.keyboard.press('Enter');
      await eventually('it answers', async () => (await answer.last().locator('> .body').textContent()) === 'fresh');
      assert.deepEqual(asked.messages, [{ role: 'user', content: 'hello' }]);
    };
    await visit(browser, PLAIN, check, { prepare });
  },

  async 'light, dark, and the button between them'(browser) {
    const colours = () => {
      const probe = document.body.appendChild(document.createElement('i'));
      const names = ['paper', 'card', 'ink', 'soft', 'accent', 'bad', 'warn', 'good'];
      const resolved = names.map((name) => {
        probe.style.color = `var(--${name})`;
        return [name, getComputedStyle(probe).color];
      });
      probe.remove();
      return Object.fromEntries(resolved);
    };
    for (const [scheme, other] of [['light', 'dark'], ['dark', 'light']]) {
      const check = async (page, context) => {
        await live(page);
        const own = await page.evaluate(colours);
        for (const name of ['ink', 'soft', 'accent', 'bad', 'warn', 'good']) {
          for (const ground of ['card', 'paper']) {
            const ratio = contrast(own[name], own[ground]);
            assert.ok(ratio >= 4.5, `${scheme}: ${name} on ${ground} has a contrast of ${ratio.toFixed(2)}`);
          }
        }
        if (SHOTS) await page.screenshot({ path: `${SHOTS}/${scheme}.png`, fullPage: true });
        await page.click('#theme');
        const changed = await page.evaluate(colours);
        assert.notDeepEqual(changed, own);
        await page.reload();
        await live(page);
        assert.deepEqual(await page.evaluate(colours), changed, 'the choice is kept');
        assert.equal(await page.evaluate(() => getComputedStyle(document.documentElement).colorScheme), other);
        const second = await context.newPage();
        await second.goto(PLAIN);
        assert.deepEqual(await second.evaluate(colours), changed);
      };
      await visit(browser, PLAIN, check, { colorScheme: scheme });
    }
  },

  async '360 pixels wide, with requests and long words'(browser) {
    const other = await neighbour(PLAIN, { 'x-request-id': 'x'.repeat(128) });
    const check = async (page) => {
      await live(page);
      await page.locator('#requests tr').first().waitFor();
      await page.evaluate((word) => {
        document.querySelector('#chat-log').textContent = word;
        document.querySelector('#chat-error').hidden = false;
        document.querySelector('#chat-error').textContent = word;
      }, 'w'.repeat(400));
      await fits(page, 360);
      const small = await page.$$eval('button', (buttons) => buttons.filter((node) => node.offsetHeight > 0 && node.offsetHeight < 32).map((node) => node.id));
      assert.deepEqual(small, [], 'fingers find every button');
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/phone.png`, fullPage: true });
    };
    await visit(browser, PLAIN, check, { viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true });
    other.leave();
  },

  async 'nothing moves for those who want it so'(browser) {
    const still = async (page) => page.$eval('.dot', (node) => getComputedStyle(node).animationName);
    await visit(browser, PLAIN, async (page) => (await live(page), assert.equal(await still(page), 'none')), { reducedMotion: 'reduce' });
    await visit(browser, PLAIN, async (page) => (await live(page), assert.notEqual(await still(page), 'none')), { reducedMotion: 'no-preference' });
  },

  async 'a slow server is asked one question at a time, nobody while hidden, a silent one ever less'(browser) {
    const asked = { memory: 0, now: 0, most: 0 };
    let [slow_ms, silent] = [0, false];
    const prepare = (page) =>
      page.route('**/v1/memory', async (route) => {
        asked.memory += 1;
        asked.now += 1;
        asked.most = Math.max(asked.most, asked.now);
        await new Promise((resolve) => setTimeout(resolve, slow_ms));
        asked.now -= 1;
        await (silent ? route.abort('connectionrefused') : route.continue()).catch(() => {});
      });
    const check = async (page) => {
      await live(page);
      const during = async (ms) => {
        const before = asked.memory;
        await page.waitForTimeout(ms);
        return asked.memory - before;
      };
      const fast = await during(5000);
      assert.ok(fast >= 2 && fast <= 6, `${fast} in five seconds`);
      slow_ms = 1500;
      const slow = await during(9000);
      assert.ok(slow <= 4 && asked.most === 1, `${slow} slow ones in nine seconds, ${asked.most} at once`);
      slow_ms = 0;
      const hide = (hidden) =>
        page.evaluate((hidden) => {
          Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden });
          document.dispatchEvent(new Event('visibilitychange'));
        }, hidden);
      await hide(true);
      await page.locator('#feed[data-state=paused]').waitFor();
      await page.waitForTimeout(200);
      assert.equal(await during(3000), 0, 'nobody looks');
      await hide(false);
      await live(page);
      silent = true;
      await page.locator('#banner').waitFor();
      assert.match(await page.textContent('#banner'), /does not answer/);
      await page.waitForTimeout(4000);
      assert.ok((await during(6000)) <= 2, 'a silent server is left in peace');
      assert.ok(await page.$eval('#main', (node) => node.classList.contains('stale')));
      silent = false;
      await live(page);
      assert.equal(await page.locator('#banner').isVisible(), false);
    };
    await visit(browser, PLAIN, check, { prepare, expected: /ERR_CONNECTION_REFUSED/ });
  },

  async 'a key opens it for this tab; a hostile name is text; state has its own chart'(browser) {
    const check = async (page, context) => {
      await page.locator('#key-dialog[open]').waitFor();
      assert.equal(await page.locator('#components tr').count(), 0, 'nothing is shown without a key');
      await page.keyboard.press('Escape');
      await page.keyboard.press('Escape');
      await page.keyboard.type('not-the-right-key');
      await page.keyboard.press('Enter');
      await page.locator('#key-error').waitFor();
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/key.png` });
      await page.keyboard.type(KEY);
      await page.keyboard.press('Enter');
      await live(page);
      assert.equal(await page.textContent('#model'), HOSTILE);
      assert.ok((await page.title()).startsWith(HOSTILE));
      assert.equal(await page.locator('img').count(), 0);
      assert.ok(await page.locator('.chart h3', { hasText: 'Recurrent state' }).isVisible());
      await page.fill('#chat-input', 'hello');
      await page.keyboard.press('Enter');
      await eventually('questions carry the key', async () => (await page.locator('.bubble.assistant > .body').textContent()).length > 0);
      await page.keyboard.press('Escape');
      await eventually('it ends', async () => /tokens|stopped/.test(await page.locator('.bubble.assistant > .detail').textContent()));
      await page.reload();
      await live(page);
      const stored = await page.evaluate(() => [Object.values(sessionStorage), Object.values(localStorage), document.cookie]);
      assert.deepEqual(stored, [[KEY], [], ''], 'it is kept in this tab and nowhere else');
      const second = await context.newPage();
      await second.goto(KEYED);
      await second.locator('#key-dialog[open]').waitFor();
      await page.click('#forget-key');
      await page.locator('#key-dialog[open]').waitFor();
    };
    await visit(browser, KEYED, check, { expected: /status of 401/ });
  },

  async 'an encoder has no chat and no pool, and the page says so'(browser) {
    const check = async (page) => {
      await live(page);
      assert.equal(await page.locator('#chat-box').isVisible(), false);
      assert.match(await page.textContent('#chat-note'), /\/v1\/embeddings/);
      assert.equal(await page.locator('#chat-note').isVisible(), true);
      assert.deepEqual(await page.locator('.chart:visible h3').allTextContents(), ['Tokens per second']);
      const read = { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ input: ['a ship', 'the sea'] }) };
      assert.equal((await fetch(`${ENCODER}/v1/embeddings`, read)).status, 200);
      await eventually('what it reads is counted', async () => !(await page.textContent('#tile-tokens')).startsWith('0 '));
      assert.equal(await page.locator('#components tr[data-component=kv_pages]:visible').count(), 0);
      assert.equal(await page.locator('#components tr[data-component=weights]:visible').count(), 1);
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/encoder.png`, fullPage: true });
    };
    await visit(browser, ENCODER, check);
  },
};

/** The text that a stream carried. */
function said(stream) {
  const events = stream.split('\n').filter((line) => line.startsWith('data: {'));
  const text = events.map((line) => JSON.parse(line.slice(6)).choices[0]?.delta.content ?? '').join('');
  assert.ok(text.length > 0, 'it said something');
  return text;
}

/** WCAG's contrast of two `rgb(r, g, b)` colours. */
function contrast(a, b) {
  const light = (colour) => {
    const parts = colour.match(/\d+/g).map((part) => part / 255);
    const [red, green, blue] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const [dark, bright] = [light(a), light(b)].sort((x, y) => x - y);
  return (bright + 0.05) / (dark + 0.05);
}

const browser = await launch();
try {
  const wanted = process.argv.slice(2);
  for (const [name, check] of Object.entries(checks)) {
    if (wanted.length > 0 && !wanted.some((word) => name.includes(word))) continue;
    const since = Date.now();
    await check(browser).catch((error) => {
      throw new Error(`${name}: ${error.stack}`);
    });
    console.log(`ok: ${name} (${((Date.now() - since) / 1000).toFixed(1)} s)`);
  }
} finally {
  await browser.close();
}
console.log('all good');
