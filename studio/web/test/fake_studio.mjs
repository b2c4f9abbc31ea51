// A server that speaks as mm_autoparallel/studio does, from what record.py recorded: counts of layers and modes, pins, undo
// and so on follow what is asked, times and bytes are those of the recording's two plans in turn. For work on the page:
//     npm run build && node test/fake_studio.mjs FOLDER [NAME] [PORT]
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import path from "node:path";
import { pathToFileURL } from "node:url";

const BUILT = path.resolve(import.meta.dirname, "../../../mm_autoparallel/reports/page/web");
const POLICY =
  "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'";
const PAGE = `<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>mm-autoparallel studio</title>
<link rel="icon" href="data:,"><link rel="stylesheet" href="/page.css"></head>
<body><div id="root" data-studio></div>
<noscript>The studio draws itself with JavaScript, which is off in this browser: allow it for this address.</noscript>
<script type="module" src="/page.js"></script>
</body></html>`;
const MOST_UNDO = 50;

class Refused extends Error {}

/** The recorded Studio, and what can be done to it. */
class Fake {
  constructor(folder, name) {
    this.folder = folder;
    const bytes = readFileSync(path.join(folder, `${name}.studio`));
    const length = bytes.readUInt32LE(0);
    this.block = bytes.subarray(4 + length);
    this.studio = JSON.parse(bytes.subarray(4, 4 + length));
    const { report } = this.studio;
    this.plans = report?.plans ?? [];
    if (report) report.plans = this.studio.pins.length ? this.plans : [{ ...this.plans[0], name: "now" }];
    this.edits = 0;
    this.done = [];
    this.undone = [];
    this.until = 0;
  }

  packed() {
    const document = Buffer.from(JSON.stringify({ ...this.studio, work: this.work() }));
    const padding = Buffer.alloc((4 - (document.length % 4)) % 4, " ");
    const length = Buffer.alloc(4);
    length.writeUInt32LE(document.length + padding.length);
    return Buffer.concat([length, document, padding, this.block]);
  }

  act(action) {
    if (action.kind === "undo" || action.kind === "redo") {
      const [from, to] = action.kind === "undo" ? [this.done, this.undone] : [this.undone, this.done];
      if (!from.length) throw new Refused(`there is nothing to ${action.kind}`);
      to.push({ words: from.at(-1).words, studio: this.studio });
      this.become(from.pop().studio, `${action.kind}: ${to.at(-1).words}`);
      return;
    }
    const next = structuredClone(this.studio);
    const words = this[action.kind](next, action);
    this.done = [...this.done, { words, studio: this.studio }].slice(-MOST_UNDO);
    this.undone = [];
    next.commands.push(`mm-autoparallel simulate job.yaml --config plan.json # ${words}`);
    this.become(next, words);
  }

  become(studio, message) {
    const { revision } = this.studio;
    this.studio = {
      ...studio,
      revision: revision + 1,
      message,
      undo: this.done.at(-1)?.words ?? null,
      redo: this.undone.at(-1)?.words ?? null,
    };
  }

  move(studio, { modality, source, target, count }) {
    const plan = studio.report.plans[0];
    const of = (stage) => [
      plan.stages[stage % plan.stages.length].layers[modality],
      Math.floor(stage / plan.stages.length),
    ];
    const [from, fromChunk] = of(source);
    const [to, toChunk] = of(target);
    if (from[fromChunk] < count) throw new Refused(`stage ${source} has ${from[fromChunk]} layers, not ${count}`);
    from[fromChunk] -= count;
    to[toChunk] += count;
    this.redraw(studio);
    return `${count} ${modality} layers from ${source} to ${target}`;
  }

  import(_, { file }) {
    return `read ${file}`;
  }

  export(_, { framework }) {
    return `wrote files for ${framework}`;
  }

