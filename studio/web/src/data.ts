/** The document and the block of numbers that a page carries (mm_autoparallel/reports/page/html.py packs them). */
import type { Numbers, Report, Timeline } from "./report";

export type Whole = Uint8Array | Uint16Array | Uint32Array;

export interface Page {
  report: Report;
  /** The whole numbers that `where` names. */
  numbers: (where: Numbers) => Whole;
}

/** Reads what stands in the page as text: base64 of gzip of `pack_report`'s bytes. */
export async function readPage(text: string): Promise<Page> {
  const packed = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const { document: report, numbers } = unpack<Report>(await new Response(stream).arrayBuffer());
  return { report, numbers };
}

/** The document that `bytes` begin with, and the numbers of the block behind it (as `pack_report` lays them). */
export function unpack<T>(bytes: ArrayBuffer): { document: T; numbers: Page["numbers"] } {
  const length = new DataView(bytes).getUint32(0, true);
  const document = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length))) as T;
  const block = 4 + length;
  const numbers = ({ offset, count, width }: Numbers): Whole =>
    width === 1
      ? new Uint8Array(bytes, block + offset, count)
      : width === 2
        ? new Uint16Array(bytes, block + offset, count)
        : new Uint32Array(bytes, block + offset, count);
  return { document, numbers };
}

/** The tasks of a plan, a column each; times in ticks (`tick_ms`), stage `s` has those from `first[s]` on. */
export interface Tasks {
  timeline: Timeline;
  start: Whole;
  end: Whole;
  idle: Whole;
  transfer: Whole;
  kind: Whole;
  microBatch: Whole;
  onPath: Whole;
  held: Whole;
}

export function readTasks(page: Page, timeline: Timeline): Tasks {
  const { numbers } = page;
  return {
    timeline,
    start: numbers(timeline.start),
    end: numbers(timeline.end),
    idle: numbers(timeline.idle),
    transfer: numbers(timeline.transfer),
    kind: numbers(timeline.kind),
    microBatch: numbers(timeline.micro_batch),
    onPath: numbers(timeline.on_path),
    held: numbers(timeline.held),
  };
}
