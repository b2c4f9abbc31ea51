/**
 * Draws the tasks of a step, a row a stage, as pixels: each column of a row has the mean colour of what happens in its
 * time, so that a step of hundreds of thousands of tasks is drawn as fast as one of ten. Where tasks are wide enough they
 * keep an edge between them.
 */
import { channels, type Palette } from "./colours";
import type { Tasks } from "./data";
import type { TaskKind } from "./report";

export interface View {
  /** Ticks at the left and right end. */
  from: number;
  to: number;
}

/** In device pixels. */
export interface Shape {
  width: number;
  rowHeight: number;
  barHeight: number;
}

type Colour = [number, number, number];

const EDGE_PIXELS = 3;

export function drawRows(image: ImageData, tasks: Tasks, view: View, shape: Shape, palette: Palette): void {
  const pixels = new Uint32Array(image.data.buffer);
  const brush = new Brush(tasks, view, shape.width, palette);
  const numStages = tasks.timeline.first.length - 1;
  for (let stage = 0; stage < numStages; stage++) {
    brush.paint(stage);
    const top = stage * shape.rowHeight;
    const mark = Math.max(2, Math.round(shape.barHeight / 6));
    for (let y = 0; y < shape.rowHeight; y++) {
      const row = pixels.subarray((top + y) * shape.width, (top + y + 1) * shape.width);
      if (y >= shape.barHeight) row.fill(brush.surface);
      else row.set(y >= shape.barHeight - mark ? brush.marked : brush.line);
    }
  }
}

/** One row of pixels: `line`, and `marked`, the same with the longest path on it. */
class Brush {
  readonly line: Uint32Array;
  readonly marked: Uint32Array;
  readonly surface: number;
  private readonly red: Float32Array;
  private readonly green: Float32Array;
  private readonly blue: Float32Array;
  private readonly covered: Float32Array;
  private readonly onPath: Uint8Array;
  private readonly colours: Record<Exclude<keyof Palette, "text" | "line" | "surface" | "series">, Colour>;

  constructor(
    private readonly tasks: Tasks,
    private readonly view: View,
    private readonly width: number,
    palette: Palette,
  ) {
    this.line = new Uint32Array(width);
    this.marked = new Uint32Array(width);
    this.red = new Float32Array(width);
    this.green = new Float32Array(width);
    this.blue = new Float32Array(width);
    this.covered = new Float32Array(width);
    this.onPath = new Uint8Array(width);
    this.colours = {
      forward: channels(palette.forward),
      backward: channels(palette.backward),
      recompute: channels(palette.recompute),
      encoders: channels(palette.encoders),
      tail: channels(palette.tail),
      idle: channels(palette.idle),
      transfer: channels(palette.transfer),
      imbalance: channels(palette.imbalance),
      path: channels(palette.path),
    };
    this.surface = pack(...channels(palette.surface));
  }

  paint(stage: number): void {
    const { tasks, view, width } = this;
    const { timeline, start, end, idle, transfer, kind, onPath } = tasks;
    for (const row of [this.red, this.green, this.blue, this.covered, this.onPath]) row.fill(0);
    const perTick = width / (view.to - view.from);
    const first = timeline.first[stage];
    const last = timeline.first[stage + 1];
    let task = firstEndingAfter(tasks, stage, view.from);
    for (; task < last && start[task] - idle[task] < view.to; task++) {
      const of = timeline.kinds[kind[task]];
      const left = (start[task] - view.from) * perTick;
      const right = (end[task] - view.from) * perTick;
      if (idle[task] > 0 && task > first) {
        const arriving = left - transfer[task] * perTick;
        this.cover(left - idle[task] * perTick, arriving, this.colours.imbalance);
        this.cover(arriving, left, this.colours.transfer);
      }
      if (onPath[task]) this.onPath.fill(1, Math.max(0, Math.floor(left)), Math.min(width, Math.floor(right) + 1));
      const edge = right - left > EDGE_PIXELS ? 1 : 0;
      const again = of.length_ms > 0 ? ((right - left) * of.recompute_ms) / of.length_ms : 0;
      if (again > 0) this.cover(left, left + again, this.colours.recompute);
      this.cover(left + again, right - edge, this.colours[taskOf(of)]);
    }
    const tail = timeline.tail_ms[stage] / timeline.tick_ms;
    if (tail > 0 && last > timeline.first[stage]) {
      const left = (end[last - 1] - view.from) * perTick;
      this.cover(left, left + tail * perTick, this.colours.tail);
    }
    this.mix();
  }

  /** Adds a colour to the columns from `left` to `right`, each by how much of it is covered. */
  private cover(left: number, right: number, [red, green, blue]: Colour): void {
    const first = Math.max(0, Math.floor(left));
    const last = Math.min(this.width - 1, Math.floor(right));
    for (let x = first; x <= last; x++) {
      const part = Math.min(right, x + 1) - Math.max(left, x);
      if (part <= 0) continue;
      this.red[x] += red * part;
      this.green[x] += green * part;
      this.blue[x] += blue * part;
      this.covered[x] += part;
    }
  }

  private mix(): void {
    const [red, green, blue] = this.colours.idle;
    const mark = pack(...this.colours.path);
    for (let x = 0; x < this.width; x++) {
      const rest = Math.max(0, 1 - this.covered[x]);
      this.line[x] = pack(this.red[x] + red * rest, this.green[x] + green * rest, this.blue[x] + blue * rest);
      this.marked[x] = this.onPath[x] ? mark : this.line[x];
    }
  }
}

/** What a task is, by the name of its colour. */
export function taskOf({ encoder, backward }: TaskKind): "encoders" | "backward" | "forward" {
  return encoder ? "encoders" : backward ? "backward" : "forward";
}

/** The first task of `stage` that ends after the tick `from`. */
export function firstEndingAfter(tasks: Tasks, stage: number, from: number): number {
  let low = tasks.timeline.first[stage];
  let high = tasks.timeline.first[stage + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tasks.end[middle] <= from) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Why `stage` is idle before `task`, in ticks by cause; nothing where it is not. */
export function idleBefore({ timeline, idle, transfer }: Tasks, stage: number, task: number): [string, number][] {
  const causes: [string, number][] =
    task === timeline.first[stage]
      ? [["idle_warmup", idle[task]]]
      : [
          ["idle_imbalance", idle[task] - transfer[task]],
          ["idle_communication", transfer[task]],
        ];
  return causes.filter(([, ticks]) => ticks > 0);
}

function pack(red: number, green: number, blue: number): number {
  return (255 << 24) | (Math.min(255, blue) << 16) | (Math.min(255, green) << 8) | Math.min(255, red);
}