  mode(studio, { modality, stage, mode, count }) {
    const { stages } = studio.report.plans[0];
    const [chunk, of] = [Math.floor(stage / stages.length), stages[stage % stages.length]];
    const most = of.layers[modality][chunk];
    if (count > most)
      throw new Refused(`stage ${stage} has ${most} ${modality} layers: ${count} cannot run in ${mode}`);
    const modes = (of.modes[modality] ??= {});
    (modes[mode] ??= of.layers[modality].map(() => 0))[chunk] = count;
    this.redraw(studio);
    return `${mode} of ${modality} on stage ${stage}: ${count}`;
  }

  order(studio, { stage, words }) {
    const actions = words.split(" ");
    const twice = actions.find((one, index) => actions.indexOf(one) < index);
    if (twice) throw new Refused(`stage ${stage} has ${twice} twice; each action runs once`);
    studio.orders[stage] = words;
    this.redraw(studio);
    return `another order of stage ${stage}`;
  }

  /** The figures of the recording's other plan, with the layers and modes as they are. */
  redraw(studio) {
    const [plan, ...pinned] = studio.report.plans;
    const other = this.plans[++this.edits % this.plans.length];
    const stages = other.stages.map((stage, index) => ({
      ...stage,
      layers: plan.stages[index].layers,
      modes: plan.stages[index].modes,
    }));
    studio.report.plans = [{ ...other, name: plan.name, stages }, ...pinned];
    this.compare(studio);
  }

  compare(studio) {
    const [plan, ...pinned] = studio.report.plans;
    const peak = (one) => Math.max(...one.stages.map((stage) => stage.peak_bytes));
    const against = (one, name) => ({
      name,
      step_ms: plan.step_ms - one.step_ms,
      step_fraction: plan.step_ms / one.step_ms - 1,
      peak_bytes: peak(plan) - peak(one),
    });
    studio.differences = pinned.map((one) => against(one, one.name));
    studio.change = against(this.studio.report.plans[0], "");
  }

  sizes(studio, { sizes }) {
    for (const size of studio.sizes) if (size.name in sizes) size.value = sizes[size.name];
    this.redraw(studio);
    return Object.entries(sizes).join("; ");
  }

  knobs(studio, { values }) {
    for (const knob of studio.knobs) if (knob.key in values) knob.value = values[knob.key] ?? knob.given;
    this.redraw(studio);
    return Object.entries(values).join("; ");
  }

  job(studio, action) {
    const bytes = readFileSync(path.join(this.folder, "plain.studio"));
    const length = bytes.readUInt32LE(0);
    const plain = JSON.parse(bytes.subarray(4, 4 + length));
    this.block = bytes.subarray(4 + length);
    this.plans = plain.report.plans;
    plain.report.plans = [{ ...this.plans[0], name: "now" }];
    Object.assign(studio, plain);
    return `a job of ${action.model}`;
  }

  pin(studio, { name }) {
    if (studio.pins.includes(name)) throw new Refused(`${name} is pinned already`);
    studio.pins.push(name);
    studio.report.plans.push({ ...studio.report.plans[0], name });
    this.compare(studio);
    return `pinned ${name}`;
  }

  unpin(studio, { name }) {
    studio.pins = studio.pins.filter((one) => one !== name);
    studio.report.plans = studio.report.plans.filter((one, index) => index === 0 || one.name !== name);
    this.compare(studio);
    return `unpinned ${name}`;
  }

  take(studio, { name }) {
    const taken = studio.report.plans.find((one, index) => index > 0 && one.name === name);
    if (!taken) throw new Refused(`nothing is pinned as ${name}`);
    studio.report.plans[0] = { ...taken, name: "now" };
    this.compare(studio);
    return `took ${name}`;
  }

  /** Begins work that lasts `forMs`, and then does `end`. */
  begin(title, forMs, end) {
    if (this.work()) throw new Refused(`${this.title} is still at work`);
    this.title = title;
    this.end = end;
    this.forMs = forMs;
    this.until = Date.now() + forMs;
  }

  work() {
    if (!this.until) return null;
    const left = (this.until - Date.now()) / this.forMs;
    if (left <= 0) {
      this.until = 0;
      const next = structuredClone(this.studio);
      this.become(next, this.end(next));
      return null;
    }
    return {
      title: this.title,
      line: "2 of 4 strategies",
      done_fraction: 1 - left,
      best_ms: 1200,
      lower_bound_ms: 1100,
      elapsed_s: (1 - left) * 10,
      limit_s: 10,
      gap_fraction: 1200 / 1100 - 1,
    };
  }

