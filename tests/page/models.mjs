// What depends on the server: sampling defaults, images, audio, a key, several models, a model without text.

import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';

import { HOSTILE, answered, eventually, live, say, visit } from './browser.mjs';
import { PNG, faked, words } from './chat.mjs';

const { PLAIN, KEYED, KEY, ENCODER, SEEING, HEARING, SHOTS } = process.env;

const placeholders = (page) =>
  page.$$eval('#settings-numbers input', (fields) => Object.fromEntries(fields.map((field) => [field.id.slice(4).replaceAll('-', '_'), field.placeholder])));

/** Sends `text` to a real model, with at most a few tokens, and returns the request's body. */
async function asked(page, text) {
  const sent = page.waitForRequest('**/v1/chat/completions');
  await say(page, text);
  const body = JSON.parse((await sent).postData());
  await eventually('it answers', async () => (await page.locator('.message.assistant').last().locator('> .body').textContent()).length > 0);
  await page.keyboard.press('Escape');
  await answered(page);
  return body;
}

export const checks = {
  async 'the default sampling is shown, sent, and replaced by settings'(browser) {
    const check = async (page, bodies) => {
      await live(page);
      const { data } = await (await fetch(`${PLAIN}/v1/models`)).json();
      const { source, ...sampling } = data[0].default_sampling;
      assert.deepEqual(sampling, { temperature: 0.7, top_p: 0.95, top_k: 0, min_p: 0.05, repetition_penalty: 1 });
      assert.equal(source, 'server');
      await eventually('the defaults are shown', async () => (await placeholders(page)).temperature === '0.7');
      const shown = await placeholders(page);
      for (const [name, value] of Object.entries(sampling)) assert.equal(shown[name], String(value));
      await say(page, 'hello');
      await answered(page);
      const { messages, model, stream, stream_options, ...fields } = bodies[0];
      assert.deepEqual([model, stream], [data[0].id, true]);
      assert.deepEqual(fields, sampling);
      await page.click('#settings-open');
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/settings.png` });
      for (const [name, value] of [['temperature', '0'], ['top-k', '40'], ['max-tokens', '7'], ['seed', '5'], ['presence-penalty', '-0.5']]) await page.fill(`#set-${name}`, value);
      await page.fill('#set-top-p', '7');
      assert.equal(await page.textContent('#set-top-p-error'), '0 to 1', 'what the server would refuse is said');
      await page.fill('#set-stop', 'END\n\nSTOP');
      await page.selectOption('#set-thinking', 'off');
      await page.fill('#set-system', 'Be brief.');
      await page.click('#settings-keep');
      await page.click('#settings-close');
      await say(page, 'again');
      await answered(page);
      const next = bodies[1];
      assert.deepEqual([next.temperature, next.top_k, next.max_tokens, next.seed, next.presence_penalty, next.top_p], [0, 40, 7, 5, -0.5, 0.95]);
      assert.deepEqual([next.stop, next.enable_thinking, next.messages[0]], [['END', 'STOP'], false, { role: 'system', content: 'Be brief.' }]);
      // New chats begin with them, also after a reload; a reset brings the defaults back.
      await page.reload();
      await live(page);
      await page.click('#chat-new');
      await say(page, 'new');
      await answered(page);
      assert.deepEqual([bodies[2].temperature, bodies[2].messages[0].content], [0, 'Be brief.']);
      await page.click('#settings-open');
      await page.click('#settings-reset');
      await page.click('#settings-close');
      await say(page, 'reset');
      await answered(page);
      assert.deepEqual([bodies[3].temperature, bodies[3].messages[0].role, 'seed' in bodies[3]], [0.7, 'user', false]);
    };
    await faked(browser, words('yes'), check);
  },

  async 'a model that takes images is shown one and answers'(browser) {
    const check = async (page) => {
      await live(page);
      await eventually('images may be picked', async () => (await page.getAttribute('#chat-file', 'accept')).includes('image/png'));
      assert.equal((await placeholders(page)).top_k, '20', 'the recommendation of the checkpoint');
      await page.setInputFiles('#chat-file', { name: '<b>red</b>.png', mimeType: 'image/png', buffer: PNG });
      await page.locator('#chat-files canvas').waitFor();
      assert.match(await page.textContent('#chat-files'), /^<b>red<\/b>\.png/);
      const body = await asked(page, 'What is this?');
      const [text, image] = body.messages[0].content;
      assert.deepEqual([text, image.type], [{ type: 'text', text: 'What is this?' }, 'image_url']);
      assert.equal(image.image_url.url, `data:image/png;base64,${PNG.toString('base64')}`);
      assert.equal(await page.locator('.message.assistant .error:visible').count(), 0);
      const pixels = await page.$eval('.message.user canvas', (canvas) => [canvas.width, canvas.height, canvas.getContext('2d').getImageData(4, 4, 1, 1).data[0] > 100]);
      assert.deepEqual(pixels, [8, 8, true]);
      // The conversation goes on with it, also after a reload.
      await page.reload();
      await live(page);
      await page.locator('.message.user canvas').waitFor();
      const next = await asked(page, 'And now?');
      assert.deepEqual(next.messages[0].content.map((part) => part.type), ['text', 'image_url']);
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/image.png` });
      await page.setInputFiles('#chat-file', { name: 'no.png', mimeType: 'image/png', buffer: Buffer.from('no image') });
      await eventually('a broken one is said', async () => (await page.textContent('#chat-error')).includes('cannot be read as an image'));
    };
    await visit(browser, SEEING, check);
  },

  async 'a model that takes audio is sent one and answers'(browser) {
    const check = async (page) => {
      await live(page);
      await eventually('audio may be picked', async () => (await page.getAttribute('#chat-file', 'accept')).includes('.flac'));
      const sound = await readFile(new URL('../fixtures/media/chord.flac', import.meta.url));
      await page.setInputFiles('#chat-file', { name: 'chord.flac', mimeType: 'audio/flac', buffer: sound });
      await page.locator('#chat-files li').waitFor();
      const body = await asked(page, 'What do you hear?');
      assert.deepEqual(body.messages[0].content[1], { type: 'input_audio', input_audio: { format: 'flac', data: sound.toString('base64') } });
      assert.equal(await page.locator('.message.assistant .error:visible').count(), 0);
      await page.setInputFiles('#chat-file', { name: 'a.aac', mimeType: 'audio/aac', buffer: sound });
      await eventually('another format is said', async () => (await page.textContent('#chat-error')) === 'a.aac is audio/aac. Audio must be WAV, MP3, FLAC or Ogg Vorbis.');
    };
    await visit(browser, HEARING, check);
  },

  async 'one of several models is chosen'(browser) {
    const model = (id, state, inputs) => ({ id, root: id, state, ...(inputs ? { input_modalities: inputs, output_modalities: ['text'] } : {}) });
    let list = [model('first', 'loaded', ['text']), { ...model('alias', 'loaded', ['text']), root: 'first' }, model(HOSTILE, 'unloaded')];
    const prepare = (page) => page.route('**/v1/models', (route) => route.fulfill({ json: { data: list } }));
    const check = async (page, bodies) => {
      await live(page);
      await page.locator('#model-select option').nth(1).waitFor({ state: 'attached' });
      const options = await page.$$eval('#model-select option', (nodes) => nodes.map((node) => node.label));
      assert.deepEqual(options, ['first', `${HOSTILE} (unloaded)`], 'each model once');
      await page.selectOption('#model-select', HOSTILE);
      assert.equal((await placeholders(page)).temperature, 'default', 'unknown before it is loaded');
      await say(page, 'hello');
      const answer = await answered(page);
      assert.deepEqual([bodies[0].model, 'temperature' in bodies[0]], [HOSTILE, false]);
      assert.equal(await answer.locator('.message-head').textContent(), HOSTILE);
      list = [list[0], model(HOSTILE, 'loaded', ['text', 'image'])];
      await eventually('it takes images now', async () => (await page.getAttribute('#chat-file', 'accept')).includes('image/png'));
      assert.equal((await placeholders(page)).temperature, '0.7', 'a general default where the server says none');
      await say(page, 'again');
      await answered(page);
      assert.deepEqual([bodies[1].temperature, bodies[1].top_p, bodies[1].min_p], [0.7, 0.95, 0.05]);
    };
    await faked(browser, words('yes'), check, { prepare });
  },

  async 'a key opens it for this tab; a hostile name is text; state has its own chart'(browser) {
    const check = async (page, context) => {
      await page.locator('#key-dialog[open]').waitFor();
      await page.keyboard.press('Escape');
      await page.keyboard.press('Escape');
      await page.keyboard.type('not-the-right-key');
      await page.keyboard.press('Enter');
      await page.locator('#key-error').waitFor();
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/key.png` });
      await page.keyboard.type(KEY);
      await page.keyboard.press('Enter');
      await live(page);
      await eventually('its name is there', async () => (await page.locator('#model-select option').allTextContents()).includes(HOSTILE));
      assert.ok((await page.title()).startsWith(HOSTILE));
      await asked(page, 'hello');
      await page.click('#tab-server');
      await eventually('its name is there, too', async () => (await page.textContent('#model')) === HOSTILE);
      assert.ok(await page.locator('.chart h3', { hasText: 'Recurrent state' }).isVisible());
      assert.equal(await page.locator('img').count(), 0);
      await page.reload();
      await live(page);
      const stored = await page.evaluate(() => [Object.values(sessionStorage), Object.values(localStorage), document.cookie]);
      assert.deepEqual(stored, [[KEY], [], ''], 'it is kept in this tab and nowhere else');
      const exported = await page.evaluate(
        () => new Promise((resolve) => (indexedDB.open('plimsoll').onsuccess = ({ target }) => (target.result.transaction('messages').objectStore('messages').getAll().onsuccess = (event) => resolve(JSON.stringify(event.target.result))))),
      );
      assert.ok(!exported.includes(KEY) && exported.includes('hello'));
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
      await page.click('#tab-server');
      await eventually('there is one chart', async () => (await page.locator('.chart:visible h3').allTextContents()).join() === 'Tokens per second');
      const read = { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ input: ['a ship', 'the sea'] }) };
      assert.equal((await fetch(`${ENCODER}/v1/embeddings`, read)).status, 200);
      await eventually('what it reads is counted', async () => !/^(0 |\s*$)/.test(await page.textContent('#tile-tokens')));
      assert.equal(await page.locator('#components tr[data-component=kv_pages]:visible').count(), 0);
      assert.equal(await page.locator('#components tr[data-component=weights]:visible').count(), 1);
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/encoder.png`, fullPage: true });
    };
    await visit(browser, ENCODER, check);
  },
};
