// Works on the studio's page in Chromium as a person would. RECORDINGS names the folder that record.py fills, of which
// fake_studio.mjs is served; STUDIO, where given, the address that a real studio printed: what needs the fake is then left out.
import assert from "node:assert/strict";
import path from "node:path";
import { after, afterEach, before, test } from "node:test";

import AxeBuilder from "@axe-core/playwright";
import { chromium } from "playwright-core";

import { serve } from "./fake_studio.mjs";
import { PATIENCE_MS, timeline } from "./waiting.mjs";

const folder = process.env.RECORDINGS;
const real = process.env.STUDIO;
const needsFake = real ? "needs the fake server" : false;
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"];
const VIEWS = ["verdict", "timeline", "memory", "stages", "strategies", "cluster", "sources", "files"];
const TABS = [
  "tabLayers",
  "tabModes",
  "tabOrder",
  "tabStrategy",
  "tabWhatIf",
  "tabSearch",
  "tabPins",
  "tabFiles",
  "tabJob",
  "tabLaunch",
];
/** What Chromium itself says on the console of an answer that is no success. */
const ANSWERED = /^Failed to load resource/;
let browser;

before(async () => {
  browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: FLAGS });
});
after(() => browser.close());

/** What a test has opened. */
const opened = [];
afterEach(async () => {
  for (const one of opened.splice(0).reverse()) await one.close();
});

/** A studio: the real one, or a fake that shows the recording `name`. */
async function studio(name = "plain") {
  if (real) return { url: real };
  const server = await serve(folder, name);
  opened.push(server);
  return server;
}

/** A page of the studio at `url`; what it said and asked for that it should not, and what it sent. */
async function open(url, { context, ready = "[role=tab]", ...options } = {}) {
  const own =
    context ?? (await browser.newContext({ viewport: { width: 1280, height: 900 }, locale: "en-US", ...options }));
  if (!context) opened.push(own);
  const page = await own.newPage();
  page.setDefaultTimeout(PATIENCE_MS);
  const wrong = [];
  const sent = [];
  page.on("console", (message) => message.type() === "error" && wrong.push(message.text()));
  page.on("pageerror", (error) => wrong.push(error.message));
  page.on("dialog", (dialog) => wrong.push(`dialog ${dialog.message()}`) && dialog.dismiss());
  const { origin } = new URL(url);
  page.on("request", (request) => {
    if (!request.url().startsWith(`${origin}/`) && !request.url().startsWith("blob:")) wrong.push(request.url());
    if (request.method() === "POST") sent.push([new URL(request.url()).pathname, request.postDataJSON()]);
  });
  let deeds = 0;
  page.on("response", async (response) => {
    if (response.ok() && response.url() === `${origin}/do`)
      deeds += response.request().postDataJSON().action.kind === "undo" ? -1 : 1;
  });
  const back = async () => {
    const undo = page.locator("[aria-keyshortcuts='Control+Z']");
    while (deeds > 0 && (await undo.isEnabled())) await drawn(page, () => undo.click());
  };
  if (real) opened.push({ close: back });
  await page.goto(url);
  await page.waitForSelector(ready);
  return { page, wrong, sent, context: own };
}

const revision = (page) => page.evaluate(() => Number(document.querySelector("#content").dataset.revision));

/** Does what `deed` does, and waits until what came of it is drawn. */
async function drawn(page, deed) {
  const then = await revision(page);
  await deed();
  await page.waitForFunction((old) => Number(document.querySelector("#content").dataset.revision) > old, then);
}

/** The boundary right of virtual stage `stage`. */
const boundary = (page, modality, stage) => page.locator(`[data-boundary="${modality} ${stage}"]`);

const counts = (page, modality) =>
  page.locator(`.block.${modality}`).evaluateAll((blocks) => blocks.map((block) => Number(block.textContent)));

const tab = (page, name) => page.locator(`#${name}`).click();

/** What was asked of POST /do, without revisions. */
const actions = (sent) => sent.filter(([where]) => where === "/do").map(([, body]) => body.action);

