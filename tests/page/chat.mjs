// Talking: send, stream, stop, edit, regenerate, continue, files, settings. Real answers where that matters, fixed ones elsewhere.

import assert from 'node:assert/strict';

import { answered, eventually, live, say, visit } from './browser.mjs';
import { front } from './front.mjs';

const { PLAIN, SHOTS } = process.env;

/** A reddish square of 8 x 8. */
export const PNG = Buffer.from(
  'iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEUlEQVR4nGM4YSSPFTEMLQkAnZ1GQTJxATgAAAAASUVORK5CYII=',
  'base64',
);

/** Runs `check(page, asked, answers)` against PLAIN with answers of `chat`; `asked` collects the bodies. */
export async function faked(browser, chat, check, options = {}) {
  const asked = [];
  const answering = (next) => async (body, stream) => {
    asked.push(body);
    await next(body, stream);
  };
  const fake = await front(PLAIN, { chat: answering(chat) });
  try {
    await visit(browser, fake.url, (page, context) => check(page, asked, (next) => fake.answers(answering(next)), context), options);
  } finally {
    await fake.end();
  }
}

/** Answers with fixed words. */
export const words = (text) => async (_, stream) => {
  await stream.write(text, { every_ms: 1 });
  stream.end();
};

/** The newest answer's words. */
const body = (page) => page.locator('.message.assistant').last().locator('> .body');

