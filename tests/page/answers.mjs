// What an answer looks like: Markdown, code, reasoning, tool calls, structured output. And what must stay text in it.

import assert from 'node:assert/strict';

import { HOSTILE, answered, eventually, live, say } from './browser.mjs';
import { faked, words } from './chat.mjs';
import { ATTACKS, LONG } from './texts.mjs';

const { SHOTS } = process.env;

const copied = (page) => page.evaluate(() => navigator.clipboard.readText());

export const checks = {
  async 'Markdown has tables, lists, links and code with colours and copy buttons'(browser) {
    const check = async (page, asked, answers, context) => {
      await context.grantPermissions(['clipboard-read', 'clipboard-write']);
      await live(page);
      await say(page, 'compare');
      const answer = await answered(page);
      const md = answer.locator('> .body');
      assert.equal(await md.locator('h5').first().textContent(), 'Sorting in three languages');
      assert.deepEqual(await md.locator('th').allTextContents(), ['Language', 'Function', 'Stable', 'Cost']);
      assert.deepEqual(await md.locator('tbody tr').nth(1).locator('td').allTextContents(), ['Rust', 'xs.sort()', 'yes', '98.1']);
      const aligned = await md.locator('tbody tr').first().locator('td').evaluateAll((cells) => cells.map((cell) => getComputedStyle(cell).textAlign));
      assert.deepEqual(aligned, ['left', 'center', 'center', 'right']);
      assert.equal(await md.locator('a').getAttribute('href'), 'https://example.org/docs');
      assert.equal(await md.locator('a').getAttribute('rel'), 'noopener noreferrer nofollow');
      assert.ok((await md.textContent()).includes('→ an entity'));
      assert.deepEqual(await md.locator('input[type=checkbox]').evaluateAll((boxes) => boxes.map((box) => box.checked)), [true, false]);
      assert.deepEqual(await md.locator('.code-language').allTextContents(), ['python', 'sh', 'rust', 'json']);
      await eventually('the code has colours', async () => (await md.locator('.hl-keyword').count()) > 3);
      const colours = await md.locator('pre').first().evaluate((pre) => new Set([...pre.querySelectorAll('span')].map((span) => getComputedStyle(span).color)).size);
      assert.ok(colours >= 4, `${colours} colours`);
      await md.getByRole('button', { name: 'Copy code' }).nth(1).click();
      assert.equal(await copied(page), 'cargo run --release -- serve demo   # no network needed');
      await answer.getByRole('button', { name: 'Copy the message' }).click();
      assert.equal(await copied(page), LONG);
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/markdown.png` });
    };
    await faked(browser, words(LONG), check);
  },

  async 'a streamed answer is drawn in place'(browser) {
    let release = null;
    const chat = async (_, stream) => {
      await stream.write('First *paragraph*.\n\n```js\nlet a = 1;\n', { every_ms: 1 });
      await new Promise((resolve) => (release = resolve));
      await stream.write('let b = 2;\n```\n\nLast.', { every_ms: 1 });
      stream.end();
    };
    const check = async (page) => {
      await live(page);
      await say(page, 'code');
      await eventually('the first part is there', async () => release !== null && (await page.locator('.message.assistant pre').count()) === 1);
      const keep = () => page.evaluate(() => ([window.first, window.pre] = [document.querySelector('.assistant em'), document.querySelector('.assistant pre')]) && null);
      await keep();
      release();
      await answered(page);
      const same = await page.evaluate(() => [window.first.isConnected, window.pre.isConnected, window.pre.textContent]);
      assert.deepEqual(same, [true, true, 'let a = 1;\nlet b = 2;'], 'finished parts keep their elements');
    };
    await faked(browser, chat, check);
  },

  async 'reasoning is folded when the answer begins'(browser) {
    let release = null;
    const chat = async (_, stream) => {
      await stream.write('I **think**.', { field: 'reasoning_content', every_ms: 1 });
      await new Promise((resolve) => (release = resolve));
      await words('The answer.')(_, stream);
    };
    const check = async (page) => {
      await live(page);
      await say(page, 'why');
      const reasoning = page.locator('.message.assistant .reasoning');
      await eventually('it is open', async () => release !== null && (await reasoning.getAttribute('open')) !== null);
      release();
      await answered(page);
      assert.equal(await reasoning.getAttribute('open'), null, 'folded');
      await reasoning.locator('summary').press('Enter');
      assert.equal(await reasoning.locator('strong').textContent(), 'think');
    };
    await faked(browser, chat, check);
  },

  async 'tool calls are shown, and their results go back'(browser) {
    const tools = [{ type: 'function', function: { name: 'get_weather', parameters: { type: 'object', properties: { city: { type: 'string' } } } } }];
    const chat = async (body, stream) => {
      if (body.messages.at(-1).role === 'tool') return words('It rains.')(body, stream);
      stream.delta({ tool_calls: [{ index: 0, id: 'call-7', type: 'function', function: { name: 'get_weather', arguments: '' } }] });
      for (const piece of ['{"city":', '"Oslo"}']) stream.delta({ tool_calls: [{ index: 0, function: { arguments: piece } }] });
      stream.end('tool_calls');
    };
    const check = async (page, asked) => {
      await live(page);
      await page.click('#settings-open');
      await page.fill('#set-tools', '[{');
      assert.match(await page.textContent('#tools-error'), /not JSON/);
      await page.fill('#set-tools', JSON.stringify(tools));
      await page.click('#settings-close');
      await say(page, 'weather?');
      const answer = await answered(page);
      assert.deepEqual(asked[0].tools, tools);
      assert.equal(await answer.locator('.call-name').textContent(), 'Tool call: get_weather');
      assert.equal(await answer.locator('.call pre').textContent(), '{\n  "city": "Oslo"\n}');
      await page.getByLabel('Result of get_weather').fill('rain');
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/tool.png` });
      await page.getByRole('button', { name: 'Send the result' }).click();
      await eventually('it answers', async () => (await page.locator('.message.assistant').count()) === 2);
      assert.equal(await (await answered(page)).locator('> .body').textContent(), 'It rains.');
      const [, call, result] = asked[1].messages;
      assert.deepEqual(call.tool_calls, [{ id: 'call-7', type: 'function', function: { name: 'get_weather', arguments: '{"city":"Oslo"}' } }]);
      assert.deepEqual(result, { role: 'tool', tool_call_id: 'call-7', content: 'rain' });
      assert.equal(await page.getByLabel('Result of get_weather').count(), 0, 'a result is given once');
    };
    await faked(browser, chat, check);
  },

  async 'structured output is shown as JSON'(browser) {
    const schema = { type: 'object', properties: { name: { type: 'string' } } };
    const check = async (page, asked) => {
      await live(page);
      await page.click('#settings-open');
      await page.selectOption('#set-format', 'schema');
      await page.fill('#set-schema', JSON.stringify(schema));
      await page.keyboard.press('Escape');
      await say(page, 'who?');
      const answer = await answered(page);
      assert.deepEqual(asked[0].response_format, { type: 'json_schema', json_schema: { name: 'answer', schema, strict: true } });
      assert.equal(await answer.locator('.code-language').textContent(), 'Structured output');
      assert.equal(await answer.locator('pre').textContent(), '{\n  "name": "Ada"\n}');
    };
    await faked(browser, words('{"name":"Ada"}'), check);
  },

  async 'no text becomes markup, fetches anything, or runs'(browser) {
    const chat = async (_, stream) => {
      await stream.write(ATTACKS.join('\n\n'), { field: 'reasoning_content', size: 64, every_ms: 0 });
      for (const attack of ATTACKS) await stream.write(`${attack}\n\n`, { size: 7, every_ms: 0 });
      stream.delta({ tool_calls: [{ index: 0, id: HOSTILE, type: 'function', function: { name: HOSTILE, arguments: `"${HOSTILE}` } }] });
      stream.end('tool_calls');
    };
    const check = async (page) => {
      await live(page);
      const hostile = { name: `${HOSTILE}.txt`, mimeType: 'text/plain', buffer: Buffer.from(HOSTILE) };
      await page.setInputFiles('#chat-file', hostile);
      await page.locator('#chat-files li').waitFor();
      await say(page, ATTACKS.join('\n'));
      const answer = await answered(page);
      await page.reload();
      await live(page);
      await page.locator('.message.assistant').waitFor();
      const found = await page.evaluate(() => ({
        images: document.querySelectorAll('.log img, .log svg:not(.icon), .log iframe, .log script, .log style, .log form, .log object, .log video, .log base').length,
        handlers: [...document.querySelectorAll('.log *')].flatMap((node) => node.getAttributeNames().filter((name) => name.startsWith('on') || name === 'style' || name === 'srcdoc')),
        links: [...document.querySelectorAll('.log a')].map((node) => node.protocol),
        title: document.querySelector('.list-name').textContent,
        ran: window.hacked ?? null,
      }));
      assert.deepEqual([found.images, found.handlers, found.ran], [0, [], null]);
      assert.ok(found.links.length > 0 && found.links.every((protocol) => ['http:', 'https:', 'mailto:'].includes(protocol)), found.links.join());
      assert.ok((await answer.locator('> .body').textContent()).includes(HOSTILE), 'it is there as text');
      assert.ok((await page.textContent('.message.user .file')).includes(HOSTILE));
      assert.ok((await answer.locator('.call-name').textContent()).includes(HOSTILE));
      assert.ok(found.title.startsWith('<img'));
    };
    await faked(browser, chat, check);
  },

  async 'hard Markdown neither stops the page nor takes long'(browser) {
    const deep = `${'> '.repeat(300)}deep\n\n${'- '.repeat(200)}list\n\n${'['.repeat(3000)}\n\n${'*a '.repeat(3000)}\n\n${'`'.repeat(2001)}\n\n${'|'.repeat(1000)}\n${'|-'.repeat(500)}|\n`;
    const check = async (page) => {
      await live(page);
      const since = Date.now();
      await say(page, 'hard');
      const answer = await answered(page);
      assert.ok((await answer.locator('> .body').textContent()).includes('deep'));
      assert.ok(Date.now() - since < 20000, `${Date.now() - since} ms`);
    };
    await faked(browser, async (_, stream) => (await stream.write(deep, { size: 4000, every_ms: 1 }), stream.end()), check);
  },
};
