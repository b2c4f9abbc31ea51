import { type ReactNode, useEffect, useState } from "react";

import type { Theme } from "./App";
import { type Language, LanguageContext, say, type Word } from "./words";

export const VIEWS: Word[] = ["verdict", "timeline", "memory", "stages", "strategies", "cluster", "sources", "files"];

interface Props {
  title: string;
  facts: string;
  views: Word[];
  /** Beside the choice of language and theme. */
  controls?: ReactNode;
  children: (theme: Theme) => ReactNode;
}

/** What every page has around its views: heading, links to them, language and theme. */
export function Frame({ title, facts, views, controls, children }: Props) {
  const [language, setLanguage] = useState<Language>(navigator.language.startsWith("zh") ? "zh" : "en");
  const [theme, setTheme] = useState<Theme>(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
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
        <h1>{title}</h1>
        <p>{facts}</p>
        <nav aria-label="views">
          {views.map((view) => (
            <a key={view} href={`#${view}`}>
              {words(view)}
            </a>
          ))}
        </nav>
        <div className="controls">
          {controls}
          <button type="button" onClick={() => setLanguage(language === "en" ? "zh" : "en")}>
            {words("language")}
          </button>
          <button type="button" onClick={() => setTheme(theme === "light" ? "dark" : "light")}>
            {words("theme")}
          </button>
        </div>
      </header>
      {children(theme)}
    </LanguageContext>
  );
}
