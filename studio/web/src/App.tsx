import { useEffect, useMemo, useState } from "react";

import { type Page, readTasks } from "./data";
import { Cluster } from "./views/Cluster";
import { Files } from "./views/Files";
import { Memory } from "./views/Memory";
import { Sources } from "./views/Sources";
import { Stages } from "./views/Stages";
import { Strategies } from "./views/Strategies";
import { TimelineView } from "./views/TimelineView";
import { Verdict } from "./views/Verdict";
import { type Language, LanguageContext, say, type Word } from "./words";

export type Theme = "light" | "dark";

const VIEWS: Word[] = ["verdict", "timeline", "memory", "stages", "strategies", "cluster", "sources", "files"];

/** The whole page: one plan at a time, and beside it what is known of all others. */
export function App({ page }: { page: Page }) {
  const { report } = page;
  const [language, setLanguage] = useState<Language>(navigator.language.startsWith("zh") ? "zh" : "en");
  const [theme, setTheme] = useState<Theme>(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const [chosen, setChosen] = useState(0);
  const plan = report.plans[chosen];
  const tasks = useMemo(() => readTasks(page, plan.timeline), [page, plan]);
  const words = (word: Word) => say(language, word);

  useEffect(() => {
    document.documentElement.lang = language;
    document.documentElement.dataset.theme = theme;
  }, [language, theme]);

  return (
    <LanguageContext value={language}>
      <a className="skip" href="#content">
        {words("skip")}
      </a>
      <header>
        <h1>{report.job.name}</h1>
        <p>{report.job.facts.join("; ")}</p>
        <nav aria-label="views">
          {VIEWS.map((view) => (
            <a key={view} href={`#${view}`}>
              {words(view)}
            </a>
          ))}
        </nav>
        <div className="controls">
          {report.plans.length > 1 && (
            <label>
              {words("choosePlan")}{" "}
              <select value={chosen} onChange={(event) => setChosen(Number(event.target.value))}>
                {report.plans.map((one, index) => (
                  <option key={one.name} value={index}>
                    {one.name}
                  </option>
                ))}
              </select>
            </label>
          )}
          <button type="button" onClick={() => setLanguage(language === "en" ? "zh" : "en")}>
            {words("language")}
          </button>
          <button type="button" onClick={() => setTheme(theme === "light" ? "dark" : "light")}>
            {words("theme")}
          </button>
        </div>
      </header>
      <main id="content">
        <Verdict report={report} plan={plan} chosen={chosen} choose={setChosen} />
        <TimelineView tasks={tasks} sentence={plan.longest_path} theme={theme} />
        <Memory plan={plan} tasks={tasks} theme={theme} />
        <Stages plan={plan} />
        <Strategies search={report.search} theme={theme} />
        <Cluster page={page} plan={plan} />
        <Sources report={report} plan={plan} />
        <Files report={report} plan={plan} />
      </main>
    </LanguageContext>
  );
}