  optimise({ scope }) {
    this.begin(`optimise the ${scope}`, 1500, (studio) => {
      const words = "No plan of this space is more than 0.5 % faster.";
      studio.bound = { ...studio.bound, words, lower_bound_ms: 1100, gap_fraction: 0.005 };
      studio.search_revision = (studio.search_revision ?? 0) + 1;
      return "a better plan was found";
    });
  }

  whyNot({ wish }) {
    if (!/^\w+=\w+(,\w+=\w+)*$/.test(wish)) throw new Refused(`${wish}: no sizes such as PP=8,TP=4`);
    this.begin(`why not ${wish}`, 300, (studio) => {
      studio.answers.push({ question: wish, words: ["Its best plan does not fit."], step_ms: 1300 });
      return `answered ${wish}`;
    });
  }
}

/** Serves the recording `name` of `folder` on 127.0.0.1; port 0: a free one. state: of an earlier server, to go on with. */
export async function serve(folder, name, { port = 0, state = new Fake(folder, name) } = {}) {
  const asked = [];
  const server = createServer(async (request, response) => {
    const chunks = [];
    for await (const chunk of request) chunks.push(chunk);
    const body = chunks.length ? JSON.parse(Buffer.concat(chunks)) : null;
    asked.push({ path: request.url, body });
    const send = (status, type, content) => {
      response.writeHead(status, {
        "Content-Type": type,
        "Content-Security-Policy": POLICY,
        "Cache-Control": "no-store",
      });
      response.end(content);
    };
    const json = (status, content) => send(status, "application/json", JSON.stringify(content));
    const file = (where, type) => send(200, type, readFileSync(where));
    const packed = (status) => send(status, "application/octet-stream", state.packed());
    const status = () => ({ work: state.work(), revision: state.studio.revision });
    try {
      state.work();
      if (request.method === "POST" && request.headers["content-type"] !== "application/json")
        return json(415, { error: "a body is JSON here" });
      if (state.expired) return json(401, { error: "no token" });
      if (body?.revision !== undefined && body.revision !== state.studio.revision) return packed(409);
      switch (`${request.method} ${request.url}`) {
        case "GET /":
          return send(200, "text/html; charset=utf-8", PAGE);
        case "GET /page.js":
          return file(path.join(BUILT, "page.js"), "text/javascript; charset=utf-8");
        case "GET /page.css":
          return file(path.join(BUILT, "page.css"), "text/css; charset=utf-8");
        case "GET /state":
          return packed(200);
        case "GET /status":
          return json(200, status());
        case "GET /space":
          return json(200, {
            ...JSON.parse(readFileSync(path.join(folder, "space.json"))),
            search_revision: state.studio.search_revision,
          });
        case "GET /sources":
          return file(path.join(folder, "sources.json"), "application/json");
        case "GET /catalog":
          return file(path.join(folder, "catalog.json"), "application/json");
        case "POST /do":
          state.act(body.action);
          return packed(200);
        case "POST /lint":
          return file(path.join(folder, "findings.json"), "application/json");
        case "POST /optimise":
          state.optimise(body);
          return json(202, status());
        case "POST /why-not":
          state.whyNot(body);
          return json(202, status());
        case "POST /cancel":
          state.until = Math.min(state.until, Date.now());
          return json(202, status());
        default:
          return request.url.startsWith("/files/") ? send(200, "application/json", "{}") : json(404, { error: "no" });
      }
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      return json(422, { error: error.message });
    }
  });
  await new Promise((ready) => server.listen(port, "127.0.0.1", ready));
  const close = () =>
    new Promise((closed) => {
      server.close(() => closed());
      server.closeAllConnections();
    });
  return { url: `http://127.0.0.1:${server.address().port}/`, port: server.address().port, state, asked, close };
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  const [folder, name = "plain", port = "0"] = process.argv.slice(2);
  console.log((await serve(folder, name, { port: Number(port) })).url);
}
