import { type FormEvent, useId, useState } from "react";

import { ms, percent } from "../format";
import type { Answer, Bound, Optimise, SizeChoices, Work } from "../report";
import { useWords } from "../words";
import type { Session, Shown } from "./session";
import { fill } from "./words";

const OPTIMISE_S = 60;
const ASK_S = 30;
const MOST_S = 86_400;

/** Looking for a better plan, and asking why it is not another one. */
export function Search({ session, shown }: { session: Session; shown: Shown }) {
  const { bound, sizes, answers } = shown.studio!;
  return (
    <>
      {bound && <Bounds bound={bound} />}
      <OptimiseForm session={session} busy={shown.work !== null} />
      <WhyNotForm session={session} busy={shown.work !== null} sizes={sizes} />
      <Answers answers={answers} />
    </>
  );
}

function Bounds({ bound }: { bound: Bound }) {
  const words = useWords();
  const rows: [string, number | null, number | null][] = [
    [words("ofStrategy"), bound.strategy_bound_ms, bound.strategy_gap_fraction],
    [words("ofSpace"), bound.lower_bound_ms, bound.gap_fraction],
  ];
  return (
    <dl className="figures">
      {rows.map(
        ([of, lowest, gap]) =>
          lowest !== null && (
            <div key={of}>
              <dt>
                {words("boundOf")}, {of}
              </dt>
              <dd>
                {ms(lowest)}
                {gap !== null && `, ${words("gap")} ${percent(gap, 3)}`}
              </dd>
            </div>
          ),
      )}
    </dl>
  );
}

function OptimiseForm({ session, busy }: { session: Session; busy: boolean }) {
  const words = useWords();
  const [scope, setScope] = useState<Optimise["scope"]>("strategy");
  const [limit, setLimit] = useState(String(OPTIMISE_S));
  const submit = (event: FormEvent) => {
    event.preventDefault();
    void session.optimise(scope, Number(limit));
  };
  return (
    <form className="fields" onSubmit={submit} aria-label={words("optimise")}>
      <h3>{words("optimise")}</h3>
      <label>
        <span>{words("scope")}</span>
        <select value={scope} onChange={(event) => setScope(event.target.value as Optimise["scope"])}>
          <option value="strategy">{words("scopeStrategy")}</option>
          <option value="space">{words("scopeSpace")}</option>
        </select>
      </label>
      <label>
        <span>{words("limitSeconds")}</span>
        <input
          type="number"
          required
          min={1}
          max={MOST_S}
          value={limit}
          onChange={(event) => setLimit(event.target.value)}
        />
      </label>
      <button type="submit" disabled={busy}>
        {words("start")}
      </button>
    </form>
  );
}

function WhyNotForm({ session, busy, sizes }: { session: Session; busy: boolean; sizes: SizeChoices[] }) {
  const words = useWords();
  const [wish, setWish] = useState("");
  const field = useId();
  const parts = wishes(wish);
  const submit = (event: FormEvent) => {
    event.preventDefault();
    void session.whyNot(wish.trim(), ASK_S);
  };
  const choose = (name: string, value: string) => {
    const next = new Map(parts);
    if (value) next.set(name, value);
    else next.delete(name);
    setWish([...next].map(([key, of]) => `${key}=${of}`).join(","));
  };
  return (
    <form className="fields" onSubmit={submit} aria-label={words("whyNot")}>
      <h3>{words("whyNot")}</h3>
      {sizes.map(({ name, choices }) => (
        <label key={name}>
          <span>{name}</span>
          <select value={parts.get(name) ?? ""} onChange={(event) => choose(name, event.target.value)}>
            <option value="">{words("any")}</option>
            {choices.map((one) => (
              <option key={String(one)} value={String(one)}>
                {String(one)}
              </option>
            ))}
          </select>
        </label>
      ))}
      <label htmlFor={field}>
        <span>{words("wish")}</span>
        <input
          id={field}
          type="text"
          required
          maxLength={200}
          value={wish}
          onChange={(event) => setWish(event.target.value)}
        />
      </label>
      <button type="submit" disabled={busy || !wish.trim()}>
        {words("ask")}
      </button>
    </form>
  );
}

/** The sizes that a wish such as `PP=8,TP=4` names. */
function wishes(wish: string): Map<string, string> {
  const pairs = wish.split(",").map((part) => part.split("=").map((side) => side.trim()));
  return new Map(pairs.filter((pair): pair is [string, string] => pair.length === 2));
}

function Answers({ answers }: { answers: Answer[] }) {
  const words = useWords();
  if (!answers.length) return null;
  return (
    <section aria-label={words("answers")}>
      <h3>{words("answers")}</h3>
      {answers.toReversed().map((answer, index) => (
        <div key={answers.length - index} className="answer">
          <p>
            <b>{answer.question}</b>
            {answer.step_ms !== null && ` (${words("best")} ${ms(answer.step_ms)})`}
          </p>
          {answer.words.map((line, place) => (
            <p key={place}>{line}</p>
          ))}
        </div>
      ))}
    </section>
  );
}

/** How far the work in the background is. */
export function Progress({ work, session }: { work: Work; session: Session }) {
  const words = useWords();
  const figures = [
    work.best_ms !== null && `${words("bestSoFar")} ${ms(work.best_ms)}`,
    work.lower_bound_ms !== null && `${words("boundOf")} ${ms(work.lower_bound_ms)}`,
    typeof work.gap_fraction === "number" && `${words("gap")} ${percent(work.gap_fraction, 3)}`,
    fill(words("ofSeconds"), work.elapsed_s.toFixed(0), work.limit_s.toFixed(0)),
  ];
  return (
    <div className="controls work">
      <b>{work.title}</b>
      <progress value={work.done_fraction} max={1} aria-label={work.title} />
      <span>{work.line}</span>
      <span className="quiet">{figures.filter(Boolean).join("; ")}</span>
      <button type="button" onClick={() => void session.cancel()}>
        {words("cancel")}
      </button>
    </div>
  );
}