test("every view and tool is there in both languages and themes, with nothing asked of other origins", async () => {
  const server = await studio();
  const { page, wrong } = await open(server.url);
  for (const view of VIEWS) assert.ok(await page.locator(`#${view} h2`).isVisible(), view);
  for (const name of TABS) {
    await tab(page, name);
    assert.ok((await page.locator("#tool").textContent()).length > 0, name);
  }
  await page.getByRole("button", { name: "中文" }).click();
  assert.equal(await page.locator("#tabSearch").textContent(), "搜索");
  for (const name of TABS) {
    await tab(page, name);
    const english = await page
      .locator("#tool :is(h3, label > span, button)")
      .evaluateAll((all) => all.map((one) => one.textContent));
    assert.deepEqual(
      english.filter((words) => /^[A-Z][a-z]+ [a-z]+ [a-z]+/.test(words)),
      [],
      name,
    );
  }
  await page.getByRole("button", { name: "浅色或深色" }).click();
  assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "dark");
  assert.deepEqual(wrong, []);
});

test("a zoomed timeline stays so while the plan changes", async () => {
  const server = await studio();
  const { page } = await open(server.url);
  const picture = () => timeline(page);
  const whole = await picture();
  await page.locator(".gantt").focus();
  await page.keyboard.press("+");
  await page.waitForFunction((then) => document.querySelector(".gantt canvas").toDataURL() !== then, whole);
  const zoomed = await picture();
  await boundary(page, "text", 0).focus();
  await drawn(page, () => page.keyboard.press("ArrowRight"));
  assert.notEqual(await picture(), zoomed);
  await drawn(page, () => page.keyboard.press("Control+z"));
  assert.equal(await picture(), zoomed);
});

test("a boundary is dragged: it shows the counts on the way, and sends one move when it is let go", async () => {
  const server = await studio();
  const { page, wrong, sent } = await open(server.url);
  const before = await counts(page, "text");
  const line = await boundary(page, "text", 0).boundingBox();
  const row = await page.locator(".rows").nth(1).boundingBox();
  const layer = row.width / before.reduce((sum, one) => sum + one, 0);
  const [x, y] = [line.x + line.width / 2, line.y + line.height / 2];
  await page.mouse.move(x, y);
  await page.mouse.down();
  for (let step = 1; step <= 6; step++) await page.mouse.move(x + (step * layer * 3) / 6, y);
  assert.deepEqual((await counts(page, "text")).slice(0, 2), [before[0] + 3, before[1] - 3]);
  assert.ok((await page.getByText(`stage 0: ${before[0] + 3}; stage 1: ${before[1] - 3}`).count()) > 0);
  assert.deepEqual(sent, []);
  await drawn(page, () => page.mouse.up());
  assert.deepEqual(actions(sent), [{ kind: "move", modality: "text", source: 1, target: 0, count: 3 }]);
  assert.deepEqual((await counts(page, "text")).slice(0, 2), [before[0] + 3, before[1] - 3]);
  await drawn(page, () => page.keyboard.press("Control+z"));
  assert.deepEqual(await counts(page, "text"), before);
  assert.deepEqual(wrong, []);
});

test("a drag that is given up sends nothing", async () => {
  const server = await studio();
  const { page, sent } = await open(server.url);
  const before = await counts(page, "text");
  const line = await boundary(page, "text", 0).boundingBox();
  await boundary(page, "text", 0).focus();
  await page.mouse.move(line.x + 6, line.y + 6);
  await page.mouse.down();
  await page.mouse.move(line.x + 106, line.y + 6);
  assert.notDeepEqual(await counts(page, "text"), before);
  await page.keyboard.press("Escape");
  await page.mouse.up();
  assert.deepEqual(await counts(page, "text"), before);
  assert.deepEqual(sent, []);
});

test("touch drags a boundary", async () => {
  const server = await studio();
  const { page, sent } = await open(server.url, { viewport: { width: 390, height: 800 }, hasTouch: true });
  const line = await boundary(page, "text", 0).boundingBox();
  const touch = await page.context().newCDPSession(page);
  const at = (x) => [{ x: line.x + 6 + x, y: line.y + 10 }];
  await touch.send("Input.dispatchTouchEvent", { type: "touchStart", touchPoints: at(0) });
  await touch.send("Input.dispatchTouchEvent", { type: "touchMove", touchPoints: at(15) });
  await drawn(page, () => touch.send("Input.dispatchTouchEvent", { type: "touchEnd", touchPoints: [] }));
  const [action] = actions(sent);
  assert.deepEqual([action.kind, action.source, action.target, action.count > 0], ["move", 1, 0, true]);
});

