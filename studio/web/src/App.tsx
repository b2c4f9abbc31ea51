import { type ReactNode, useMemo, useState } from "react";

import { type Page, readTasks } from "./data";
import { Frame, VIEWS } from "./Frame";
import type { Difference, PlanPage } from "./report";
import { Cluster } from "./views/Cluster";
import { Files } from "./views/Files";
import { Memory } from "./views/Memory";
import { Sources } from "./views/Sources";
import { Stages } from "./views/Stages";
import { Strategies } from "./views/Strategies";
import { TimelineView } from "./views/TimelineView";
import { Verdict } from "./views/Verdict";
import { useWords } from "./words";

export type Theme = "light" | "dark";

/** The whole page: one plan at a time, and beside it what is known of all others. */
export function App({ page }: { page: Page }) {
  const { report } = page;
  const [chosen, setChosen] = useState(0);
  return (
    <Frame
      title={report.job.name}
      facts={report.job.facts.join("; ")}
      views={VIEWS}
      controls={<ChoosePlan plans={report.plans} chosen={chosen} choose={setChosen} />}
    >
      {(theme) => (
        <main id="content">
          <Views page={page} chosen={chosen} choose={setChosen} theme={theme} />
        </main>
      )}
    </Frame>
  );
}

interface Choice {
  plans: PlanPage[];
  chosen: number;
  choose: (index: number) => void;
}

/** Which plan is shown, where there are several. */
export function ChoosePlan({ plans, chosen, choose }: Choice) {
  const words = useWords();
  if (plans.length < 2) return null;
  return (
    <label>
      {words("choosePlan")}{" "}
      <select value={chosen} onChange={(event) => choose(Number(event.target.value))}>
        {plans.map((one, index) => (
          <option key={one.name} value={index}>
            {one.name}
          </option>
        ))}
      </select>
    </label>
  );
}

interface Props {
  page: Page;
  chosen: number;
  choose: (index: number) => void;
  theme: Theme;
  /** Of the first plan to others, which stand beside theirs. */
  differences?: Difference[];
  /** In the place of the report's own search. */
  strategies?: ReactNode;
  afterSources?: ReactNode;
}

/** All views of a plan. */
export function Views({ page, chosen, choose, theme, differences, strategies, afterSources }: Props) {
  const { report } = page;
  const plan = report.plans[chosen];
  const tasks = useMemo(() => readTasks(page, plan.timeline), [page, plan]);
  return (
    <>
      <Verdict report={report} plan={plan} chosen={chosen} choose={choose} differences={differences} />
      <TimelineView key={plan.name} tasks={tasks} sentence={plan.longest_path} theme={theme} />
      <Memory plan={plan} tasks={tasks} theme={theme} />
      <Stages plan={plan} />
      {strategies ?? <Strategies search={report.search} theme={theme} />}
      <Cluster page={page} plan={plan} />
      <Sources report={report} plan={plan} />
      {afterSources}
      <Files report={report} plan={plan} />
    </>
  );
}
