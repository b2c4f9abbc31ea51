import { useRef, useState } from "react";

import { gib } from "../format";
import type { PlanPage, Stage } from "../report";
import { useWords } from "../words";
import type { Action } from "./session";
import { fill } from "./words";

/** The boundary between the virtual stages `left` and `left + 1`. */
interface Boundary {
  modality: string;
  left: number;
}

/** A boundary of `plan` that is moved `by` layers to the right, and not yet let go or answered. */
interface Moved extends Boundary {
  plan: PlanPage;
  by: number;
}

interface Props {
  plan: PlanPage;
  act: (action: Action) => Promise<void>;
}

const LEAST_PIXELS = 6;

/** The layers of every modality on the stages; between two stages stands a boundary that can be moved. */
export function Layers({ plan, act }: Props) {
  const words = useWords();
  const [moved, setMoved] = useState<Moved | null>(null);
  const [active, setActive] = useState<Boundary | null>(null);
  const modalities = Object.keys(plan.stages[0].layers);
  const numStages = plan.stages.length;

  const drawn = (modality: string) => readCounts(plan, modality);
  const shown = (modality: string) => {
    const counts = drawn(modality);
    if (moved?.plan === plan && moved.modality === modality) {
      counts[moved.left] += moved.by;
      counts[moved.left + 1] -= moved.by;
    }
    return counts;
  };
  const nameOf = (stage: number) =>
    plan.stages[0].layers[modalities[0]].length > 1
      ? fill(words("stageOfChunk"), stage % numStages, Math.floor(stage / numStages))
      : fill(words("stageNumber"), stage);
  const describe = ({ modality, left }: Boundary) => {
    const counts = shown(modality);
    return fill(words("boundaryCounts"), nameOf(left), counts[left], nameOf(left + 1), counts[left + 1]);
  };

  const send = async ({ modality, left }: Boundary, wanted: number) => {
    const by = within(drawn(modality), left, wanted);
    const [source, target] = by > 0 ? [left + 1, left] : [left, left + 1];
    if (by !== 0) await act({ kind: "move", modality, source, target, count: Math.abs(by) });
  };

  const known = active && active.left + 1 < drawn(active.modality).length ? active : null;
  return (
    <>
      {modalities.map((modality) => (
        <Modality
          key={modality}
          modality={modality}
          plan={plan}
          counts={shown(modality)}
          nameOf={nameOf}
          describe={describe}
          touch={setActive}
          preview={(left, by) =>
            setMoved(by === null ? null : { plan, modality, left, by: within(drawn(modality), left, by) })
          }
          send={send}
        />
      ))}
      {known ? (
        <p className="controls">
          <span>
            {known.modality}: {describe(known)}
          </span>
          {[1, -1].map((by) => (
            <button key={by} type="button" onClick={() => void send(known, by)}>
              {fill(words("oneTo"), nameOf(by > 0 ? known.left : known.left + 1))}
            </button>
          ))}
        </p>
      ) : (
        <p className="controls quiet">{words("layersHelp")}</p>
      )}
    </>
  );
}

interface ModalityProps {
  modality: string;
  plan: PlanPage;
  /** Layers of each virtual stage, as they are to be shown. */
  counts: number[];
  nameOf: (stage: number) => string;
  describe: (boundary: Boundary) => string;
  touch: (boundary: Boundary) => void;
  /** Shows a boundary moved, but sends nothing; null: none is. */
  preview: (left: number, by: number | null) => void;
  send: (boundary: Boundary, by: number) => Promise<void>;
}

function Modality({ modality, plan, counts, nameOf, describe, touch, preview, send }: ModalityProps) {
  const words = useWords();
  const rows = useRef<HTMLDivElement>(null);
  const drag = useRef<{ x: number; pixels: number; by: number } | null>(null);
  const numStages = plan.stages.length;

  const start = (event: React.PointerEvent, left: number) => {
    if (event.button !== 0) return;
    event.currentTarget.setPointerCapture(event.pointerId);
    const layersOfRow = (counts.reduce((sum, count) => sum + count, 0) * numStages) / counts.length;
    const pixels = Math.max(LEAST_PIXELS, rows.current!.scrollWidth / Math.max(1, layersOfRow));
    drag.current = { x: event.clientX, pixels, by: 0 };
    touch({ modality, left });
  };

  const pull = (event: React.PointerEvent, left: number) => {
    if (!drag.current) return;
    drag.current.by = Math.round((event.clientX - drag.current.x) / drag.current.pixels);
    preview(left, drag.current.by);
  };

  const drop = async (left: number) => {
    const last = drag.current;
    if (!last) return;
    drag.current = null;
    await send({ modality, left }, last.by);
    if (!drag.current) preview(left, null);
  };

  const giveUp = (left: number) => {
    drag.current = null;
    preview(left, null);
  };

  const press = (event: React.KeyboardEvent, left: number) => {
    const by: Record<string, number> = {
      ArrowRight: 1,
      ArrowUp: 1,
      ArrowLeft: -1,
      ArrowDown: -1,
      Home: Number.NEGATIVE_INFINITY,
      End: Number.POSITIVE_INFINITY,
    };
    if (event.key === "Escape" && drag.current) giveUp(left);
    if (!(event.key in by) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    void send({ modality, left }, by[event.key]);
  };

  const block = (count: number, stage: number) => {
    const of = plan.stages[stage % numStages];
    return (
      <span
        key={stage}
        className={isOver(of) ? `block ${modality} over` : `block ${modality}`}
        style={{ flexGrow: count }}
        title={`${nameOf(stage)}: ${gib(of.peak_bytes)} / ${gib(of.limit_bytes)}`}
      >
        {count}
      </span>
    );
  };

  const boundary = (left: number) => (
    <span
      key={`boundary ${left}`}
      className="boundary"
      role="slider"
      tabIndex={0}
      aria-label={fill(words("boundary"), modality, nameOf(left), nameOf(left + 1))}
      aria-orientation="horizontal"
      aria-valuemin={0}
      aria-valuemax={counts[left] + counts[left + 1]}
      aria-valuenow={counts[left]}
      aria-valuetext={describe({ modality, left })}
      data-boundary={`${modality} ${left}`}
      onKeyDown={(event) => press(event, left)}
      onFocus={() => touch({ modality, left })}
      onPointerDown={(event) => start(event, left)}
      onPointerMove={(event) => pull(event, left)}
      onPointerUp={() => void drop(left)}
      onPointerCancel={() => giveUp(left)}
    />
  );

  return (
    <div className="modality">
      <h3>{fill(words("layersOf"), modality)}</h3>
      <div ref={rows} className="rows" role="group" aria-label={fill(words("layersOf"), modality)}>
        {Array.from({ length: counts.length / numStages }, (_, chunk) => (
          <div key={chunk} className="row">
            {counts.slice(chunk * numStages, (chunk + 1) * numStages).map((count, place) => {
              const stage = chunk * numStages + place;
              return [block(count, stage), stage + 1 < counts.length && boundary(stage)];
            })}
          </div>
        ))}
      </div>
    </div>
  );
}

/** Layers of a modality on each virtual stage (chunk · stages + stage). */
function readCounts(plan: PlanPage, modality: string): number[] {
  const chunks = plan.stages[0].layers[modality];
  return chunks.flatMap((_, chunk) => plan.stages.map((stage) => stage.layers[modality][chunk]));
}

/** `by`, but no more than the stage that gives has. */
function within(counts: number[], left: number, by: number): number {
  return Math.min(counts[left + 1], Math.max(-counts[left], by));
}

function isOver(stage: Stage): boolean {
  return stage.peak_bytes > stage.limit_bytes;
}
