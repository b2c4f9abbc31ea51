import { useCallback, useEffect, useRef, useState } from "react";

import type { Theme } from "../App";
import { PALETTES } from "../colours";
import type { Tasks } from "../data";
import { gib, ms } from "../format";
import { drawRows, firstEndingAfter, idleBefore, type View } from "../gantt";
import { useWords } from "../words";
import { Section } from "./Section";

interface Props {
  tasks: Tasks;
  sentence: string;
  theme: Theme;
}

const LEGEND = ["forward", "backward", "recompute", "encoders", "tail", "path"] as const;
const TICKS = 2 ** 32 - 1;
const LABELS = 56;
const AXIS = 22;
const NARROWEST = 2000;
const IDLE_COLOURS: Record<string, "idle" | "transfer" | "imbalance"> = {
  idle_warmup: "idle",
  idle_communication: "transfer",
  idle_imbalance: "imbalance",
  idle_cooldown: "idle",
};

/** One step: what every stage does when, what it waits for, and the longest path. */
export function TimelineView({ tasks, sentence, theme }: Props) {
  const words = useWords();
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [view, setView] = useState<View>({ from: 0, to: TICKS });
  const [width, setWidth] = useState(0);
  const [below, setBelow] = useState("");
  const drag = useRef<{ x: number; view: View } | null>(null);
  const palette = PALETTES[theme];
  const numStages = tasks.timeline.first.length - 1;
  const row = numStages > 32 ? 10 : numStages > 16 ? 16 : 24;
  const height = numStages * row + AXIS;
  const inside = Math.max(1, width - LABELS);

  useEffect(() => setBelow(""), [tasks]);

  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(box.current!);
    return () => observer.disconnect();
  }, []);

  useEffect(() => {
    const pen = canvas.current!.getContext("2d")!;
    const scale = devicePixelRatio || 1;
    const shape = {
      width: Math.max(1, Math.round(inside * scale)),
      rowHeight: Math.round(row * scale),
      barHeight: Math.round((row - Math.max(2, row / 6)) * scale),
    };
    canvas.current!.width = Math.max(1, Math.round(width * scale));
    canvas.current!.height = Math.round(height * scale);
    pen.fillStyle = palette.surface;
    pen.fillRect(0, 0, canvas.current!.width, canvas.current!.height);
    const image = pen.createImageData(shape.width, shape.rowHeight * numStages);
    drawRows(image, tasks, view, shape, palette);
    pen.putImageData(image, Math.round(LABELS * scale), 0);
    pen.scale(scale, scale);
    pen.font = "11px sans-serif";
    pen.fillStyle = palette.text;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const every = Math.ceil(12 / row);
    for (let stage = 0; stage < numStages; stage += every) pen.fillText(String(stage), LABELS - 6, (stage + 0.4) * row);
    drawAxis(pen, tasks.timeline.tick_ms, view, inside, height - AXIS, palette.line);
  }, [tasks, view, width, theme]);

  const move = useCallback(
    (by: number) => setView((now) => within(now.from + by * (now.to - now.from), now.to - now.from)),
    [],
  );
  const zoom = useCallback(
    (factor: number, at = 0.5) =>
      setView((now) => {
        const span = Math.min(TICKS, Math.max(NARROWEST, (now.to - now.from) * factor));
        return within(now.from + at * (now.to - now.from - span), span);
      }),
    [],
  );

  useEffect(() => {
    const element = canvas.current!;
    const turn = (event: WheelEvent) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.offsetX - LABELS) / inside);
    };
    element.addEventListener("wheel", turn, { passive: false });
    return () => element.removeEventListener("wheel", turn);
  }, [inside, zoom]);

  const onKey = (event: React.KeyboardEvent) => {
    const done: Record<string, () => void> = {
      ArrowLeft: () => move(-0.2),
      ArrowRight: () => move(0.2),
      "+": () => zoom(0.5),
      "=": () => zoom(0.5),
      "-": () => zoom(2),
      "0": () => setView({ from: 0, to: TICKS }),
    };
    if (!done[event.key]) return;
    event.preventDefault();
    done[event.key]();
  };

  const point = (event: React.PointerEvent) => {
    const x = event.nativeEvent.offsetX - LABELS;
    if (drag.current) {
      const { view: then } = drag.current;
      setView(within(then.from - ((x - drag.current.x) / inside) * (then.to - then.from), then.to - then.from));
      return;
    }
    const stage = Math.floor(event.nativeEvent.offsetY / row);
    const tick = view.from + (x / inside) * (view.to - view.from);
    setBelow(stage < numStages && x >= 0 ? describe(tasks, stage, tick, words) : "");
  };

  return (
    <Section view="timeline">
      <p>{sentence}</p>
      <p className="legend">
        {LEGEND.filter((one) => one !== "encoders" || tasks.timeline.kinds.some((of) => of.encoder)).map((one) => (
          <span key={one}>
            <span className="swatch" style={{ background: palette[one] }} /> {words(one)}
          </span>
        ))}
      </p>
      <p className="legend">
        {Object.entries(tasks.timeline.mean_idle_ms).map(([cause, meanMs]) => (
          <span key={cause}>
            <span className="swatch" style={{ background: palette[IDLE_COLOURS[cause]] }} /> {words(cause)} {ms(meanMs)}
          </span>
        ))}
        <span>({words("meanOfStages")})</span>
      </p>
      <div className="controls">
        <button type="button" onClick={() => zoom(0.5)}>
          {words("zoomIn")}
        </button>
        <button type="button" onClick={() => zoom(2)}>
          {words("zoomOut")}
        </button>
        <button type="button" onClick={() => setView({ from: 0, to: TICKS })}>
          {words("whole")}
        </button>
      </div>
      <div ref={box} className="gantt" tabIndex={0} role="group" aria-label={words("timelineHelp")} onKeyDown={onKey}>
        <canvas
          ref={canvas}
          role="img"
          aria-label={`${words("timeline")}: ${sentence}`}
          style={{ width: `${width}px`, height: `${height}px` }}
          onPointerDown={(event) => {
            event.currentTarget.setPointerCapture(event.pointerId);
            drag.current = { x: event.nativeEvent.offsetX - LABELS, view };
          }}
          onPointerUp={() => {
            drag.current = null;
          }}
          onPointerMove={point}
          onPointerLeave={() => setBelow("")}
        />
      </div>
      <p className="below" aria-live="polite">
        {below || words("timelineHelp")}
      </p>
    </Section>
  );
}