test("keys move a layer at a time, take it back and do it again", async () => {
  const server = await studio();
  const { page, wrong, sent } = await open(server.url);
  const before = await counts(page, "text");
  const line = boundary(page, "text", 1);
  assert.match(await line.getAttribute("aria-label"), /^text layers: boundary of stage 1 and stage 2$/);
  assert.equal(await line.getAttribute("aria-valuenow"), String(before[1]));
  await line.focus();
  await drawn(page, () => page.keyboard.press("ArrowLeft"));
  assert.deepEqual(actions(sent), [{ kind: "move", modality: "text", source: 1, target: 2, count: 1 }]);
  assert.equal(await line.getAttribute("aria-valuetext"), `stage 1: ${before[1] - 1}; stage 2: ${before[2] + 1}`);
  assert.ok(await line.evaluate((element) => element === document.activeElement));
  await drawn(page, () => page.keyboard.press("Control+z"));
  assert.deepEqual(await counts(page, "text"), before);
  await drawn(page, () => page.keyboard.press("Control+Shift+z"));
  assert.equal((await counts(page, "text"))[1], before[1] - 1);
  await drawn(page, () => page.getByRole("button", { name: "Undo" }).click());
  assert.deepEqual(
    actions(sent).map((action) => action.kind),
    ["move", "undo", "redo", "undo"],
  );
  assert.deepEqual(wrong, []);
});

test("keys that come faster than answers become one move each time, and none is lost", async () => {
  const server = await studio();
  const { page, wrong, sent } = await open(server.url);
  const before = await counts(page, "text");
  await boundary(page, "text", 1).focus();
  const presses = Math.min(8, before[1] - 1);
  await page.evaluate((times) => {
    for (let press = 0; press < times; press++)
      document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft", bubbles: true }));
  }, presses);
  await page.waitForFunction(
    (wanted) => Number(document.querySelectorAll(".block.text")[1].textContent) === wanted,
    before[1] - presses,
  );
  assert.ok(actions(sent).length <= 3, JSON.stringify(actions(sent)));
  assert.equal(
    actions(sent).reduce((sum, action) => sum + action.count, 0),
    presses,
  );
  for (let undo = actions(sent).length; undo > 0; undo--) await drawn(page, () => page.keyboard.press("Control+z"));
  assert.deepEqual(await counts(page, "text"), before);
  assert.deepEqual(wrong, []);
});

test("chunks are rows, and the last stage of one borders on the first of the next", { skip: needsFake }, async () => {
  const server = await studio("chunks");
  const { page, sent } = await open(server.url);
  assert.equal(await page.locator(".modality").nth(1).locator(".row").count(), 2);
  await boundary(page, "text", 1).focus();
  assert.match(await boundary(page, "text", 1).getAttribute("aria-label"), /stage 1 of chunk 0 and stage 0 of chunk 1/);
  await drawn(page, () => page.keyboard.press("ArrowRight"));
  assert.deepEqual(actions(sent), [{ kind: "move", modality: "text", source: 2, target: 1, count: 1 }]);
});

test("an order is changed action by action or typed, and what cannot be is told", { skip: needsFake }, async () => {
  const server = await studio();
  const { page, sent } = await open(server.url);
  await tab(page, "tabOrder");
  const shown = () => page.locator("#tool .actions button").allTextContents();
  assert.deepEqual(await shown(), ["0F0", "1F0", "0B0", "1B0"]);
  await page.locator("#tool .actions button").nth(1).focus();
  await page.keyboard.press("Enter");
  await page.keyboard.press("ArrowRight");
  assert.deepEqual(await shown(), ["0F0", "0B0", "1F0", "1B0"]);
  await drawn(page, () => page.getByRole("button", { name: "Simulate this order" }).click());
  assert.deepEqual(actions(sent), [{ kind: "order", stage: 0, words: "0F0 0B0 1F0 1B0" }]);
  assert.deepEqual(await shown(), ["0F0", "0B0", "1F0", "1B0"]);
  await page.locator("#tool textarea").fill("0F0 0B0 0F0 1B0");
  await page.getByRole("button", { name: "Simulate this order" }).click();
  await page.getByText("stage 0 has 0F0 twice").waitFor();
  assert.equal(await page.locator("#tool textarea").inputValue(), "0F0 0B0 0F0 1B0");
});

