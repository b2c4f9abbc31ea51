import { memo, useCallback, useEffect, useMemo, useState, useSyncExternalStore } from "react";

import { ChoosePlan, type Theme, Views } from "../App";
import { Frame, VIEWS } from "../Frame";
import type { Difference, PlanPage, Report, SetSizes, SizeChoices, Strategies as Columns } from "../report";
import { Section } from "../views/Section";
import { Strategies } from "../views/Strategies";
import { useWords } from "../words";
import { type Action, Session, type Shown } from "./session";
import { Tools } from "./Tools";

type Take = (found: Columns, index: number) => void;

const NO_PLANS: PlanPage[] = [];

/** The live page: the views of a report, and above them what changes the plan. */
export function StudioPage() {
  const session = useMemo(() => new Session(), []);
  const shown = useSyncExternalStore(session.subscribe, session.read);
  const [name, setName] = useState<string | null>(null);
  useEffect(session.start, [session]);

  const { studio, numbers, sources, space } = shown;
  const report = studio?.report ?? null;
  const plans = report?.plans ?? NO_PLANS;
  const chosen = Math.max(
    0,
    plans.findIndex((plan) => plan.name === name),
  );
  const choose = useCallback((index: number) => setName(plans[index].name), [plans]);
  const act = useCallback(
    (action: Action) => {
      setName(null);
      return session.do(action);
    },
    [session],
  );
  useUndoKeys(act);

  return (
    <Frame
      title={report?.job.name ?? "mm-autoparallel studio"}
      facts={report?.job.facts.join("; ") ?? ""}
      views={report ? VIEWS : []}
      controls={<ChoosePlan plans={plans} chosen={chosen} choose={choose} />}
    >
      {(theme) => (
        <>
          <Tools session={session} shown={shown} act={act} />
          <main id="content" data-revision={studio?.revision}>
            {report && (
              <Live
                session={session}
                act={act}
                report={report}
                sizes={studio!.sizes}
                differences={studio?.differences}
                numbers={numbers}
                sources={sources}
                space={space}
                chosen={chosen}
                choose={choose}
                theme={theme}
              />
            )}
          </main>
        </>
      )}
    </Frame>
  );
}

interface Props extends Pick<Shown, "numbers" | "sources" | "space"> {
  session: Session;
  act: (action: Action) => Promise<void>;
  report: Report;
  sizes: SizeChoices[];
  differences: Difference[] | undefined;
  chosen: number;
  choose: (index: number) => void;
  theme: Theme;
}

/** The views; work in the background, of which the page asks several times a second, does not draw them anew. */
const Live = memo((props: Props) => {
  const { session, act, report, sizes, differences, numbers, sources, space, chosen, choose, theme } = props;
  const words = useWords();
  const page = useMemo(
    () => ({ report: sources ? { ...report, sources } : report, numbers }),
    [report, sources, numbers],
  );
  const names = sizes.map((size) => size.name).join(" ");
  const strategies = useMemo(
    () => (
      <Searched
        space={space}
        theme={theme}
        take={(found, index) => void act({ kind: "sizes", sizes: sizesOf(found, index, names.split(" ")) })}
      />
    ),
    [space, theme, names, act],
  );
  return (
    <Views
      page={page}
      chosen={chosen}
      choose={choose}
      theme={theme}
      differences={differences}
      strategies={strategies}
      afterSources={
        !sources && (
          <p>
            <button type="button" onClick={() => void session.fetchSources()}>
              {words("workOutSources")}
            </button>
          </p>
        )
      }
    />
  );
});

/** The searched space, where one was searched. */
function Searched({ space, theme, take }: Pick<Props, "space" | "theme"> & { take: Take }) {
  const words = useWords();
  if (space) return <Strategies key={space.search_revision} search={space} theme={theme} take={take} />;
  return (
    <Section view="strategies">
      <p>{words("noSpaceYet")}</p>
    </Section>
  );
}

/** Of a strategy of the space, those sizes (and its schedule) that can be chosen. */
function sizesOf(found: Columns, index: number, names: string[]): SetSizes["sizes"] {
  const columns = Object.entries(found.sizes).map(([name, column]) => [name, column[index]] as const);
  const all = [...columns, ["SCHEDULE", found.schedule[index]] as const];
  return Object.fromEntries(
    all.filter(([name, value]) => (names.includes(name) || name.includes(".")) && value !== ""),
  );
}

/** Ctrl-Z takes back, Ctrl-Shift-Z does again; in a field of a form they are the field's own. */
function useUndoKeys(act: (action: Action) => Promise<void>): void {
  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      if (!(event.ctrlKey || event.metaKey) || event.altKey || event.key.toLowerCase() !== "z") return;
      if (event.target instanceof HTMLInputElement && !("settles" in event.target.dataset)) return;
      if (event.target instanceof HTMLTextAreaElement) return;
      event.preventDefault();
      void act({ kind: event.shiftKey ? "redo" : "undo" });
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, [act]);
}