export const checks = {
  async 'by keyboard alone, with a real model'(browser) {
    let stream = '';
    const read = async (route) => {
      const response = await route.fetch({ postData: { ...route.request().postDataJSON(), max_tokens: 24, temperature: 0 }, timeout: 60000 });
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
        assert.ok(i < 3, 'the way to the message field is short');
        await page.keyboard.press('Tab');
      }
      await page.keyboard.press('Enter');
      await eventually('the field has the focus', async () => (await focused()) === 'chat-input');
      await page.keyboard.type('What is the capital of France?');
      await page.keyboard.press('Enter');
      const answer = await answered(page);
      const shown = (await answer.locator('> .body').textContent()).replace(/\s+/g, ' ').trim();
      assert.equal(shown, said(stream).replace(/\s+/g, ' ').trim());
      assert.match(await answer.locator('.message-foot .detail').textContent(), /\d+ tokens? · .*first token after .*prompt \d+/);
      assert.equal(await page.textContent('#news'), 'The answer is complete', 'a screen reader hears of it');
      // Again, and stopped: Escape.
      way = endless;
      await page.keyboard.type('Tell a very long story about the sea.');
      await page.keyboard.press('Enter');
      await eventually('it has begun', async () => (await body(page).textContent()).length > 10);
      await page.keyboard.press('Escape');
      await eventually('it stops', async () => /stopped/.test(await page.locator('.message.assistant').last().locator('.message-foot .detail').textContent()));
      await eventually('the server has ended it', async () => (await (await fetch(`${PLAIN}/v1/status`)).json()).requests.length === 0);
      assert.equal(await page.locator('#chat-send').isVisible(), true);
      // Everything that can be reached shows that it is.
      const seen = new Set();
      for (let i = 0; i < 45; i += 1) {
        await page.keyboard.press('Tab');
        const [name, outline] = await page.evaluate(() => {
          const node = document.activeElement;
          const style = getComputedStyle(node);
          return [node.id || node.getAttribute('aria-label') || node.textContent.slice(0, 20), node === document.body ? 'body' : style.outlineStyle];
        });
        seen.add(name);
        assert.notEqual(outline, 'none', `${name} has no visible focus`);
      }
      const wanted = ['tab-server', 'theme', 'chat-new', 'list-search', 'settings-open', 'chat-input', 'chat-pick', 'chat-send', 'Copy the message', 'Edit the message', 'Regenerate the answer'];
      for (const name of wanted) assert.ok(seen.has(name), `${name} is reached: ${[...seen]}`);
      const nameless = await page.$$eval('button, a, input:not([aria-hidden]), textarea, select', (nodes) =>
        nodes.filter((node) => node.checkVisibility() && !(node.getAttribute('aria-label') || node.textContent.trim() || node.labels?.length)).map((node) => node.outerHTML.slice(0, 120)),
      );
      assert.deepEqual(nameless, [], 'everything has a name');
    };
    await visit(browser, PLAIN, check, { prepare });
  },

  async 'streams, and stops with what there is'(browser) {
    let dropped = false;
    const chat = async (_, stream) => {
      await stream.write('First words. ', { every_ms: 1 });
      await stream.closed;
      dropped = true;
    };
    const check = async (page) => {
      await live(page);
      await say(page, 'hello');
      await eventually('the first words are there', async () => (await body(page).textContent()).includes('First words.'));
      assert.equal(await page.locator('.message.assistant').getAttribute('aria-busy'), 'true');
      await page.click('#chat-stop');
      const answer = await answered(page);
      await eventually('the server hears of it', () => dropped);
      assert.match(await answer.locator('.message-foot .detail').textContent(), /^stopped/);
      assert.equal((await body(page).textContent()).trim(), 'First words.');
    };
    await faked(browser, chat, check);
  },

  async 'an edited question and a new answer are versions beside the old ones'(browser) {
    let count = 0;
    const chat = (body, stream) => words(`answer ${(count += 1)} to ${body.messages.at(-1).content}`)(body, stream);
    const check = async (page, asked) => {
      await live(page);
      await say(page, 'one');
      await answered(page);
      await page.getByRole('button', { name: 'Regenerate the answer' }).click();
      await eventually('there is another answer', async () => (await body(page).textContent()) === 'answer 2 to one');
      const answer = await answered(page);
      assert.equal(await answer.locator('.branch-place').textContent(), '2 of 2');
      await answer.getByRole('button', { name: 'Previous version' }).click();
      assert.equal(await body(page).textContent(), 'answer 1 to one');
      // The conversation goes on from the version that is shown.
      await say(page, 'two');
      await answered(page);
      assert.deepEqual(asked.at(-1).messages.map((message) => message.content), ['one', 'answer 1 to one', 'two']);
      await page.locator('.message.user').first().getByRole('button', { name: 'Edit the message' }).click();
      const field = page.locator('.edit-box textarea');
      assert.equal(await field.inputValue(), 'one');
      await field.press('Escape');
      assert.equal(await field.count(), 0, 'Escape leaves it as it was');
      await page.locator('.message.user').first().getByRole('button', { name: 'Edit the message' }).click();
      await field.fill('uno');
      await field.press('Enter');
      await eventually('the edited question is answered', async () => (await body(page).textContent()) === 'answer 4 to uno');
      await answered(page);
      assert.deepEqual(asked.at(-1).messages.map((message) => message.content), ['uno']);
      assert.equal(await page.locator('.message').count(), 2);
      const first = page.locator('.message.user').first();
      assert.equal(await first.locator('.branch-place').textContent(), '2 of 2');
      await first.getByRole('button', { name: 'Previous version' }).click();
      assert.deepEqual(await page.locator('.message.user .body').allTextContents(), ['one', 'two']);
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/versions.png` });
    };
    await faked(browser, chat, check);
  },

  async 'an answer that ended early is continued'(browser) {
    const chat = async (body, stream) => {
      const more = body.continue_final_message === true;
      await stream.write(more ? ' and the end.' : 'The beginning', { every_ms: 1 });
      stream.end(more ? 'stop' : 'length');
    };
    const check = async (page, asked) => {
      await live(page);
      await say(page, 'hello');
      const answer = await answered(page);
      assert.match(await answer.locator('.message-foot .detail').textContent(), /^ended at the token limit/);
      await answer.getByRole('button', { name: 'Continue' }).click();
      await eventually('it goes on', async () => (await body(page).textContent()) === 'The beginning and the end.');
      await answered(page);
      assert.deepEqual(asked.at(-1).messages.at(-1), { role: 'assistant', content: 'The beginning' });
      assert.equal(asked.at(-1).add_generation_prompt, false);
      assert.equal(await page.getByRole('button', { name: 'Continue' }).count(), 0);
    };
    await faked(browser, chat, check);
  },

  async 'what goes wrong is said, and nothing that was written is lost'(browser) {
    const check = async (page, asked, answers) => {
      await live(page);
      await say(page, 'a question');
      let answer = await answered(page);
      assert.equal(await answer.locator('.error').textContent(), 'the words of the server');
      assert.equal(await page.textContent('.message.user .body'), 'a question');
      answers(words('better'));
      await answer.getByRole('button', { name: 'Regenerate the answer' }).click();
      await eventually('it answers', async () => (await body(page).textContent()) === 'better');
      await answered(page);
      // A stream that ends too early, one with an error, and one with nonsense.
      for (const [event, error] of [
        [null, /before the answer was complete/],
        [{ error: { message: 'gone' } }, /^gone$/],
        ['data: {"choices": [\n\n', /not JSON/],
      ]) {
        answers(async (_, stream) => {
          await stream.write('half', { every_ms: 0 });
          if (event !== null) stream.event(event);
          stream.response.end();
        });
        await say(page, 'again');
        answer = await answered(page);
        assert.match(await answer.locator('.error').textContent(), error);
        assert.equal(await answer.locator('> .body').textContent(), 'half', 'what came is kept');
      }
      // A question without an answer is no part of what follows.
      answers((_, stream) => stream.refuse(400, 'no'));
      await say(page, 'refused');
      await answered(page);
      answers(words('fine'));
      await say(page, 'last');
      await answered(page);
      const contents = asked.at(-1).messages.map((message) => message.content);
      assert.ok(!contents.includes('refused') && contents.at(-1) === 'last', contents.join());
      // Neither is one whose answer was stopped before its first word.
      answers((_, stream) => stream.closed);
      await say(page, 'stopped');
      await page.keyboard.press('Escape');
      await answered(page);
      answers(words('fine'));
      await say(page, 'after');
      await answered(page);
      assert.deepEqual(asked.at(-1).messages.map((message) => message.content), [...contents, 'fine', 'after']);
    };
    await faked(browser, (_, stream) => stream.refuse(400, 'the words of the server'), check, { expected: /status of 400/ });
  },

  async 'another chat may be open while an answer is written'(browser) {
    let release = null;
    const chat = async (body, stream) => {
      if (body.messages.at(-1).content === 'slow') await new Promise((resolve) => (release = resolve));
      await words(`to ${body.messages.at(-1).content}`)(body, stream);
    };
    const check = async (page, asked) => {
      await live(page);
      await say(page, 'slow');
      await eventually('it is asked', () => release !== null);
      await page.click('#chat-new');
      assert.equal(await page.locator('.message').count(), 0);
      await say(page, 'fast');
      await answered(page);
      assert.deepEqual(asked.at(-1).messages, [{ role: 'user', content: 'fast' }]);
      release();
      await page.locator('#list-items a', { hasText: 'slow' }).click();
      await eventually('the other answer is there', async () => (await body(page).textContent()) === 'to slow');
    };
    await faked(browser, chat, check);
  },

  async 'long prompts show how far they are'(browser) {
    let asked = null;
    const chat = async (_, stream) => {
      asked = stream.id;
      await stream.closed;
    };
    const prepare = (page) =>
      page.route('**/v1/status', async (route) => {
        const status = await (await route.fetch()).json();
        const row = { id: 'x', request_id: asked, endpoint: 'chat', stream: true, choices: 1, generated_tokens: 0 };
        if (asked) status.requests.push({ ...row, phase: 'prefill', prompt_tokens: 8000, computed_tokens: 2000 });
        await route.fulfill({ json: status });
      });
    const check = async (page) => {
      await live(page);
      await say(page, 'a long prompt');
      await page.locator('.message.assistant .progress:visible').waitFor();
      await eventually('it is said', async () => (await page.locator('.progress:visible').textContent()) === 'Computing the prompt: 2,000 of 8,000 tokens');
      assert.equal(await page.$eval('.message.assistant progress', (node) => node.value), 0.25);
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/prefill.png` });
      await page.keyboard.press('Escape');
      await answered(page);
      assert.equal(await page.locator('.progress:visible').count(), 0);
    };
    await faked(browser, chat, check, { prepare });
  },
};

/** The text that a stream carried. */
function said(stream) {
  const events = stream.split('\n').filter((line) => line.startsWith('data: {'));
  const text = events.map((line) => JSON.parse(line.slice(6)).choices[0]?.delta.content ?? '').join('');
  assert.ok(text.length > 0, 'it said something');
  return text;
}