test("modes are stepped; what cannot be is told, and the field shows what is", async () => {
  const server = await studio();
  const { page, wrong, sent } = await open(server.url);
  await tab(page, "tabModes");
  const field = page.getByLabel("stage 1: text, recompute", { exact: true });
  const value = Number(await field.inputValue());
  await field.focus();
  await drawn(page, () => page.keyboard.press("ArrowDown"));
  assert.deepEqual(actions(sent), [{ kind: "mode", modality: "text", stage: 1, mode: "recompute", count: value - 1 }]);
  await field.fill("999");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector("[role=alert]").textContent.startsWith("The server refused"));
  assert.equal(await field.inputValue(), String(value - 1));
  await field.focus();
  await drawn(page, () => page.keyboard.press("Control+z"));
  assert.equal(await page.locator("[role=alert]").textContent(), "");
  assert.equal(await field.inputValue(), String(value));
  assert.deepEqual(
    wrong.filter((text) => !ANSWERED.test(text)),
    [],
  );
});

test("sizes and knobs are sent, and reset", async () => {
  const server = await studio();
  const { page, wrong, sent } = await open(server.url);
  await tab(page, "tabStrategy");
  const pp = page.getByLabel("PP", { exact: true });
  const other = await pp.evaluate((select) => [...select.options].findIndex((option) => !option.selected));
  await drawn(page, () => pp.selectOption({ index: other }));
  const size = actions(sent).at(-1);
  assert.deepEqual([size.kind, Object.keys(size.sizes), typeof size.sizes.PP], ["sizes", ["PP"], "number"]);
  await tab(page, "tabWhatIf");
  const slider = page.locator("#tool input[type=range]").first();
  const said = await slider.getAttribute("aria-valuetext");
  await slider.focus();
  await drawn(page, () => page.keyboard.press("ArrowRight"));
  assert.equal(actions(sent).at(-1).kind, "knobs");
  assert.notEqual(await slider.getAttribute("aria-valuetext"), said);
  await drawn(page, () => page.getByRole("button", { name: "Reset all" }).click());
  assert.ok(Object.values(actions(sent).at(-1).values).every((value) => value === null));
  assert.equal(await slider.getAttribute("aria-valuetext"), said);
  await drawn(page, () => page.getByRole("button", { name: "Undo" }).click());
  assert.deepEqual(wrong, []);
});

test("a slider over a few whole numbers moves by one", { skip: needsFake }, async () => {
  const server = await studio();
  const { page, sent } = await open(server.url);
  await tab(page, "tabWhatIf");
  await page.getByLabel("Images of a sample").focus();
  await drawn(page, () => page.keyboard.press("ArrowLeft"));
  assert.deepEqual(actions(sent), [{ kind: "knobs", values: { "workload.images_per_sample": 3 } }]);
});

test("a pinned plan stands beside the one that is changed", async () => {
  const server = await studio();
  const { page, wrong, sent } = await open(server.url);
  await tab(page, "tabPins");
  await drawn(page, () => page.getByRole("button", { name: "Pin", exact: true }).click());
  assert.deepEqual(actions(sent), [{ kind: "pin", name: "A" }]);
  await tab(page, "tabLayers");
  await boundary(page, "text", 0).focus();
  await drawn(page, () => page.keyboard.press("ArrowRight"));
  const row = page.locator("#verdict tbody tr", { has: page.getByRole("button", { name: "A", exact: true }) });
  assert.match(await row.textContent(), /[+-][\d.]+ (ms|s), [+-][\d.]+ %, [+-]?[\d.]+ GiB/);
  await row.getByRole("button", { name: "A" }).click();
  assert.equal(await page.getByLabel("Plan shown").locator("option:checked").textContent(), "A");
  await tab(page, "tabPins");
  await drawn(page, () => page.getByRole("button", { name: "Go on from it: A" }).click());
  await drawn(page, () => page.getByRole("button", { name: "Unpin: A" }).click());
  assert.equal(await page.locator("#verdict tbody tr").count(), 0);
  assert.deepEqual(wrong, []);
});

