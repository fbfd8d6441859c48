// How it looks: both themes, contrast, the width of a phone, less motion.

import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';

import { answered, fits, live, neighbour, say, visit } from './browser.mjs';
import { faked, words } from './chat.mjs';
import { LONG } from './texts.mjs';

const { PLAIN, PLAYWRIGHT, SHOTS } = process.env;

const AXE = await readFile(`${PLAYWRIGHT}/node_modules/axe-core/axe.min.js`, 'utf8');

const NAMES = ['paper', 'card', 'code', 'user', 'ink', 'soft', 'accent', 'bad', 'warn', 'good', 'hl-keyword', 'hl-string', 'hl-number', 'hl-title', 'hl-comment', 'hl-attr'];

/** The colours of the page by name. */
function colours(names) {
  const probe = document.body.appendChild(document.createElement('i'));
  const resolved = names.map((name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color];
  });
  probe.remove();
  return Object.fromEntries(resolved);
}

/** Buttons that a finger would miss. */
const small = (page) => page.$$eval('button', (buttons) => buttons.filter((node) => node.checkVisibility() && node.offsetHeight > 0 && node.offsetHeight < 30).map((node) => node.outerHTML.slice(0, 100)));

export const checks = {
  async 'light, dark, and the button between them'(browser) {
    for (const [scheme, other] of [['light', 'dark'], ['dark', 'light']]) {
      const check = async (page, context) => {
        await live(page);
        const own = await page.evaluate(colours, NAMES);
        const pairs = ['ink', 'soft', 'accent', 'bad', 'warn', 'good'].flatMap((name) => ['card', 'paper'].map((ground) => [name, ground]));
        pairs.push(...NAMES.filter((name) => name.startsWith('hl-') || name === 'ink' || name === 'soft').map((name) => [name, 'code']), ['ink', 'user']);
        for (const [name, ground] of pairs) {
          const ratio = contrast(own[name], own[ground]);
          assert.ok(ratio >= 4.5, `${scheme}: ${name} on ${ground} has a contrast of ${ratio.toFixed(2)}`);
        }
        await page.click('#theme');
        const changed = await page.evaluate(colours, NAMES);
        assert.notDeepEqual(changed, own);
        await page.reload();
        await live(page);
        assert.deepEqual(await page.evaluate(colours, NAMES), changed, 'the choice is kept');
        assert.equal(await page.evaluate(() => getComputedStyle(document.documentElement).colorScheme), other);
        const second = await context.newPage();
        await second.goto(PLAIN);
        assert.deepEqual(await second.evaluate(colours, NAMES), changed);
      };
      await visit(browser, PLAIN, check, { colorScheme: scheme });
    }
  },

  async 'a long answer fits every width, in both themes'(browser) {
    for (const [name, options] of [
      ['phone', { viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true, colorScheme: 'dark' }],
      ['tablet', { viewport: { width: 820, height: 1180 }, hasTouch: true, colorScheme: 'light' }],
      ['wide', { viewport: { width: 1600, height: 900 }, colorScheme: 'light' }],
    ]) {
      const check = async (page) => {
        await live(page);
        await say(page, `compare ${'w'.repeat(300)}`);
        const answer = await answered(page);
        const { width } = options.viewport;
        await fits(page, width);
        assert.ok(await page.$eval('#chat-log', (node) => node.scrollWidth <= node.clientWidth), 'the log does not scroll sideways');
        assert.deepEqual(await small(page), [], 'fingers find every button');
        await answer.locator('.md-table').scrollIntoViewIfNeeded();
        if (SHOTS) await page.screenshot({ path: `${SHOTS}/long-${name}.png` });
        if (name !== 'phone') return;
        assert.equal(await page.locator('#list').isVisible(), false, 'the list gives way');
        await page.click('#list-open');
        assert.equal(await page.locator('#list').isVisible(), true);
        await fits(page, width);
        if (SHOTS) await page.screenshot({ path: `${SHOTS}/list-phone.png` });
        await page.keyboard.press('Escape');
        assert.equal(await page.locator('#list').isVisible(), false);
        await page.click('#settings-open');
        await fits(page, width);
        await page.click('#settings-close');
      };
      await faked(browser, words(LONG), check, options);
    }
  },

  async 'no rule of accessibility is broken'(browser) {
    const chat = async (_, stream) => {
      await stream.write('hm', { field: 'reasoning_content' });
      await stream.write(LONG, { size: 200, every_ms: 1 });
      stream.delta({ tool_calls: [{ index: 0, id: 'call-1', type: 'function', function: { name: 'look', arguments: '{}' } }] });
      stream.end('tool_calls');
    };
    for (const options of [{ colorScheme: 'light' }, { colorScheme: 'dark', viewport: { width: 360, height: 740 } }]) {
      const check = async (page) => {
        const look = async (what) => {
          await page.evaluate(AXE);
          // The headings of an answer are the model's.
          const rules = { 'heading-order': { enabled: false } };
          const found = await page.evaluate((rules) => axe.run(document, { rules, resultTypes: ['violations'] }), rules);
          assert.deepEqual(found.violations.map(({ id, nodes }) => `${id}: ${nodes[0].html}`), [], what);
        };
        await live(page);
        await look('an empty chat');
        await say(page, 'hello');
        const answer = await answered(page);
        await answer.locator('.hl-keyword').first().waitFor();
        await look('an answer');
        await page.locator('.message.user').getByRole('button', { name: 'Edit the message' }).click();
        await look('an edited message');
        await page.keyboard.press('Escape');
        await page.click('#settings-open');
        await look('the settings');
        await page.click('#settings-close');
        await page.click('#tab-server');
        await page.locator('#components tr').first().waitFor();
        await look('the server');
      };
      // The rules are a script from outside, which the policy would refuse.
      await faked(browser, chat, check, { bypassCSP: true, ...options });
    }
  },

  async 'the server view at 360 pixels, with requests and long words'(browser) {
    const other = await neighbour(PLAIN, { 'x-request-id': 'x'.repeat(128) });
    const check = async (page) => {
      await live(page);
      await page.locator('#requests tr').first().waitFor();
      await fits(page, 360);
      assert.deepEqual(await small(page), [], 'fingers find every button');
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/server-phone.png` });
    };
    await visit(browser, PLAIN, check, { viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true, path: '/#server' });
    other.leave();
  },

  async 'the log follows the answer, unless the reader has scrolled up'(browser) {
    let release = null;
    const chat = async (_, stream) => {
      await stream.write(LONG, { size: 200, every_ms: 2 });
      await new Promise((resolve) => (release = resolve));
      await stream.write('\n\nmore\n\n'.repeat(40), { size: 40, every_ms: 2 });
      stream.end();
    };
    const check = async (page) => {
      await live(page);
      await say(page, 'compare');
      const away = () => page.$eval('#chat-log', (node) => node.scrollHeight - node.scrollTop - node.clientHeight);
      while (release === null) await page.waitForTimeout(50);
      await page.waitForTimeout(300);
      assert.ok((await away()) < 5, 'at the end');
      await page.$eval('#chat-log', (node) => (node.scrollTop = 100));
      await page.locator('#to-end').waitFor();
      release();
      await answered(page);
      assert.equal(await page.$eval('#chat-log', (node) => node.scrollTop), 100, 'the reader is left where they are');
      await page.click('#to-end');
      assert.ok((await away()) < 5, 'and back');
      assert.equal(await page.locator('#to-end').isVisible(), false);
    };
    await faked(browser, chat, check);
  },

  async 'nothing moves where less motion is wanted'(browser) {
    const still = async (page) => page.$eval('.dot', (node) => getComputedStyle(node).animationName);
    await visit(browser, PLAIN, async (page) => (await live(page), assert.equal(await still(page), 'none')), { reducedMotion: 'reduce' });
    await visit(browser, PLAIN, async (page) => (await live(page), assert.notEqual(await still(page), 'none')), { reducedMotion: 'no-preference' });
  },
};

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
