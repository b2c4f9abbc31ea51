import { useRef, useState } from "react";

import { gib } from "../format";
import type { PlanPage, Stage } from "../report";
import { useWords } from "../words";
import type { Action } from "./session";
import { fill } from "./words";

/** A boundary of `plan`, by the virtual stage on its left, and by how many layers it has been moved to the right. */
interface Moved {
  plan: PlanPage;
  left: number;
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
  return (
    <>
      {Object.keys(plan.stages[0].layers).map((modality) => (
        <Modality key={modality} modality={modality} plan={plan} act={act} />
      ))}
      <p className="quiet">{words("layersHelp")}</p>
    </>
  );
}

function Modality({ modality, plan, act }: Props & { modality: string }) {
  const words = useWords();
  const rows = useRef<HTMLDivElement>(null);
  const drag = useRef<{ x: number; pixels: number } | null>(null);
  const [moved, setMoved] = useState<Moved | null>(null);
  const [last, setLast] = useState<number | null>(null);
  const numStages = plan.stages.length;
  const numChunks = plan.stages[0].layers[modality].length;
  const drawn = Array.from(
    { length: numStages * numChunks },
    (_, stage) => plan.stages[stage % numStages].layers[modality][Math.floor(stage / numStages)],
  );
  const counts =
    moved?.plan === plan
      ? drawn.map(
          (count, stage) => count + (stage === moved.left ? moved.by : stage === moved.left + 1 ? -moved.by : 0),
        )
      : drawn;
  const total = drawn.reduce((sum, count) => sum + count, 0);
  const active = last !== null && last + 1 < counts.length ? last : null;
  const nameOf = (stage: number) =>
    numChunks > 1
      ? fill(words("stageOfChunk"), stage % numStages, Math.floor(stage / numStages))
      : fill(words("stageNumber"), stage);
  const say = (left: number) =>
    fill(words("boundaryCounts"), nameOf(left), counts[left], nameOf(left + 1), counts[left + 1]);

  const within = (left: number, by: number) => Math.min(drawn[left + 1], Math.max(-drawn[left], by));

  const send = async (left: number, by: number) => {
    const [source, target] = by > 0 ? [left + 1, left] : [left, left + 1];
    if (by !== 0) await act({ kind: "move", modality, source, target, count: Math.abs(by) });
  };

  const start = (event: React.PointerEvent, left: number) => {
    if (event.button !== 0 || drawn[left] + drawn[left + 1] === 0) return;
    event.currentTarget.setPointerCapture(event.pointerId);
    const pixels = rows.current!.clientWidth / Math.max(1, total / numChunks);
    drag.current = { x: event.clientX, pixels: Math.max(LEAST_PIXELS, pixels) };
    setMoved({ plan, left, by: 0 });
    setLast(left);
  };

  const pull = (event: React.PointerEvent, left: number) => {
    if (!drag.current) return;
    const by = Math.round((event.clientX - drag.current.x) / drag.current.pixels);
    setMoved({ plan, left, by: within(left, by) });
  };

  const drop = async (left: number) => {
    if (!drag.current || !moved) return;
    drag.current = null;
    await send(left, moved.by);
    if (!drag.current) setMoved(null);
  };

  const giveUp = () => {
    drag.current = null;
    setMoved(null);
  };

  const press = (event: React.KeyboardEvent, left: number) => {
    const by: Record<string, number> = {
      ArrowRight: 1,
      ArrowUp: 1,
      ArrowLeft: -1,
      ArrowDown: -1,
      Home: -drawn[left],
      End: drawn[left + 1],
    };
    if (event.key === "Escape" && drag.current) giveUp();
    if (!(event.key in by) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    void send(left, within(left, by[event.key]));
  };

  return (
    <div className="modality">
      <h3>{fill(words("layersOf"), modality)}</h3>
      <div ref={rows} className="rows" role="group" aria-label={fill(words("layersOf"), modality)}>
        {Array.from({ length: numChunks }, (_, chunk) => (
          <div key={chunk} className="row">
            {counts.slice(chunk * numStages, (chunk + 1) * numStages).map((count, place) => {
              const stage = chunk * numStages + place;
              return [
                <span
                  key={stage}
                  className={isOver(plan.stages[place]) ? `block ${modality} over` : `block ${modality}`}
                  style={{ flexGrow: count }}
                  title={`${nameOf(stage)}: ${gib(plan.stages[place].peak_bytes)} / ${gib(plan.stages[place].limit_bytes)}`}
                >
                  {count}
                </span>,
                stage + 1 < counts.length && (
                  <span
                    key={`boundary ${stage}`}
                    className="boundary"
                    role="slider"
                    tabIndex={0}
                    aria-label={fill(words("boundary"), modality, nameOf(stage), nameOf(stage + 1))}
                    aria-orientation="horizontal"
                    aria-valuemin={0}
                    aria-valuemax={counts[stage] + counts[stage + 1]}
                    aria-valuenow={counts[stage]}
                    aria-valuetext={say(stage)}
                    data-boundary={`${modality} ${stage}`}
                    onKeyDown={(event) => press(event, stage)}
                    onFocus={() => setLast(stage)}
                    onPointerDown={(event) => start(event, stage)}
                    onPointerMove={(event) => pull(event, stage)}
                    onPointerUp={() => void drop(stage)}
                    onPointerCancel={giveUp}
                  />
                ),
              ];
            })}
          </div>
        ))}
      </div>
      {active !== null && (
        <p className="controls">
          <span>{say(active)}</span>
          <button type="button" disabled={!drawn[active + 1]} onClick={() => void send(active, 1)}>
            {fill(words("oneTo"), nameOf(active))}
          </button>
          <button type="button" disabled={!drawn[active]} onClick={() => void send(active, -1)}>
            {fill(words("oneTo"), nameOf(active + 1))}
          </button>
        </p>
      )}
    </div>
  );
}

function isOver(stage: Stage): boolean {
  return stage.peak_bytes > stage.limit_bytes;
}
