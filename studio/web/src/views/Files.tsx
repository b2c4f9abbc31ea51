import { useState } from "react";

import type { PlanPage, Report } from "../report";
import { useWords } from "../words";
import { Section } from "./Section";

/** The job, the plan's result file and the command, to copy or to save. */
export function Files({ report, plan }: { report: Report; plan: PlanPage }) {
  const words = useWords();
  return (
    <Section view="files">
      {report.command && <Text name={words("again")} text={report.command} />}
      {report.job.text !== null && <Text name={report.job.name} text={report.job.text} />}
      <Text name="auto_parallel_search_optimal_config.json" text={plan.file} />
      <p className="quiet">
        mm-autoparallel {report.version}; {report.job.sha256}
      </p>
    </Section>
  );
}

/** A text, to copy or to save under its name. */
export function Text({ name, text }: { name: string; text: string }) {
  const words = useWords();
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
  };
  const save = () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
    link.download = name;
    link.click();
    URL.revokeObjectURL(link.href);
  };
  return (
    <details open={text.length < 200}>
      <summary>{name}</summary>
      <div className="controls">
        <button type="button" onClick={copy}>
          {words(copied ? "copied" : "copy")}
        </button>
        {text.includes("\n") && (
          <button type="button" onClick={save}>
            {words("download")}
          </button>
        )}
      </div>
      <pre tabIndex={0} aria-label={name}>
        {text}
      </pre>
    </details>
  );
}