test("work shows how far it is, ends, or is cancelled; the space and the answers come", async () => {
  const server = await studio();
  const { page, wrong, sent } = await open(server.url);
  await tab(page, "tabSearch");
  await page.getByRole("combobox", { name: "Over", exact: true }).selectOption("space");
  await page.getByLabel("At most, seconds").fill("20");
  await page.getByRole("button", { name: "Start" }).click();
  await page.waitForSelector("progress");
  assert.deepEqual(sent.at(-1)[0], "/optimise");
  assert.deepEqual([sent.at(-1)[1].scope, sent.at(-1)[1].limit_s], ["space", 20]);
  await page.waitForSelector("#strategies tbody tr");
  await page.waitForSelector("progress", { state: "detached" });
  assert.match(await page.locator(".bound").getAttribute("data-state"), /gap|proven/);
  const row = page.locator("#strategies tbody tr").nth(1);
  const named = await row.getByRole("button", { name: "Try" }).getAttribute("title");
  await drawn(page, () => row.getByRole("button", { name: "Try" }).click());
  const taken = actions(sent).at(-1);
  assert.equal(taken.kind, "sizes");
  assert.ok(taken.sizes.PP > 0 && named.includes(`PP=${taken.sizes.PP} `), JSON.stringify(taken));
  await page.getByRole("combobox", { name: "PP", exact: true }).selectOption({ index: 1 });
  assert.match(await page.getByLabel("Sizes, such as PP=8,TP=4").inputValue(), /^PP=\d+$/);
  await page.getByRole("button", { name: "Ask" }).click();
  await page.waitForSelector(".answer");
  await page.getByRole("button", { name: "Start" }).click();
  await page.getByRole("button", { name: "Cancel" }).click();
  await page.waitForSelector("progress", { state: "detached" });
  assert.equal(sent.at(-1)[0], "/cancel");
  assert.deepEqual(wrong, []);
});

test("sources are fetched when asked for, and go when the plan changes", async () => {
  const server = await studio();
  const { page, wrong } = await open(server.url);
  const tables = page.locator("#sources table");
  assert.equal(await tables.count(), 1);
  await page.getByRole("button", { name: "Show what the step" }).click();
  await page.waitForFunction(() => document.querySelectorAll("#sources table").length === 2);
  await boundary(page, "text", 0).focus();
  await drawn(page, () => page.keyboard.press("ArrowRight"));
  assert.equal(await tables.count(), 1);
  await drawn(page, () => page.keyboard.press("Control+z"));
  assert.deepEqual(wrong, []);
});

test("files are saved under their names", async () => {
  const server = await studio();
  const { page } = await open(server.url);
  await tab(page, "tabFiles");
  const saved = page.waitForEvent("download");
  await page.locator("#tool a").first().click();
  assert.equal((await saved).suggestedFilename(), await page.locator("#tool a").first().textContent());
});

/** Keeps `page` from hearing of other pages, until what this returns is called. */
async function deafen(page) {
  let hear;
  const heard = new Promise((done) => (hear = done));
  await page.route("**/status", async (route) => {
    await heard;
    await route.continue();
  });
  await page.waitForTimeout(100);
  return hear;
}

