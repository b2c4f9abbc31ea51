/**
 * The page's side of the talk with the studio's server: what is drawn, what is asked of the server, one change at a time,
 * and what to say when it does not answer. The models are those of mm_autoparallel/studio/document.py.
 */
import { type Page, unpack } from "../data";
import type {
  Catalog,
  Do,
  Failure,
  Findings,
  LintLaunch,
  Optimise,
  Sources,
  Space,
  Status,
  Studio,
  WhyNot,
  Work,
} from "../report";
import type { Word } from "../words";
import { joined } from "./joined";
import { keep } from "./keep";

export type Action = Do["action"];

/** A sentence of the page, or `refused` with what the server says. */
export interface Notice {
  word: Word;
  text: string;
}

/** What the page shows. sources: of the revision that is drawn, where they were asked for. */
export interface Shown {
  studio: Studio | null;
  numbers: Page["numbers"];
  work: Work | null;
  space: Space | null;
  sources: Sources | null;
  catalog: Catalog | null;
  /** Of the launch that was checked last. */
  findings: Findings | null;
  trouble: "gone" | "token" | null;
  notice: Notice | null;
  /** Whether the server takes its time over what it was asked to do. */
  waiting: boolean;
}

/** What the server answered, or why it did not. */
type Answer = { status: number; bytes: ArrayBuffer } | { status: "gone" | "token" };

const BUSY_MS = 400;
const CALM_MS = 3000;
const GONE_MS = 1000;
const LONG_MS = 200;
const CONFLICT = 409;
const OTHER_PAGE: Notice = { word: "otherPage", text: "" };

export class Session {
  private shown: Shown = {
    studio: null,
    numbers: () => new Uint8Array(),
    work: null,
    space: null,
    sources: null,
    catalog: null,
    findings: null,
    trouble: null,
    notice: null,
    waiting: false,
  };
  private readonly listeners = new Set<() => void>();
  private wanted: { action: Action; done: () => void }[] = [];
  private turn: Promise<void> = Promise.resolve();
  private turns = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private running = false;

  readonly read = (): Shown => this.shown;

  readonly subscribe = (listener: () => void): (() => void) => {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  };

  /** Begins to draw and to ask; what it returns ends that. */
  readonly start = (): (() => void) => {
    this.running = true;
    void this.load().finally(() => this.wait());
    return () => {
      this.running = false;
      clearTimeout(this.timer);
    };
  };

  /** Has the server do `action` after all that was asked before; ends when it has answered, or was not asked. */
  do(action: Action): Promise<void> {
    return new Promise((done) => {
      const last = this.wanted.at(-1);
      const both = last && joined(last.action, action);
      if (last && both) {
        const { done: before } = last;
        last.action = both;
        last.done = () => (before(), done());
        return;
      }
      this.wanted.push({ action, done });
      void this.takeTurn(() => this.doNext());
    });
  }

  async optimise(scope: Optimise["scope"], limit_s: number): Promise<void> {
    await this.begin("/optimise", { scope, limit_s });
  }

  async whyNot(wish: string, limit_s: number): Promise<void> {
    await this.begin("/why-not", { wish, limit_s });
  }

  async cancel(): Promise<void> {
    const status = this.json<Status>(await ask("/cancel", ""));
    if (status) this.show({ work: status.work });
    this.wait();
  }

  /** Fetches where the figures come from, for the plans that are drawn. */
  async fetchSources(): Promise<void> {
    const revision = this.shown.studio?.revision;
    const sources = this.json<Sources>(await ask("/sources"));
    if (sources && this.shown.studio?.revision === revision) this.show({ sources });
  }

  async fetchCatalog(): Promise<void> {
    const catalog = this.json<Catalog>(await ask("/catalog"));
    if (catalog) this.show({ catalog });
  }

  async lint(launch: LintLaunch): Promise<void> {
    this.show({ findings: null, notice: null });
    const findings = this.json<Findings>(await ask("/lint", JSON.stringify(launch)));
    if (findings) this.show({ findings });
  }

  private show(change: Partial<Shown>): void {
    this.shown = { ...this.shown, ...change };
    for (const listener of this.listeners) listener();
  }

  /** Runs `task` when all that took a turn before has ended, so that what is drawn comes from one answer at a time. */
  private takeTurn(task: () => Promise<void>): Promise<void> {
    this.turns++;
    const done = this.turn.then(task).finally(() => {
      this.turns--;
    });
    this.turn = done.catch(() => undefined); // who waits for `done` is told; the next ones have their turn all the same
    return done;
  }

