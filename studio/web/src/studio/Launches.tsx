import { type FormEvent, useEffect, useState } from "react";

import type { Finding, Findings } from "../report";
import { useWords } from "../words";
import type { Action, Session, Shown } from "./session";
import { fill } from "./words";

interface Props {
  session: Session;
  shown: Shown;
  act: (action: Action) => Promise<void>;
}

/** Launch files of the folder: read as a job, checked, and written to with the plan as it stands. */
export function Launches({ session, shown, act }: Props) {
  const words = useWords();
  useEffect(() => void session.fetchCatalog(), [session]);
  return (
    <>
      <p className="quiet">{words("launchHelp")}</p>
      <Read session={session} shown={shown} act={act} />
      {shown.findings && <Found found={shown.findings} />}
      {shown.studio?.report && <Write shown={shown} act={act} />}
    </>
  );
}

function Read({ session, shown, act }: Props) {
  const words = useWords();
  const [file, setFile] = useState("");
  const [device, setDevice] = useState("");
  const [world, setWorld] = useState("");
  const [tokens, setTokens] = useState("");
  const launch = () => ({
    file,
    device,
    world_size: world ? Number(world) : null,
    vocab_size: tokens ? Number(tokens) : null,
  });
  const submit = (event: FormEvent) => {
    event.preventDefault();
    void act({ kind: "import", ...launch() });
  };
  const numbers = [
    ["worldSize", world, setWorld],
    ["vocabSize", tokens, setTokens],
  ] as const;
  return (
    <form className="fields" onSubmit={submit} aria-label={words("launchFile")}>
      <Select label={words("launchFile")} value={file} choices={shown.catalog?.launches ?? []} choose={setFile} />
      <Select
        label={words("cluster.device")}
        value={device}
        choices={shown.catalog?.devices ?? []}
        choose={setDevice}
      />
      {numbers.map(([word, value, set]) => (
        <label key={word}>
          <span>{words(word)}</span>
          <input type="number" min={1} step={1} value={value} onChange={(event) => set(event.target.value)} />
        </label>
      ))}
      <button type="submit">{words("importLaunch")}</button>
      <button type="button" disabled={!file || !device} onClick={() => void session.lint(launch())}>
        {words("lintLaunch")}
      </button>
    </form>
  );
}

/** What is wrong or wasted in a launch file, in its order. */
function Found({ found }: { found: Findings }) {
  const words = useWords();
  if (!found.findings.length) return <p role="status">{fill(words("nothingFound"), found.file)}</p>;
  return (
    <section aria-label={fill(words("foundIn"), found.file)}>
      <h3>{fill(words("foundIn"), found.file)}</h3>
      <ul className="pins">
        {found.findings.map((one, index) => (
          <li key={index}>
            <b className={one.severity === "error" ? "bad" : undefined}>{words(`severity ${one.severity}`)}</b>
            <span>
              {where(one, words)}
              {one.message} <code>{one.rule}</code>
              {one.mend && (
                <>
                  <br />
                  {words("mend")}: <code>{one.mend}</code>
                </>
              )}
            </span>
          </li>
        ))}
      </ul>
    </section>
  );
}

function where(one: Finding, words: ReturnType<typeof useWords>): string {
  return one.line === null ? "" : `${fill(words("atLine"), one.line)}: `;
}

function Write({ shown, act }: Pick<Props, "shown" | "act">) {
  const words = useWords();
  const [framework, setFramework] = useState("");
  const [into, setInto] = useState("");
  const [out, setOut] = useState("exported");
  const [overwrite, setOverwrite] = useState(false);
  const submit = (event: FormEvent) => {
    event.preventDefault();
    void act({ kind: "export", framework, into, out, overwrite });
  };
  return (
    <form className="fields" onSubmit={submit} aria-label={words("exportPlan")}>
      <h3>{words("exportPlan")}</h3>
      <Select
        label={words("framework")}
        value={framework}
        choices={shown.catalog?.exporters ?? []}
        choose={setFramework}
      />
      <Select
        label={words("into")}
        value={into}
        choices={shown.catalog?.launches ?? []}
        choose={setInto}
        none={words("newFiles")}
      />
      <label>
        <span>{words("outFolder")}</span>
        <input required maxLength={200} value={out} onChange={(event) => setOut(event.target.value)} />
      </label>
      <label>
        <span>{words("overwrite")}</span>
        <input type="checkbox" checked={overwrite} onChange={(event) => setOverwrite(event.target.checked)} />
      </label>
      <button type="submit">{words("exportPlan")}</button>
    </form>
  );
}

interface SelectProps {
  label: string;
  value: string;
  choices: readonly string[];
  choose: (value: string) => void;
  /** What stands for no choice, where none may be taken. */
  none?: string;
}

function Select({ label, value, choices, choose, none }: SelectProps) {
  return (
    <label>
      <span>{label}</span>
      <select required={none === undefined} value={value} onChange={(event) => choose(event.target.value)}>
        <option value="">{none ?? ""}</option>
        {choices.map((one) => (
          <option key={one}>{one}</option>
        ))}
      </select>
    </label>
  );
}
