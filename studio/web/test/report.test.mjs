// Opens reports in Chromium as a person would. REPORTS names the folder with plain.html, hostile.html, long.html,
// wide.html, layouts.html and drawn.html, which tests/api/test_report_in_browser.py makes, and at night whole.html; SCREENSHOTS, where given, a folder
// that pictures are left in.
import assert from "node:assert/strict";
import fs from "node:fs";
import path from "node:path";
import { after, before, test } from "node:test";

import AxeBuilder from "@axe-core/playwright";
import { chromium } from "playwright-core";

import { PATIENCE_MS, timeline } from "./waiting.mjs";

const folder = process.env.REPORTS;
const VIEWS = ["verdict", "timeline", "memory", "stages", "strategies", "cluster", "sources", "files"];
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"];
let browser;

before(async () => {
  browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: FLAGS });
});
after(() => browser.close());

/** A page that shows `file`, and what it said and asked for that it should not. */
async function open(file, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 1400 }, locale: "en-US", ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE_MS);
  const wrong = [];
  page.on("console", (message) => message.type() === "error" && wrong.push(message.text()));
  page.on("pageerror", (error) => wrong.push(error.message));
  page.on("dialog", (dialog) => wrong.push(`dialog ${dialog.message()}`) && dialog.dismiss());
  const own = `file://${path.join(folder, file)}`;
  page.on(
    "request",
    (request) => request.url() !== own && !request.url().startsWith("blob:") && wrong.push(request.url()),
  );
  const started = performance.now();
  await page.goto(own);
  await page.waitForSelector("#files");
  return { page, wrong, readyMs: performance.now() - started };
}

/** How many colours the timeline has. */
const colours = async (page) => {
  await timeline(page);
  return page.evaluate(() => {
    const canvas = document.querySelector(".gantt canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size;
  });
};

test("every view is there, in both languages and themes, without an error or a request", async () => {
  const { page, wrong, readyMs } = await open("plain.html");
  console.log(`plain.html was ready after ${readyMs.toFixed(0)} ms`);
  for (const view of VIEWS) assert.ok(await page.locator(`#${view} h2`).isVisible(), view);
  assert.ok((await colours(page)) > 5);
  await page.getByRole("button", { name: "中文" }).click();
  assert.equal(await page.locator("#verdict h2").textContent(), "结论");
  assert.equal(await page.evaluate(() => document.documentElement.lang), "zh");
  await page.getByRole("button", { name: "浅色或深色" }).click();
  assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "dark");
  if (process.env.SCREENSHOTS) await page.screenshot({ path: path.join(process.env.SCREENSHOTS, "report_zh.png") });
  await page.getByRole("button", { name: "English" }).click();
  await page.emulateMedia({ media: "print" });
  assert.ok(!(await page.locator("nav").isVisible()));
  assert.deepEqual(wrong, []);
});

test("strategies are filtered by sizes, words and status", async () => {
  const { page, wrong } = await open("plain.html");
  const rows = page.locator("#strategies tbody tr");
  const all = await rows.count();
  await page.getByRole("searchbox").fill("PP=4 TP=8");
  await page.waitForFunction((before) => document.querySelectorAll("#strategies tbody tr").length < before, all);
  for (const row of await rows.all()) {
    assert.equal(await row.locator("td").nth(0).textContent(), "4");
    assert.equal(await row.locator("td").nth(1).textContent(), "8");
  }
  await page.getByRole("searchbox").fill("no such strategy");
  await page.waitForFunction(() => document.querySelectorAll("#strategies tbody tr").length === 0);
  assert.deepEqual(wrong, []);
});