  private load(notice: Notice | null = null): Promise<void> {
    return this.takeTurn(async () => {
      const bytes = this.accept(await ask("/state"));
      if (bytes) this.draw(bytes, notice);
    });
  }

  private async doNext(): Promise<void> {
    const next = this.wanted.shift();
    const { studio } = this.shown;
    if (!next) return;
    if (!studio) return next.done();
    const long = setTimeout(() => this.show({ waiting: true }), LONG_MS);
    const answer = await ask("/do", JSON.stringify({ revision: studio.revision, action: next.action } satisfies Do));
    clearTimeout(long);
    if (this.shown.waiting) this.show({ waiting: false });
    const given = answer.status === 200 ? [] : this.wanted.splice(0);
    if ("bytes" in answer && answer.status === CONFLICT) this.draw(answer.bytes, OTHER_PAGE);
    else {
      const bytes = this.accept(answer);
      if (bytes) this.draw(bytes, null);
      else if (answer.status === "gone") this.show({ notice: { word: "goneWhile", text: "" } });
    }
    for (const one of [next, ...given]) one.done();
  }

  private async begin(path: string, wish: Omit<Optimise, "revision"> | Omit<WhyNot, "revision">): Promise<void> {
    const { studio } = this.shown;
    if (!studio) return;
    const answer = await ask(path, JSON.stringify({ revision: studio.revision, ...wish }));
    if (answer.status === CONFLICT) await this.load(OTHER_PAGE);
    else {
      const status = this.json<Status>(answer);
      if (status) this.show({ work: status.work, notice: null });
    }
    this.wait();
  }

  /** Draws the packed Studio. */
  private draw(bytes: ArrayBuffer, notice: Notice | null): void {
    const { document, numbers } = unpack<Studio>(bytes);
    const { studio: then, sources, space } = this.shown;
    const studio = then ? keep(then, document) : document;
    this.show({
      studio,
      numbers,
      work: studio.work,
      sources: then?.revision === studio.revision ? sources : null,
      space: studio.search_revision === null ? null : space,
      notice,
      trouble: null,
    });
    if (studio.search_revision !== null && studio.search_revision !== space?.search_revision) void this.fetchSpace();
  }

  private async fetchSpace(): Promise<void> {
    const space = this.json<Space>(await ask("/space"));
    if (space && space.search_revision === this.shown.studio?.search_revision) this.show({ space });
  }

  /** Asks again after a while how far the work is, and whether another page has changed the plan. */
  private wait(): void {
    clearTimeout(this.timer);
    if (!this.running) return;
    const { trouble, work } = this.shown;
    const delay = trouble === "gone" ? GONE_MS : work ? BUSY_MS : CALM_MS;
    this.timer = setTimeout(() => void this.look().finally(() => this.wait()), delay);
  }

  private async look(): Promise<void> {
    if (this.turns) return;
    if (this.shown.trouble || !this.shown.studio) return this.load(this.shown.notice);
    const status = this.json<Status>(await ask("/status"));
    if (!status || this.turns) return;
    const ended = this.shown.work !== null && status.work === null;
    if (this.shown.work !== status.work) this.show({ work: status.work });
    if (ended || status.revision !== this.shown.studio.revision) await this.load(this.shown.notice);
  }

  /** The answer's bytes; null where the server did not do as asked, which the page then says. */
  private accept(answer: Answer): ArrayBuffer | null {
    if (!("bytes" in answer)) {
      this.show({ trouble: answer.status });
      return null;
    }
    if (answer.status >= 200 && answer.status < 300) return answer.bytes;
    this.show({ trouble: null, notice: { word: "refused", text: whyRefused(answer.status, answer.bytes) } });
    return null;
  }

  private json<T>(answer: Answer): T | null {
    const bytes = this.accept(answer);
    return bytes && (JSON.parse(new TextDecoder().decode(bytes)) as T);
  }
}

/** body: of a POST; without one it is a GET. */
async function ask(path: string, body?: string): Promise<Answer> {
  const headers: HeadersInit = body === undefined ? {} : { "Content-Type": "application/json" };
  const method = body === undefined ? "GET" : "POST";
  try {
    const response = await fetch(path, { method, headers, body, cache: "no-store" });
    const { status } = response;
    return status === 401 ? { status: "token" } : { status, bytes: await response.arrayBuffer() };
  } catch (error) {
    if (error instanceof TypeError) return { status: "gone" };
    throw error;
  }
}

/** What the Failure in `bytes` says; where it is none, the status. */
function whyRefused(status: number, bytes: ArrayBuffer): string {
  try {
    return (JSON.parse(new TextDecoder().decode(bytes)) as Failure).error;
  } catch {
    return `HTTP ${status}`;
  }
}