test("of two pages the later one is told, and draws what is", async () => {
  const server = await studio();
  const one = await open(server.url);
  const two = await open(server.url, { context: one.context });
  const before = await counts(one.page, "text");
  let hear = await deafen(two.page);
  await boundary(one.page, "text", 0).focus();
  await drawn(one.page, () => one.page.keyboard.press("ArrowRight"));
  await boundary(two.page, "text", 0).focus();
  await drawn(two.page, () => two.page.keyboard.press("ArrowRight"));
  assert.match(await two.page.locator("[role=alert]").textContent(), /^Another page changed the plan first/);
  assert.deepEqual(await counts(two.page, "text"), [before[0] + 1, before[1] - 1, ...before.slice(2)]);
  hear();
  await two.page.unroute("**/status");
  await drawn(one.page, () => one.page.keyboard.press("Control+z"));
  await two.page.waitForFunction(
    (count) => document.querySelector(".block.text").textContent === String(count),
    before[0],
  );
  await tab(two.page, "tabSearch");
  hear = await deafen(two.page);
  await drawn(one.page, () => one.page.keyboard.press("ArrowRight"));
  await drawn(two.page, () => two.page.getByRole("button", { name: "Start" }).click());
  assert.match(await two.page.locator("[role=alert]").textContent(), /^Another page changed the plan first/);
  assert.equal(await two.page.locator("progress").count(), 0);
  hear();
  await drawn(one.page, () => one.page.keyboard.press("Control+z"));
  assert.deepEqual(
    [...one.wrong, ...two.wrong].filter((text) => !ANSWERED.test(text)),
    [],
  );
});

test("a server that is gone is said to be, until it is back", { skip: needsFake }, async () => {
  const server = await studio();
  const { page, wrong } = await open(server.url);
  await server.close();
  await boundary(page, "text", 0).focus();
  await page.keyboard.press("ArrowRight");
  const alert = page.locator("[role=alert]");
  await page.waitForFunction(() => /does not answer/.test(document.querySelector("[role=alert]").textContent));
  const again = await serve(folder, "plain", { port: server.port, state: server.state });
  opened.push(again);
  await page.waitForFunction(() => !/does not answer/.test(document.querySelector("[role=alert]").textContent));
  assert.match(await alert.textContent(), /^The server stopped answering before/);
  await drawn(page, () => page.keyboard.press("ArrowRight"));
  assert.equal(await alert.textContent(), "");
  again.state.expired = true;
  await page.keyboard.press("ArrowRight");
  await page.waitForFunction(() => /no valid token/.test(document.querySelector("[role=alert]").textContent));
  again.state.expired = false;
  await page.waitForFunction(() => document.querySelector("[role=alert]").textContent === "");
  assert.deepEqual(
    wrong.filter((text) => !ANSWERED.test(text)),
    [],
  );
});

test("without a job the wizard makes one", { skip: needsFake }, async () => {
  const server = await studio("empty");
  const { page, wrong, sent } = await open(server.url);
  assert.equal(await page.locator("[role=tab]").count(), 2);
  await page.getByRole("combobox", { name: "Model" }).selectOption("qwen2-vl-72b");
  await page.getByRole("combobox", { name: "Device" }).selectOption("h100-80g");
  await page.getByLabel("Nodes", { exact: true }).fill("4");
  await page.getByLabel("Samples a step").fill("256");
  await page.getByLabel("Tokens of a sample", { exact: true }).fill("8192");
  await drawn(page, () => page.getByRole("button", { name: "Make the job" }).click());
  assert.deepEqual(actions(sent), [
    {
      kind: "job",
      model: "qwen2-vl-72b",
      device: "h100-80g",
      num_nodes: 4,
      devices_per_node: 8,
      global_batch_size: 256,
      seq_length: 8192,
      image_tokens_per_sample: 0,
      images_per_sample: 1,
    },
  ]);
  for (const view of VIEWS) assert.ok(await page.locator(`#${view} h2`).isVisible(), view);
  assert.deepEqual(wrong, []);
});

test("a launch script is checked, read as a job, and written to", { skip: needsFake }, async () => {
  const server = await studio();
  const { page, wrong, sent } = await open(server.url);
  await tab(page, "tabLaunch");
  await page.getByRole("combobox", { name: "Launch script", exact: true }).selectOption("train.sh");
  await page.getByRole("combobox", { name: "Device" }).selectOption("h100-80g");
  await page.getByLabel("Devices, where only the machine knows").fill("16");
  await page.getByRole("button", { name: "Check it" }).click();
  const found = page.getByRole("region", { name: "Found in train.sh" });
  await found.waitFor();
  assert.match(await found.textContent(), /^Found in train\.shwarningline 49: 32 layers .*<b>.*mend: without --x$/);
  assert.deepEqual(
    sent.filter(([where]) => where === "/lint").map(([, body]) => body),
    [{ file: "train.sh", device: "h100-80g", world_size: 16, vocab_size: null }],
  );
  const framework = page.getByRole("combobox", { name: "Framework" });
  await framework.selectOption("megatron-core");
  await drawn(page, () => page.getByRole("button", { name: "Write the plan" }).click());
  await drawn(page, () => page.getByRole("button", { name: "Read it as a job" }).click());
  assert.deepEqual(actions(sent), [
    { kind: "export", framework: "megatron-core", into: "", out: "exported", overwrite: false },
    { kind: "import", file: "train.sh", device: "h100-80g", world_size: 16, vocab_size: null },
  ]);
  assert.deepEqual(wrong, []);
});

