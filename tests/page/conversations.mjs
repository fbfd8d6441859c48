// Conversations: kept over a reload, searched, renamed, deleted, exported and imported.

import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';

import { HOSTILE, answered, eventually, live, say } from './browser.mjs';
import { PNG, faked } from './chat.mjs';

/** Says what the last message was. */
async function echo(body, stream) {
  const { content } = body.messages.at(-1);
  await stream.write(`You said: ${typeof content === 'string' ? content : content[0].text}`, { every_ms: 1 });
  stream.end();
}

const names = (page) => page.locator('.list-name').allTextContents();

async function talk(page, ...texts) {
  for (const text of texts) {
    await say(page, text);
    await answered(page);
  }
}

async function press(page, name, title) {
  const row = page.locator('#list-items li', { hasText: title });
  await row.hover();
  await row.getByRole('button', { name: `${name} ${title}` }).click();
}

/** Presses a button that offers a download, and returns its JSON. */
async function downloaded(page, act) {
  const [download] = await Promise.all([page.waitForEvent('download'), act()]);
  assert.match(download.suggestedFilename(), /^plimsoll-conversations-\d{4}-\d\d-\d\d\.json$/);
  return JSON.parse(await readFile(await download.path(), 'utf8'));
}

const upload = (page, content) =>
  page.setInputFiles('#list-file', { name: 'in.json', mimeType: 'application/json', buffer: Buffer.from(typeof content === 'string' ? content : JSON.stringify(content)) });

