import type { ReactNode } from "react";

import { useWords, type Word } from "../words";

/** A view of the page, with its heading and the place that links lead to. */
export function Section({ view, children }: { view: Word; children: ReactNode }) {
  const words = useWords();
  return (
    <section id={view} aria-labelledby={`${view}-heading`}>
      <h2 id={`${view}-heading`}>{words(view)}</h2>
      {children}
    </section>
  );
}

/** A table that scrolls by itself where it is wider than the page. */
export function Wide({ label, children }: { label: string; children: ReactNode }) {
  const words = useWords();
  return (
    <div className="wide" tabIndex={0} role="region" aria-label={`${words("table")}: ${label}`}>
      <table>{children}</table>
    </div>
  );
}
