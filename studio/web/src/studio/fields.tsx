/** Fields that tell when a person has settled on a value, not at each letter or pixel on the way to it. */
import { type RefObject, useEffect, useRef, useState } from "react";

export type Value = string | number | boolean;

/** Calls `settled` when the field's value was changed for good: the browser's `change`, which React takes for `input`. */
function useSettled(field: RefObject<HTMLInputElement | null>, settled: () => void): void {
  const latest = useRef(settled);
  latest.current = settled;
  useEffect(() => {
    const element = field.current!;
    const listener = () => latest.current();
    element.addEventListener("change", listener);
    return () => element.removeEventListener("change", listener);
  }, [field]);
}

interface Settling {
  label: string;
  commit: (value: number) => Promise<void>;
}

/** A whole number; the arrow keys step it. Where `commit` ends without it, it shows `value` again. */
export function Stepper({ label, value, max, commit }: Settling & { value: number; max: number }) {
  const field = useRef<HTMLInputElement>(null);
  const known = useRef(value);
  const waiting = useRef(0);
  known.current = value;
  const reset = () => {
    if (waiting.current === 0 && field.current) field.current.value = String(known.current);
  };
  useEffect(reset, [value]);
  useSettled(field, () => {
    const wanted = field.current!.valueAsNumber;
    if (!Number.isInteger(wanted) || wanted < 0) return reset();
    if (wanted === known.current && waiting.current === 0) return;
    waiting.current++;
    void commit(wanted).finally(() => {
      waiting.current--;
      reset();
    });
  });
  return (
    <input
      ref={field}
      type="number"
      min={0}
      max={max}
      defaultValue={value}
      aria-label={label}
      title={label}
      data-settles=""
    />
  );
}

interface SliderProps extends Settling {
  value: number;
  low: number;
  high: number;
  whole: boolean;
  format: (value: number) => string;
}

/** More than this factor between its ends, and a slider is logarithmic. */
const WIDE = 4;

/** A figure between two ends; shows the figure that it stands on. */
export function Slider({ label, value, low, high, whole, format, commit }: SliderProps) {
  const field = useRef<HTMLInputElement>(null);
  const [place, setPlace] = useState<number | null>(null);
  const wide = low > 0 && high / low > WIDE;
  const placeOf = (figure: number) =>
    wide ? Math.log(figure / low) / Math.log(high / low) : (figure - low) / (high - low);
  const figureAt = (at: number) => {
    const figure = wide ? low * (high / low) ** at : low + at * (high - low);
    const round = whole ? Math.round(figure) : Number(figure.toPrecision(3));
    const next = whole && round === value && at !== placeOf(value) ? value + Math.sign(at - placeOf(value)) : round;
    return Math.min(high, Math.max(low, next));
  };
  const shown = place === null ? value : figureAt(place);
  useSettled(field, () => {
    const wanted = figureAt(field.current!.valueAsNumber);
    void commit(wanted).finally(() => setPlace(null));
  });
  return (
    <>
      <input
        ref={field}
        type="range"
        data-settles=""
        min={0}
        max={1}
        step="any"
        value={place ?? Math.min(1, Math.max(0, placeOf(value)))}
        aria-label={label}
        aria-valuetext={format(shown)}
        onChange={(event) => setPlace(event.target.valueAsNumber)}
      />
      <output>{format(shown)}</output>
    </>
  );
}

interface ChoiceProps {
  label: string;
  value: Value;
  choices: readonly Value[];
  format?: (value: Value) => string;
  commit: (value: Value) => void;
}

/** One of some values; what it stands on is among them even where the choices have changed. */
export function Choice({ label, value, choices, format = String, commit }: ChoiceProps) {
  const all = choices.includes(value) ? choices : [value, ...choices];
  return (
    <select
      aria-label={label}
      value={all.indexOf(value)}
      disabled={all.length < 2}
      onChange={(event) => commit(all[Number(event.target.value)])}
    >
      {all.map((one, index) => (
        <option key={index} value={index}>
          {format(one)}
        </option>
      ))}
    </select>
  );
}