test("strategies lie by step and peak, and one that is clicked is shown alone", async () => {
  const { page, wrong } = await open("plain.html");
  const canvas = page.locator("#strategies .chart canvas").first();
  await canvas.scrollIntoViewIfNeeded();
  const box = await canvas.boundingBox();
  const filter = page.getByRole("searchbox");
  // Those that no solver placed lie on the lower edge of the chart.
  for (let x = 72; x < box.width - 16 && (await filter.inputValue()) === ""; x += 6)
    await page.mouse.click(box.x + x, box.y + box.height - 57);
  const name = await filter.inputValue();
  assert.match(name, /^PP=\d+ TP=\d+ .* 1f1b$/);
  await page.waitForFunction(() => document.querySelectorAll("#strategies tbody tr").length === 1);
  const [, pp, tp] = name.match(/PP=(\d+) TP=(\d+)/);
  const cells = page.locator("#strategies tbody td");
  assert.deepEqual([await cells.nth(0).textContent(), await cells.nth(1).textContent()], [pp, tp]);
  await filter.fill("its best placement");
  await page.locator("#strategies tbody tr").first().waitFor();
  assert.match(await page.locator("#strategies thead").textContent(), /StepPeakWhy/);
  assert.deepEqual(wrong, []);
});

test("idle time is told by its cause, and figures by their source", async () => {
  const { page, wrong } = await open("plain.html");
  const legend = await page.locator("#timeline .legend").nth(1).textContent();
  for (const cause of ["warm-up", "transfers", "imbalance", "cool-down"])
    assert.match(legend, new RegExp(`idle: ${cause} [\\d.]+ m?s`));
  const gantt = page.locator(".gantt canvas");
  await gantt.scrollIntoViewIfNeeded();
  const box = await gantt.boundingBox();
  const told = async (x) => {
    await page.mouse.move(box.x + x, box.y + 1.4 * 24);
    await page.waitForFunction(() => document.querySelector(".below").textContent.startsWith("stage 1: "));
    return page.locator(".below").textContent();
  };
  const warmup = await page.locator("#stages tbody tr").nth(1).locator("td").nth(4).textContent();
  assert.equal(await told(57), `stage 1: idle: warm-up ${warmup}; before forward, micro-batch 0, chunk 0`);
  assert.match(await told(box.width - 2), /^stage 1: (after the last backward|idle: cool-down) [\d.]+ m?s$/);
  const figures = page.locator("#verdict dd");
  for (const figure of await figures.all()) assert.ok(await figure.locator("span").getAttribute("title"));
  assert.match(await figures.first().locator("span").getAttribute("title"), /^simulated task by task; times of blocks/);
  for (const view of ["memory", "stages", "cluster"])
    assert.ok((await page.locator(`#${view} .number span[title]`).count()) > 1, view);
  assert.deepEqual(wrong, []);
});

test("the timeline answers keys and pointer", async () => {
  const { page, wrong } = await open("plain.html");
  const whole = await timeline(page);
  await page.locator(".gantt").focus();
  await page.keyboard.press("+");
  await page.keyboard.press("ArrowRight");
  await page.waitForFunction((then) => document.querySelector(".gantt canvas").toDataURL() !== then, whole);
  await page.keyboard.press("0");
  await page.waitForFunction((then) => document.querySelector(".gantt canvas").toDataURL() === then, whole);
  const box = await page.locator(".gantt canvas").boundingBox();
  await page.mouse.move(box.x + box.width / 2, box.y + 6);
  await page.waitForFunction(() => document.querySelector(".below").textContent.startsWith("stage 0: "));
  assert.deepEqual(wrong, []);
});

// What colours decide is asked of both themes, all else once; of a long table, some rows.
for (const colorScheme of ["light", "dark"])
  test(`screen readers and keyboards find their way (${colorScheme})`, async () => {
    const { page } = await open("plain.html", { colorScheme });
    await page.getByRole("searchbox").fill("PP=4 TP=8");
    await page.waitForFunction(() => document.querySelectorAll("#strategies tbody tr").length < 20);
    if (process.env.SCREENSHOTS && colorScheme === "light")
      await page.screenshot({ path: path.join(process.env.SCREENSHOTS, "report_en.png") });
    const axe = new AxeBuilder({ page }).options({ resultTypes: ["violations"] });
    if (colorScheme === "dark") axe.withRules(["color-contrast"]);
    const { violations } = await axe.analyze();
    const serious = violations.filter((one) => ["serious", "critical"].includes(one.impact));
    assert.deepEqual(
      serious.map((one) => [one.id, one.nodes[0].html]),
      [],
    );
  });

/** What a picture's page breaks of the rules for screen readers, seriously. */
async function serious(page) {
  const { violations } = await new AxeBuilder({ page })
    .include("svg.picture")
    .options({ resultTypes: ["violations"] })
    .analyze();
  return violations.filter((one) => ["serious", "critical"].includes(one.impact)).map((one) => one.id);
}

