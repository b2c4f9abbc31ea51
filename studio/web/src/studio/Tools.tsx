import { type ReactNode, useEffect, useRef, useState } from "react";

import { percent, signed } from "../format";
import type { Bound, Difference, Studio } from "../report";
import { useWords, type Word } from "../words";
import { Knobs, Sizes } from "./Change";
import { Launches } from "./Launches";
import { Layers } from "./Layers";
import { Modes } from "./Modes";
import { Offers } from "./Offers";
import { Order } from "./Order";
import { Pins } from "./Pins";
import { Progress, Search } from "./Search";
import type { Action, Session, Shown } from "./session";
import { fill } from "./words";
import { Wizard } from "./Wizard";

interface Props {
  session: Session;
  shown: Shown;
  act: (action: Action) => Promise<void>;
}

type Tab = Extract<Word, `tab${string}`>;

/** What a person changes the plan with; it stays in sight while the views below it are read. */
export function Tools({ session, shown, act }: Props) {
  const words = useWords();
  const [open, setOpen] = useState(true);
  const [chosen, setChosen] = useState<Tab>("tabLayers");
  const box = useHeight();
  const { studio } = shown;
  const plan = studio?.report?.plans[0];

  const tools: Partial<Record<Tab, () => ReactNode>> = {
    ...(studio &&
      plan && {
        tabLayers: () => <Layers plan={plan} act={act} />,
        tabModes: () => <Modes plan={plan} modes={studio.modes} act={act} />,
        tabOrder: () => <Order orders={studio.orders ?? []} act={act} />,
        tabStrategy: () => <Sizes studio={studio} act={act} />,
        tabWhatIf: () => <Knobs studio={studio} act={act} />,
        tabSearch: () => <Search session={session} shown={shown} />,
        tabPins: () => <Pins studio={studio} act={act} />,
        tabFiles: () => <Offers studio={studio} />,
      }),
    ...(studio && { tabJob: () => <Wizard session={session} catalog={shown.catalog} act={act} /> }),
    ...(studio && { tabLaunch: () => <Launches session={session} shown={shown} act={act} /> }),
  };
  const tabs = Object.keys(tools) as Tab[];
  const tab = tabs.includes(chosen) ? chosen : tabs[0];

  return (
    <aside ref={box} className="tools" aria-label={words("tools")} aria-busy={shown.waiting}>
      <div className="inside">
        <div className="head">
          {plan && (
            <span className="strategy">
              <b>{exactly(plan.step_ms)}</b> {studio?.change && <Change change={studio.change} />} {plan.strategy}{" "}
              <span className={plan.fits ? "good" : "bad"}>{words(plan.fits ? "fits" : "doesNotFit")}</span>
            </span>
          )}
          <span className="controls">
            {studio && <Steps studio={studio} act={act} />}
            <button type="button" aria-expanded={open} onClick={() => setOpen(!open)}>
              {words(open ? "hideTools" : "showTools")}
            </button>
          </span>
        </div>
        {studio?.bound && <BoundLine bound={studio.bound} />}
        {shown.work && <Progress work={shown.work} session={session} />}
        <Told shown={shown} />
        {open && tab && (
          <>
            <Tabs tabs={tabs} chosen={tab} choose={setChosen} />
            <div id="tool" role="tabpanel" aria-labelledby={tab} tabIndex={0} className="tool">
              {tools[tab]!()}
            </div>
          </>
        )}
      </div>
    </aside>
  );
}

/** An element that tells the page how high it is, so that what links lead to is not hidden behind it. */
function useHeight() {
  const box = useRef<HTMLElement>(null);
  useEffect(() => {
    const observer = new ResizeObserver(() =>
      document.documentElement.style.setProperty("--tools", `${box.current?.offsetHeight ?? 0}px`),
    );
    observer.observe(box.current!);
    return () => observer.disconnect();
  }, []);
  return box;
}

function Steps({ studio, act }: { studio: Studio; act: Props["act"] }) {
  const words = useWords();
  return (
    <>
      <button
        type="button"
        disabled={studio.undo === null}
        title={studio.undo ?? words("nothingToUndo")}
        aria-keyshortcuts="Control+Z"
        onClick={() => void act({ kind: "undo" })}
      >
        {words("undo")}
      </button>
      <button
        type="button"
        disabled={studio.redo === null}
        title={studio.redo ?? words("nothingToRedo")}
        aria-keyshortcuts="Control+Shift+Z"
        onClick={() => void act({ kind: "redo" })}
      >
        {words("redo")}
      </button>
    </>
  );
}

/** What the last action did to the step. */
function Change({ change }: { change: Difference }) {
  const { step_ms, step_fraction } = change;
  const kind = step_ms < 0 ? "good" : step_ms > 0 ? "bad" : "quiet";
  return (
    <span className={`${kind} change`}>
      {signed(step_ms, exactly)} ({signed(step_fraction, (of) => percent(of, 2))})
    </span>
  );
}

/** In ms, to a tenth: what one layer more does is to be seen. */
function exactly(value: number): string {
  return `${value.toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 })} ms`;
}

function BoundLine({ bound }: { bound: Bound }) {
  const words = useWords();
  const state = bound.proven
    ? "proven"
    : bound.lower_bound_ms !== null
      ? "gap"
      : bound.strategy_bound_ms !== null
        ? "strategy"
        : "unknown";
  const word: Record<typeof state, Word> = {
    proven: "boundProven",
    gap: "boundGap",
    strategy: "boundStrategy",
    unknown: "boundUnknown",
  };
  return (
    <p className="bound" data-state={state}>
      <b className={bound.proven ? "good" : undefined}>{words(word[state])}</b> {bound.words}
    </p>
  );
}

/** What the last action did; where something is wrong, what it is. */
function Told({ shown }: { shown: Shown }) {
  const words = useWords();
  const { trouble, notice, studio, waiting } = shown;
  return (
    <>
      <p role="status" className="quiet">
        {waiting ? words("waiting") : studio ? studio.message : !trouble && words("loading")}
      </p>
      {!!studio?.commands.length && (
        <p className="last" title={words("commands")}>
          <code>{studio.commands.at(-1)}</code>
        </p>
      )}
      <div role="alert" className="bad">
        {trouble && <p>{words(trouble)}</p>}
        {notice && <p>{fill(words(notice.word), notice.text)}</p>}
      </div>
    </>
  );
}

function Tabs({ tabs, chosen, choose }: { tabs: Tab[]; chosen: Tab; choose: (tab: Tab) => void }) {
  const words = useWords();
  const list = useRef<HTMLDivElement>(null);
  const press = (event: React.KeyboardEvent) => {
    const steps: Record<string, number> = { ArrowRight: 1, ArrowLeft: -1 };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const next = (tabs.indexOf(chosen) + step + tabs.length) % tabs.length;
    choose(tabs[next]);
    (list.current!.children[next] as HTMLElement).focus();
  };
  return (
    <div ref={list} role="tablist" aria-label={words("tools")} className="tabs" onKeyDown={press}>
      {tabs.map((tab) => (
        <button
          key={tab}
          id={tab}
          type="button"
          role="tab"
          aria-selected={tab === chosen}
          aria-controls="tool"
          tabIndex={tab === chosen ? 0 : -1}
          onClick={() => choose(tab)}
        >
          {words(tab)}
        </button>
      ))}
    </div>
  );
}
