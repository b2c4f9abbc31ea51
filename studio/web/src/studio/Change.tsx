import { count, gib, rate } from "../format";
import type { Knob, Studio } from "../report";
import { useWords } from "../words";
import { Choice, Slider, type Value } from "./fields";
import type { Action } from "./session";
import { fill, saidOf } from "./words";

interface Props {
  studio: Studio;
  act: (action: Action) => Promise<void>;
}

/** The sizes of the strategy. */
export function Sizes({ studio, act }: Props) {
  const words = useWords();
  return (
    <>
      <div className="fields">
        {studio.sizes.map((size) => (
          <label key={size.name}>
            <span>{size.name}</span>
            <Choice
              label={size.name}
              value={size.value}
              choices={size.choices}
              commit={(value) => void act({ kind: "sizes", sizes: { [size.name]: value } })}
            />
          </label>
        ))}
      </div>
      <p className="quiet">{words("strategyHelp")}</p>
    </>
  );
}

/** What may be otherwise in the job. */
export function Knobs({ studio, act }: Props) {
  const words = useWords();
  const format = (unit: Knob["unit"]) => (value: Value) => figure(value, unit, words);
  const others = studio.knobs.filter((knob) => knob.value !== knob.given);
  const reset = (knobs: Knob[]) =>
    act({ kind: "knobs", values: Object.fromEntries(knobs.map((knob) => [knob.key, null])) });
  return (
    <>
      <div className="fields">
        {studio.knobs.map((knob) => {
          const commit = (value: Value) => act({ kind: "knobs", values: { [knob.key]: value } });
          const title = saidOf(knob.key, knob.title, words);
          return (
            <div key={knob.key} className={knob.value === knob.given ? "knob" : "knob otherwise"} title={knob.key}>
              <span>{title}</span>
              {knob.choices?.length || typeof knob.value !== "number" ? (
                <Choice
                  label={title}
                  value={knob.value}
                  choices={knob.choices ?? []}
                  format={format(knob.unit)}
                  commit={(value) => void commit(value)}
                />
              ) : (
                <Slider
                  label={title}
                  value={knob.value}
                  low={knob.low ?? knob.value}
                  high={knob.high ?? knob.value}
                  whole={knob.whole ?? false}
                  format={format(knob.unit)}
                  commit={commit}
                />
              )}
              <span className="quiet">{fill(words("given"), format(knob.unit)(knob.given))}</span>
              {knob.value !== knob.given && (
                <button type="button" aria-label={`${words("reset")}: ${title}`} onClick={() => void reset([knob])}>
                  {words("reset")}
                </button>
              )}
            </div>
          );
        })}
      </div>
      <p className="controls">
        <span className="quiet">{words("whatIfHelp")}</span>
        <button type="button" disabled={!others.length} onClick={() => void reset(others)}>
          {words("resetAll")}
        </button>
      </p>
    </>
  );
}

function figure(value: Value, unit: Knob["unit"], words: (word: string) => string): string {
  if (typeof value !== "number") return String(value);
  switch (unit) {
    case "bytes":
      return gib(value);
    case "bytes/s":
      return rate(value);
    case "tokens":
    case "samples":
      return `${count(value)} ${words(unit)}`;
    default:
      return count(Number(value.toPrecision(6)));
  }
}