/** A view of `span` ticks that begins at `from`, moved into the step where it would leave it. */
function within(from: number, span: number): View {
  const first = Math.min(Math.max(0, from), TICKS - span);
  return { from: first, to: first + span };
}

function drawAxis(pen: CanvasRenderingContext2D, tickMs: number, view: View, width: number, top: number, line: string) {
  const fromMs = view.from * tickMs;
  const toMs = view.to * tickMs;
  const rough = (toMs - fromMs) / Math.max(2, width / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const distance = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough)!;
  pen.textAlign = "center";
  pen.strokeStyle = line;
  for (let at = Math.ceil(fromMs / distance) * distance; at <= toMs; at += distance) {
    const x = LABELS + ((at - fromMs) / (toMs - fromMs)) * width;
    pen.beginPath();
    pen.moveTo(x, 0);
    pen.lineTo(x, top + 4);
    pen.globalAlpha = 0.35;
    pen.stroke();
    pen.globalAlpha = 1;
    pen.fillText(ms(at), Math.min(LABELS + width - 28, x), top + 13);
  }
}

/** What `stage` does at `tick`, or why it is idle, in words. */
function describe(tasks: Tasks, stage: number, tick: number, words: (word: string) => string): string {
  const { timeline, start, end, kind, microBatch, onPath, held } = tasks;
  const time = (ticks: number) => ms(ticks * timeline.tick_ms);
  const where = `${words("stage")} ${stage}`;
  const task = firstEndingAfter(tasks, stage, tick);
  if (task >= timeline.first[stage + 1]) {
    const isTail = (tick - end[task - 1]) * timeline.tick_ms < timeline.tail_ms[stage];
    const [name, lengthMs] = isTail
      ? ["tail", timeline.tail_ms[stage]]
      : ["idle_cooldown", timeline.cooldown_ms[stage]];
    return `${where}: ${words(name)} ${ms(lengthMs)}`;
  }
  const of = timeline.kinds[kind[task]];
  const which = of.encoder
    ? `${of.encoder}, ${words("passOfEncoder")} ${microBatch[task]}, ${words("piece")} ${of.chunk}`
    : `${words("microBatch")} ${microBatch[task]}, ${words("chunk")} ${of.chunk}`;
  if (start[task] > tick) {
    const causes = idleBefore(tasks, stage, task).map(([cause, ticks]) => `${words(cause)} ${time(ticks)}`);
    return `${where}: ${causes.join(", ")}; ${words("before")} ${words(of.backward ? "backward" : "forward")}, ${which}`;
  }
  const parts = [
    `${where}: ${words(of.backward ? "backward" : "forward")}`,
    which,
    `${time(start[task])} – ${time(end[task])} (${ms(of.length_ms)})`,
    ...(of.recompute_ms > 0 ? [`${words("recompute")} ${ms(of.recompute_ms)}`] : []),
    `${words("held")} ${gib(held[task] * timeline.tick_bytes)}`,
    ...(onPath[task] ? [words("path")] : []),
  ];
  return parts.join("; ");
}
