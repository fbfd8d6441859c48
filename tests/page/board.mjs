// The view of the server: memory plan, requests, how often the server is asked.

import assert from 'node:assert/strict';

import { HOSTILE, eventually, live, neighbour, visit } from './browser.mjs';

const { PLAIN, SHOTS } = process.env;

export const checks = {
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
      assert.equal(await page.locator('#chat-view').isVisible(), false);
    };
    await visit(browser, PLAIN, check, { prepare, path: '/#server' });
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
    await visit(browser, PLAIN, check, { path: '/#server' });
  },

  async 'a slow server is asked one question at a time, a silent one ever less, and a hidden page asks nothing'(browser) {
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
      assert.equal(await during(3000), 0, 'a hidden page asks nothing');
      await hide(false);
      await live(page);
      silent = true;
      await page.locator('#banner').waitFor();
      assert.match(await page.textContent('#banner'), /does not answer/);
      await page.waitForTimeout(4000);
      assert.ok((await during(6000)) <= 2, 'a silent server is asked rarely');
      assert.ok(await page.$eval('#board', (node) => node.classList.contains('stale')));
      silent = false;
      await live(page);
      assert.equal(await page.locator('#banner').isVisible(), false);
    };
    await visit(browser, PLAIN, check, { prepare, expected: /ERR_CONNECTION_REFUSED/, path: '/#server' });
  },
};