test("names are text, whatever they say", { skip: needsFake }, async () => {
  const server = await studio("hostile");
  for (const width of [1280, 390]) {
    const { page, wrong } = await open(server.url, { viewport: { width, height: 900 } });
    for (const name of TABS) {
      await tab(page, name);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth);
      assert.ok(wide <= width, `${name} is ${wide} wide`);
    }
    assert.equal(await page.locator("script").count(), 1);
    assert.ok((await page.locator("h1").textContent()).includes("<script>alert(1)</script>"));
    assert.deepEqual(wrong, []);
  }
});

for (const colorScheme of ["light", "dark"])
  test(`screen readers and keyboards find their way (${colorScheme})`, async () => {
    const server = await studio();
    const { page } = await open(server.url, { colorScheme });
    for (const name of TABS) {
      await tab(page, name);
      const { violations } = await new AxeBuilder({ page }).include(".tools").analyze();
      const serious = violations.filter((one) => ["serious", "critical"].includes(one.impact));
      assert.deepEqual(
        serious.map((one) => [name, one.id, one.nodes[0].html]),
        [],
      );
    }
    await page.locator("#tabJob").press("ArrowRight");
    assert.equal(await page.locator("[role=tab][aria-selected=true]").getAttribute("id"), "tabLayers");
  });

test("a phone's width holds every tool", async () => {
  const server = await studio();
  const { page } = await open(server.url, { viewport: { width: 390, height: 800 } });
  for (const name of TABS) {
    await tab(page, name);
    const wide = await page.evaluate(() => document.documentElement.scrollWidth);
    assert.ok(wide <= 390, `${name} is ${wide} wide`);
  }
  await page.getByRole("button", { name: "Hide the tools" }).click();
  assert.equal(await page.locator("#tool").count(), 0);
});

test("a browser without JavaScript is told", async () => {
  const server = await studio();
  const { page } = await open(server.url, { javaScriptEnabled: false, ready: "noscript" });
  assert.match(await page.locator("noscript").textContent(), /JavaScript/);
});

test("an edit of 16 stages and 256 micro-batches is drawn in the charts that are there", async () => {
  const server = await studio("wide");
  const { page, wrong } = await open(server.url);
  await boundary(page, "text", 0).focus();
  await page.evaluate(() => {
    window.charts = [...document.querySelectorAll("canvas")];
  });
  const times = [];
  for (let edit = 0; edit < 20; edit++) {
    times.push(
      await page.evaluate(
        async (key) => {
          const content = document.querySelector("#content");
          const then = content.dataset.revision;
          const started = performance.now();
          document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
          while (content.dataset.revision === then) await new Promise(requestAnimationFrame);
          await new Promise(requestAnimationFrame);
          return performance.now() - started;
        },
        edit % 2 ? "ArrowLeft" : "ArrowRight",
      ),
    );
  }
  times.sort((one, other) => one - other);
  const p95 = times[Math.ceil(0.95 * times.length) - 1];
  console.log(`an edit was drawn after ${times[10].toFixed(0)} ms (median), ${p95.toFixed(0)} ms (95th percentile)`);
  assert.ok(
    await page.evaluate(() => window.charts.every((canvas) => canvas.isConnected)),
    "a chart was made anew for an edit",
  );
  if (process.env.SCREENSHOTS) await page.screenshot({ path: path.join(process.env.SCREENSHOTS, "studio_en.png") });
  assert.deepEqual(wrong, []);
});
