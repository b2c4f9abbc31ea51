import { type FormEvent, useId, useState } from "react";

import { useWords } from "../words";
import type { Action } from "./session";
import { fill } from "./words";

interface Props {
  /** What each stage runs; none where the plan's schedule has a name. */
  orders: readonly string[];
  act: (action: Action) => Promise<void>;
}

/** What a stage runs, to be typed or moved action by action; the server says what waits for what where it cannot be. */
export function Order({ orders, act }: Props) {
  const words = useWords();
  const [chosen, setChosen] = useState(0);
  if (!orders.length) return <p>{words("noOrder")}</p>;
  const stage = Math.min(chosen, orders.length - 1);
  return (
    <>
      <p className="quiet">{words("orderHelp")}</p>
      <p className="controls">
        <label>
          <span>{words("stage")}</span>
          <select value={stage} onChange={(event) => setChosen(Number(event.target.value))}>
            {orders.map((_, index) => (
              <option key={index}>{index}</option>
            ))}
          </select>
        </label>
      </p>
      <Stage key={`${stage} ${orders[stage]}`} stage={stage} order={orders[stage]} act={act} />
    </>
  );
}

/** One stage's order; a new one is drawn with a new key, so what was typed and refused stays. */
function Stage({ stage, order, act }: { stage: number; order: string; act: Props["act"] }) {
  const words = useWords();
  const field = useId();
  const [text, setText] = useState(order);
  const [at, setAt] = useState<number | null>(null);
  const actions = text.split(/\s+/).filter(Boolean);
  const submit = (event: FormEvent) => {
    event.preventDefault();
    void act({ kind: "order", stage, words: actions.join(" ") });
  };
  const shift = (by: number) => {
    if (at === null) return;
    const moved = [...actions];
    moved.splice(at + by, 0, ...moved.splice(at, 1));
    setAt(at + by);
    setText(moved.join(" "));
  };
  return (
    <form className="order" onSubmit={submit} aria-label={fill(words("orderOf"), stage)}>
      <ol className="actions" aria-label={fill(words("orderOf"), stage)}>
        {actions.map((action, index) => (
          <li key={index}>
            <button
              type="button"
              aria-pressed={at === index}
              onClick={() => setAt(at === index ? null : index)}
              onKeyDown={(event) => {
                if (at !== index || (event.key !== "ArrowLeft" && event.key !== "ArrowRight")) return;
                const by = event.key === "ArrowLeft" ? -1 : 1;
                if (index + by < 0 || index + by >= actions.length) return;
                event.preventDefault();
                shift(by);
                (event.currentTarget.closest("ol")!.children[index + by].firstElementChild as HTMLElement).focus();
              }}
            >
              {action}
            </button>
          </li>
        ))}
      </ol>
      <p className="controls">
        <button type="button" disabled={at === null || at === 0} onClick={() => shift(-1)}>
          {words("earlier")}
        </button>
        <button type="button" disabled={at === null || at === actions.length - 1} onClick={() => shift(1)}>
          {words("later")}
        </button>
      </p>
      <label htmlFor={field}>
        <span>{fill(words("orderOf"), stage)}</span>
        <textarea id={field} rows={3} value={text} onChange={(event) => setText(event.target.value)} />
      </label>
      <button type="submit">{words("takeOrder")}</button>
    </form>
  );
}