export const checks = {
  async 'a reload keeps the conversation, its versions and its settings'(browser) {
    const check = async (page, asked, answers, context) => {
      await live(page);
      await page.click('#settings-open');
      await page.fill('#set-system', 'Be brief.');
      await page.fill('#set-temperature', '0.25');
      await page.click('#settings-close');
      await talk(page, 'the sea', 'the shore');
      await page.getByRole('button', { name: 'Regenerate the answer' }).last().click();
      await eventually('there are two versions', async () => (await page.locator('.branch-place:visible').count()) === 1);
      await answered(page);
      const before = await page.locator('.message .body').allTextContents();
      const figures = await page.locator('.message-foot .detail').allTextContents();
      assert.match(page.url(), /#chat\/\w+$/);
      await page.reload();
      await live(page);
      await page.locator('.message').first().waitFor();
      assert.deepEqual(await page.locator('.message .body').allTextContents(), before);
      assert.deepEqual(await page.locator('.message-foot .detail').allTextContents(), figures);
      assert.equal(await page.textContent('.branch-place:visible'), '2 of 2');
      await talk(page, 'and now');
      assert.deepEqual(asked.at(-1).messages.map((message) => message.content), ['Be brief.', 'the sea', 'You said: the sea', 'the shore', 'You said: the shore', 'and now']);
      assert.equal(asked.at(-1).temperature, 0.25);
      // Another tab sees the same list, and a new chat there has settings of its own.
      const second = await context.newPage();
      await second.goto(new URL(page.url()).origin);
      await live(second);
      assert.deepEqual(await names(second), ['the sea']);
      assert.equal(await second.inputValue('#set-system'), '');
      await talk(second, 'second tab');
      await eventually('the first tab hears of it', async () => (await names(page)).join() === 'second tab,the sea');
      // Back leads to what was open before.
      await page.locator('#list-items a', { hasText: 'second tab' }).click();
      await eventually('it is open', async () => (await page.textContent('#talk-title')) === 'second tab');
      await page.goBack();
      await eventually('the other is open', async () => (await page.textContent('#talk-title')) === 'the sea');
      assert.deepEqual(await page.evaluate(() => [Object.values(localStorage), Object.values(sessionStorage), document.cookie]), [[], [], '']);
    };
    await faked(browser, echo, check);
  },

  async 'an answer that was being written is kept as far as it came'(browser) {
    const chat = async (_, stream) => {
      await stream.write('a part that is saved', { every_ms: 1 });
      await stream.closed;
    };
    const check = async (page) => {
      await live(page);
      await say(page, 'hello');
      await eventually('it is written', async () => (await page.locator('.message.assistant .body').textContent()) === 'a part that is saved');
      await page.waitForTimeout(2600);
      await page.reload();
      await live(page);
      await page.locator('.message.assistant').waitFor();
      assert.equal(await page.locator('.message.assistant .body').textContent(), 'a part that is saved');
      assert.match(await page.locator('.message.assistant .message-foot').textContent(), /interrupted/);
      assert.equal(await page.getByRole('button', { name: 'Continue' }).isVisible(), true);
    };
    await faked(browser, chat, check);
  },

  async 'search, rename and delete'(browser) {
    const check = async (page) => {
      await live(page);
      for (const words of ['about whales', 'about ropes', HOSTILE]) {
        await talk(page, words);
        await page.click('#chat-new');
      }
      assert.deepEqual(await names(page), [HOSTILE, 'about ropes', 'about whales']);
      await page.keyboard.press('Control+k');
      await page.keyboard.type('SAID: ABOUT W');
      await eventually('one is found', async () => (await names(page)).join() === 'about whales');
      assert.match(await page.textContent('#list-items .detail'), /You said: about whales/);
      await page.fill('#list-search', 'no such words');
      await eventually('none is found', async () => (await names(page)).length === 0);
      assert.equal(await page.textContent('#list-none'), 'No conversation holds these words.');
      await page.fill('#list-search', '');
      await eventually('all are back', async () => (await names(page)).length === 3);
      await press(page, 'Rename', 'about ropes');
      await page.keyboard.type('Knots & <b>bends</b>');
      await page.keyboard.press('Enter');
      await eventually('it has another name', async () => (await names(page)).includes('Knots & <b>bends</b>'));
      await press(page, 'Rename', 'about whales');
      await page.keyboard.type('no');
      await page.keyboard.press('Escape');
      assert.ok((await names(page)).includes('about whales'), 'Escape keeps the name');
      await press(page, 'Delete', 'about whales');
      await page.locator('#ask[open]').waitFor();
      assert.match(await page.textContent('#ask-words'), /“about whales”/);
      await page.click('#ask-no');
      assert.equal((await names(page)).length, 3);
      await press(page, 'Delete', 'about whales');
      await page.click('#ask-yes');
      await eventually('it is gone', async () => (await names(page)).length === 2);
      await page.reload();
      await live(page);
      assert.deepEqual((await names(page)).sort(), [HOSTILE, 'Knots & <b>bends</b>'].sort());
      const left = await page.evaluate(
        () =>
          new Promise((resolve) => {
            const open = indexedDB.open('plimsoll');
            open.onsuccess = () => {
              const all = open.result.transaction('messages').objectStore('messages').getAll();
              all.onsuccess = () => resolve(all.result.map((message) => message.content));
            };
          }),
      );
      assert.ok(left.length === 4 && !left.join().includes('whales'), 'its messages are gone, too');
    };
    await faked(browser, echo, check);
  },

  async 'export and import carry everything, and a wrong file changes nothing'(browser) {
    const check = async (page, asked) => {
      await live(page);
      await page.setInputFiles('#chat-file', { name: 'notes.txt', mimeType: 'text/plain', buffer: Buffer.from('tide tables') });
      await page.locator('#chat-files li').waitFor();
      await talk(page, 'with a file');
      await page.getByRole('button', { name: 'Regenerate the answer' }).click();
      await page.locator('.branch-place:visible').waitFor();
      await answered(page);
      await page.click('#chat-new');
      await talk(page, 'the other');
      const one = await downloaded(page, () => press(page, 'Export', 'with a file'));
      assert.equal(one.conversations.length, 1);
      const all = await downloaded(page, () => page.click('#list-export'));
      assert.deepEqual([all.format, all.version, all.conversations.length], ['plimsoll-conversations', 1, 2]);
      assert.equal(Buffer.from(one.conversations[0].files[0].data, 'base64').toString(), 'tide tables');
      // Into a browser that has none of it.
      const other = await browser.newContext();
      const fresh = await other.newPage();
      await fresh.goto(new URL(page.url()).origin);
      await live(fresh);
      await upload(fresh, all);
      await eventually('both are there', async () => (await names(fresh)).length === 2);
      await fresh.locator('#list-items a', { hasText: 'with a file' }).click();
      await fresh.locator('.message').first().waitFor();
      assert.equal(await fresh.textContent('.branch-place:visible'), '2 of 2');
      await talk(fresh, 'go on');
      assert.equal(asked.at(-1).messages[0].content, 'with a file\n\nFile: notes.txt\n```\ntide tables\n```');
      // The example of the documentation.
      const guide = await readFile(new URL('../../docs/web-app.md', import.meta.url), 'utf8');
      await upload(fresh, /```json\n([^]*?)```/.exec(guide)[1]);
      await eventually('the example is there', async () => (await names(fresh)).includes('…'));
      const broken = (change) => {
        const copy = structuredClone(all);
        change(copy.conversations[0].messages[0], copy.conversations[0], copy);
        return copy;
      };
      for (const [content, why] of [
        ['{', /is not JSON/],
        [{ format: 'other' }, /must be plimsoll-conversations/],
        [broken((message) => (message.role = 'system')), /messages\[0\]\.role must be/],
        [broken((message) => (message.content = 5)), /content must be a text/],
        [broken((message) => (message.parent = 'none')), /parent names no message/],
        [broken((_, conversation) => (conversation.title = 'x'.repeat(121))), /121 characters, more than the limit of 120/],
        [broken((_, conversation) => (conversation.messages = Array(1001).fill({ id: 'a' }))), /1001 entries; 1000/],
        [broken((_, conversation, file) => (file.conversations = Array(1001).fill(conversation))), /1001 entries/],
      ]) {
        await upload(fresh, content);
        await eventually(`it says ${why}`, async () => why.test(await fresh.textContent('#list-error')));
        assert.equal((await names(fresh)).length, 3);
      }
      await other.close();
    };
    await faked(browser, echo, check);
  },

  async 'files come by button, by paste and by drop'(browser) {
    const check = async (page, asked) => {
      await live(page);
      const give = (kind, target, name, type, content) =>
        page.evaluate(
          ([kind, target, name, type, content]) => {
            const data = new DataTransfer();
            data.items.add(new File([Uint8Array.from(content)], name, { type }));
            const node = document.querySelector(target);
            const event = kind === 'paste' ? new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true }) : new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
            node.dispatchEvent(event);
          },
          [kind, target, name, type, [...content]],
        );
      await give('paste', '#chat-input', 'pasted.md', 'text/markdown', Buffer.from('```\nfence\n```'));
      await page.locator('#chat-files li').first().waitFor();
      await give('dragover', '#chat-box', 'd.csv', 'text/csv', Buffer.from('a,b'));
      assert.equal(await page.locator('#chat-box.dropping').count(), 1);
      await give('drop', '#chat-box', 'dropped.csv', 'text/csv', Buffer.from('a,b'));
      await page.setInputFiles('#chat-file', [{ name: 'button.txt', mimeType: 'text/plain', buffer: Buffer.from('by button') }]);
      await eventually('three are there', async () => (await page.locator('#chat-files li').count()) === 3);
      // Images are nothing for a model of text, and what is no text is refused by name.
      await give('paste', '#chat-input', 'red.png', 'image/png', PNG);
      await eventually('it says so', async () => (await page.textContent('#chat-error')) === 'red.png is an image. This model takes text files.');
      await page.setInputFiles('#chat-file', { name: 'x.bin', mimeType: 'application/octet-stream', buffer: Buffer.from([0xff, 0xfe, 0]) });
      await eventually('it says so', async () => (await page.textContent('#chat-error')).startsWith('x.bin is not text in UTF-8.'));
      const { max_body_bytes: most } = await (await fetch(`${new URL(page.url()).origin}/v1/status`)).json();
      await page.setInputFiles('#chat-file', { name: 'big.txt', mimeType: 'text/plain', buffer: Buffer.alloc(most, 'x') });
      await eventually('too large is said', async () => (await page.textContent('#chat-error')).includes('--max-body-bytes'));
      await page.getByRole('button', { name: 'Remove button.txt' }).click();
      await talk(page, 'read this');
      assert.equal(asked[0].messages[0].content, 'read this\n\nFile: pasted.md\n````\n```\nfence\n```\n````\n\nFile: dropped.csv\n```\na,b\n```');
      assert.deepEqual(await page.locator('.message.user .file').allTextContents(), ['pasted.md (13 B)', 'dropped.csv (3 B)']);
    };
    await faked(browser, echo, check);
  },
};
