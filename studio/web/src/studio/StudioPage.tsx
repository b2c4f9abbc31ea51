import { useCallback, useEffect, useMemo, useState, useSyncExternalStore } from "react";

import { ChoosePlan, type Theme, Views } from "../App";
import { Frame, VIEWS } from "../Frame";
import type { Space } from "../report";
import { Section } from "../views/Section";
import { Strategies } from "../views/Strategies";
import { useWords } from "../words";
import { type Action, Session, type Shown } from "./session";
import { Tools } from "./Tools";

/** The live page: the views of a report, and above them what changes the plan. */
export function StudioPage() {
  const session = useMemo(() => new Session(), []);
  const shown = useSyncExternalStore(session.subscribe, session.read);
  const [name, setName] = useState<string | null>(null);
  useEffect(session.start, [session]);

  const report = shown.studio?.report ?? null;
  const plans = report?.plans ?? [];
  const chosen = Math.max(
    0,
    plans.findIndex((plan) => plan.name === name),
  );
  const choose = (index: number) => setName(plans[index].name);
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
          <main id="content" data-revision={shown.studio?.revision}>
            {report && <Live session={session} shown={shown} chosen={chosen} choose={choose} theme={theme} />}
          </main>
        </>
      )}
    </Frame>
  );
}

interface Props {
  session: Session;
  shown: Shown;
  chosen: number;
  choose: (index: number) => void;
  theme: Theme;
}

function Live({ session, shown, chosen, choose, theme }: Props) {
  const words = useWords();
  const { numbers, sources, space } = shown;
  const report = shown.studio!.report!;
  const page = useMemo(
    () => ({ report: sources ? { ...report, sources } : report, numbers }),
    [report, sources, numbers],
  );
  const strategies = useMemo(() => <Searched space={space} theme={theme} />, [space, theme]);
  return (
    <Views
      page={page}
      chosen={chosen}
      choose={choose}
      theme={theme}
      differences={shown.studio!.differences}
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
}

/** The searched space, where one was searched. */
function Searched({ space, theme }: { space: Space | null; theme: Theme }) {
  const words = useWords();
  if (space) return <Strategies key={space.search_revision} search={space} theme={theme} />;
  return (
    <Section view="strategies">
      <p>{words("noSpaceYet")}</p>
    </Section>
  );
}

/** Ctrl-Z takes back, Ctrl-Shift-Z does again; in a field of a form they are the field's own. */
function useUndoKeys(act: (action: Action) => Promise<void>): void {
  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      if (!(event.ctrlKey || event.metaKey) || event.altKey || event.key.toLowerCase() !== "z") return;
      if (event.target instanceof HTMLInputElement && !("settles" in event.target.dataset)) return;
      event.preventDefault();
      void act({ kind: event.shiftKey ? "redo" : "undo" });
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, [act]);
}
