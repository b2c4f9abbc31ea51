import { useDeferredValue, useMemo, useState } from "react";

import type { Theme } from "../App";
import { Chart } from "../Chart";
import { PALETTES } from "../colours";
import { count, gib, ms } from "../format";
import type { Search, Strategies as Columns } from "../report";
import { useWords } from "../words";
import { Section, Wide } from "./Section";

const AT_ONCE = 50;
const GIB = 2 ** 30;

interface Props {
  search: Pick<Search, "strategies"> | null;
  theme: Theme;
  /** What a row's button does, where it has one. */
  take?: (strategies: Columns, index: number) => void;
}

/** Every strategy of the space: what became of it, and why. */
export function Strategies({ search, theme, take }: Props) {
  const words = useWords();
  return (
    <Section view="strategies">
      {search ? <Space found={search.strategies} theme={theme} take={take} /> : <p>{words("noSearch")}</p>}
    </Section>
  );
}

function Space({ found, theme, take }: Omit<Props, "search"> & { found: Columns }) {
  const words = useWords();
  const [text, setText] = useState("");
  const [statuses, setStatuses] = useState<Set<string>>(() => new Set(found.statuses));
  const [rows, setRows] = useState(AT_ONCE);
  const wanted = useDeferredValue(text);
  const counts = useMemo(
    () => found.statuses.map((_, place) => found.status.filter((one) => one === place).length),
    [found],
  );
  const names = useMemo(() => found.status.map((_, index) => nameOf(found, index)), [found]);

  const shown = useMemo(() => {
    const parts = wanted.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const isName = names.includes(wanted);
    const matches = (index: number) => {
      if (!statuses.has(found.statuses[found.status[index]])) return false;
      if (isName) return names[index] === wanted;
      const name = `${names[index].toLowerCase()} `;
      const reason = found.reasons[found.reason[index]].toLowerCase();
      return parts.every((part) =>
        part.includes("=") ? name.includes(`${part} `) : name.includes(part) || reason.includes(part),
      );
    };
    const rank = (index: number) => found.step_ms[index] ?? found.bound_ms[index] ?? Number.POSITIVE_INFINITY;
    return [...found.status.keys()].filter(matches).sort((one, other) => rank(one) - rank(other));
  }, [found, names, wanted, statuses]);

  const option = useMemo(() => {
    const palette = PALETTES[theme];
    const limits = found.limit_bytes.map((bytes) => bytes / GIB);
    const peaks = found.peak_bytes.filter((bytes) => bytes !== null).map((bytes) => bytes / GIB);
    const steps = found.bound_ms.map((bound, index) => found.step_ms[index] ?? bound).filter((one) => one !== null);
    const least = steps.reduce((low, one) => Math.min(low, one), Number.POSITIVE_INFINITY);
    const most = steps.reduce((high, one) => Math.max(high, one), 0);
    const edge = Math.floor(0.9 * Math.min(...limits, ...peaks));
    const inside = new Set(shown);
    const of = (status: string) =>
      [...found.status.keys()]
        .filter((index) => found.statuses[found.status[index]] === status && found.bound_ms[index] !== null)
        .map((index) => ({
          name: names[index],
          value: [found.step_ms[index] ?? found.bound_ms[index]!, (found.peak_bytes[index] ?? edge * GIB) / GIB],
          symbol: found.peak_bytes[index] === null ? "triangle" : "circle",
          itemStyle: { opacity: inside.has(index) ? 0.9 : 0.12 },
          words:
            found.peak_bytes[index] === null
              ? `${words("boundOf")} ${ms(found.bound_ms[index]!)}, ${words("notPlaced")}`
              : `${words("step")} ${ms(found.step_ms[index]!)}, ${words("peak")} ${gib(found.peak_bytes[index])}`,
        }));
    return {
      color: palette.series,
      tooltip: {
        renderMode: "richText",
        formatter: (one: { data: { name: string; words: string } }) => `${one.data.name}\n${one.data.words}`,
      },
      legend: { top: 0 },
      grid: { left: 72, right: 16, top: 36, bottom: 56 },
      xAxis: {
        type: "log",
        logBase: 2,
        min: 0.95 * least,
        max: 1.05 * most,
        name: words("step"),
        nameLocation: "middle",
        nameGap: 28,
        axisLabel: { formatter: ms, hideOverlap: true },
      },
      yAxis: {
        type: "value",
        name: `${words("peak")}, GiB`,
        min: edge,
        max: Math.ceil(1.02 * Math.max(...limits, ...peaks)),
      },
      series: found.statuses.map((status, place) => ({
        type: "scatter",
        name: status,
        symbolSize: 8,
        data: of(status),
        ...(place === 0 && {
          markLine: {
            symbol: "none",
            silent: true,
            label: { formatter: words("limit"), position: "insideStartTop" },
            lineStyle: { color: palette.text },
            data: limits.map((yAxis) => ({ yAxis })),
          },
        }),
      })),
    };
  }, [found, names, shown, theme, words("step")]);

  return (
    <>
      <p>{words("chart")}</p>
      <Chart
        option={option}
        theme={theme}
        height={320}
        label={words("chart")}
        onClick={(name) => setText((now) => (now === name ? "" : name))}
      />
      <div className="controls">
        <label className="grow">
          {words("filter")}
          <input type="search" value={text} onChange={(event) => setText(event.target.value)} />
        </label>
        <fieldset>
          <legend>{words("status")}</legend>
          {found.statuses.map((status, place) => (
            <label key={status}>
              <input
                type="checkbox"
                checked={statuses.has(status)}
                onChange={() => setStatuses((now) => toggled(now, status))}
              />{" "}
              {status} ({count(counts[place])})
            </label>
          ))}
        </fieldset>
      </div>
      <p aria-live="polite">
        {count(shown.length)} / {count(found.status.length)}
      </p>
      <Wide label={words("strategies")}>
        <thead>
          <tr>
            {take && <th scope="col">{words("strategies")}</th>}
            {Object.keys(found.sizes).map((size) => (
              <th key={size} scope="col">
                {size}
              </th>
            ))}
            <th scope="col">{words("status")}</th>
            <th scope="col">{words("boundOf")}</th>
            <th scope="col">{words("step")}</th>
            <th scope="col">{words("peak")}</th>
            <th scope="col">{words("reason")}</th>
          </tr>
        </thead>
        <tbody>
          {shown.slice(0, rows).map((index) => (
            <tr key={index}>
              {take && (
                <td>
                  <button type="button" title={names[index]} onClick={() => take(found, index)}>
                    {words("takeStrategy")}
                  </button>
                </td>
              )}
              {Object.values(found.sizes).map((column, place) => (
                <td key={place} className="number">
                  {String(column[index])}
                </td>
              ))}
              <td>{found.statuses[found.status[index]]}</td>
              <td className="number">{found.bound_ms[index] === null ? "" : ms(found.bound_ms[index])}</td>
              <td className="number">{found.step_ms[index] === null ? "" : ms(found.step_ms[index])}</td>
              <td className="number">{found.peak_bytes[index] === null ? "" : gib(found.peak_bytes[index])}</td>
              <td className="reason">{found.reasons[found.reason[index]]}</td>
            </tr>
          ))}
        </tbody>
      </Wide>
      {rows < shown.length && (
        <button type="button" onClick={() => setRows(rows + 4 * AT_ONCE)}>
          {words("more")}
        </button>
      )}
    </>
  );
}

function toggled(of: Set<string>, one: string): Set<string> {
  const now = new Set(of);
  if (!now.delete(one)) now.add(one);
  return now;
}

/** `PP=2 TP=8 … 1f1b`. */
function nameOf(found: Columns, index: number): string {
  const sizes = Object.entries(found.sizes).map(([name, column]) => `${name}=${column[index]}`);
  return [...sizes.filter((one) => !one.endsWith("=")), found.schedule[index]].join(" ");
}