test("a layout is drawn: replicas, their ranks, and who exchanges features with whom", async () => {
  const { page, wrong } = await open("layouts.html");
  const boxes = page.locator("#cluster svg g.module");
  assert.deepEqual(
    [await boxes.count(), await boxes.nth(4).textContent()],
    [5, "replica 0stage 1: rank 0–1stage 2: rank 2–3"],
  );
  assert.equal(await page.locator("#cluster svg line").count(), 4);
  assert.deepEqual(await serious(page), []);
  await page.getByLabel("Plan shown").selectOption({ label: "phases" });
  assert.deepEqual([await boxes.count(), await page.locator("#cluster svg line").count()], [10, 8]);
  assert.deepEqual(wrong, []);
});

test("the spread of the step over drawn batches is drawn", async () => {
  const { page, wrong } = await open("drawn.html");
  assert.equal(await page.locator("#verdict svg rect").count(), 24);
  assert.equal(await page.locator("#verdict svg .mark").count(), 5);
  assert.deepEqual(await serious(page), []);
  assert.deepEqual(wrong, []);
});

test("a phone's width holds it", async () => {
  const { page } = await open("plain.html", { viewport: { width: 390, height: 800 } });
  assert.ok((await page.evaluate(() => document.documentElement.scrollWidth)) <= 390);
});

test("names are text, whatever they say", async () => {
  const { page, wrong } = await open("hostile.html");
  assert.equal(await page.locator("script").count(), 2);
  assert.ok((await page.locator("#files").textContent()).includes("<script>alert(1)</script>"));
  assert.ok((await page.evaluate(() => document.documentElement.scrollWidth)) <= 1280);
  assert.deepEqual(wrong, []);
});

test("a step of 131,072 tasks a direction is moved fluently", async () => {
  const { page, wrong, readyMs } = await open("long.html");
  await page.locator(".gantt").focus();
  const frames = await page.evaluate(async () => {
    const gantt = document.querySelector(".gantt");
    const press = (key) => gantt.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    press("+");
    const started = performance.now();
    let shown = 0;
    while (performance.now() - started < 1500) {
      press(shown % 8 < 4 ? "ArrowRight" : "ArrowLeft");
      await new Promise(requestAnimationFrame);
      shown++;
    }
    return (1000 * shown) / (performance.now() - started);
  });
  console.log(`long.html was ready after ${readyMs.toFixed(0)} ms; ${frames.toFixed(0)} frames/s while it moved`);
  assert.ok((await colours(page)) > 5);
  assert.deepEqual(wrong, []);
});

test("a cluster of 16,384 devices is drawn", async () => {
  const { page, wrong, readyMs } = await open("wide.html");
  const drawnMs = await page.evaluate(async () => {
    const started = performance.now();
    document.querySelector("#cluster > button").click();
    while (document.querySelectorAll("#cluster .device").length < 16384) await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    return performance.now() - started;
  });
  console.log(
    `wide.html was ready after ${readyMs.toFixed(0)} ms; 16,384 devices were drawn in ${drawnMs.toFixed(0)} ms`,
  );
  assert.equal(await page.locator("#cluster .device").count(), 16384);
  assert.deepEqual(wrong, []);
});

test("72B over the whole space", { skip: !fs.existsSync(path.join(folder, "whole.html")) && "at night" }, async () => {
  const size = fs.statSync(path.join(folder, "whole.html")).size;
  const { page, wrong, readyMs } = await open("whole.html");
  const paintMs = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0].startTime);
  const all = await page.locator("#strategies p[aria-live]").textContent();
  console.log(
    `whole.html: ${size} bytes, ${all} strategies, first paint ${paintMs.toFixed(0)} ms, ready ${readyMs.toFixed(0)} ms`,
  );
  assert.ok(size <= 3_000_000);
  for (const view of VIEWS) assert.ok(await page.locator(`#${view} h2`).isVisible(), view);
  await page.getByRole("searchbox").fill("ZERO=3 TP=8");
  await page.waitForFunction(
    (before) => document.querySelector("#strategies p[aria-live]").textContent !== before,
    all,
  );
  assert.deepEqual(wrong, []);
});
