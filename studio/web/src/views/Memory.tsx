import { useMemo, useState } from "react";

import type { Theme } from "../App";
import { Chart } from "../Chart";
import { PALETTES } from "../colours";
import type { Tasks } from "../data";
import { gib, ms } from "../format";
import type { PlanPage, Stage } from "../report";
import { useWords } from "../words";
import { Section } from "./Section";
import { Sourced } from "./Sourced";

const GIB = 2 ** 30;

/** What stages hold: at their peak by cause against the limit, and over the step. */
export function Memory({ plan, tasks, theme }: { plan: PlanPage; tasks: Tasks; theme: Theme }) {
  const words = useWords();
  const fullest = plan.stages.reduce((best, one, index, all) => (full(one) > full(all[best]) ? index : best), 0);
  const [chosen, setChosen] = useState<number | null>(null);
  const shown = chosen !== null && chosen < plan.stages.length ? chosen : fullest;
  const stage = plan.stages[shown];
  const palette = PALETTES[theme];
  const causes = Object.entries(stage.memory_bytes).filter(([, bytes]) => bytes > 0);

  const overTime = useMemo(() => {
    const tooltip = {
      trigger: "axis",
      renderMode: "richText",
      valueFormatter: (value: number) => `${value.toFixed(2)} GiB`,
    };
    return {
      color: [palette.series[0]],
      tooltip,
      grid: { left: 56, right: 16, top: 32, bottom: 56 },
      xAxis: { type: "value", min: 0, max: plan.step_ms, axisLabel: { formatter: ms, hideOverlap: true } },
      yAxis: {
        type: "value",
        name: "GiB",
        max: Math.ceil((Math.max(stage.limit_bytes, stage.peak_bytes) / GIB) * 1.05),
      },
      dataZoom: [{ type: "slider", height: 18, bottom: 8 }],
      series: [
        {
          type: "line",
          step: "end",
          showSymbol: false,
          sampling: "max",
          data: heldOverTime(tasks, shown),
          markLine: {
            symbol: "none",
            label: { formatter: words("limit"), position: "insideStartTop" },
            data: [{ yAxis: stage.limit_bytes / GIB }],
          },
        },
      ],
    };
  }, [plan, tasks, shown, theme, words("limit")]);

  const byCause = useMemo(
    () => ({
      color: palette.series,
      tooltip: {
        renderMode: "richText",
        formatter: (one: { data: { name: string; value: number; source: string } }) =>
          `${one.data.name}: ${gib(one.data.value)}\n${one.data.source}`,
        textStyle: { width: 360, overflow: "break" },
      },
      series: [
        {
          type: "treemap",
          roam: false,
          nodeClick: false,
          breadcrumb: { show: false },
          left: 0,
          top: 0,
          right: 0,
          bottom: 0,
          label: {
            formatter: (one: { name: string; value: number }) => `${one.name}\n${gib(one.value)}`,
            fontSize: 12,
            lineHeight: 16,
          },
          data: causes.map(([cause, bytes]) => ({
            name: words(cause),
            value: bytes,
            source: plan.provenance[cause] ?? "",
          })),
        },
      ],
    }),
    [plan, shown, theme, words("weight")],
  );

  return (
    <Section view="memory">
      <ul className="bars">
        {plan.stages.map((one, index) => (
          <li key={index}>
            <button type="button" onClick={() => setChosen(index)} aria-pressed={index === shown}>
              {words("stage")} {index}
            </button>
            <span className="bar-box">
              <span
                className={one.peak_bytes > one.limit_bytes ? "bar over" : "bar"}
                style={{ width: `${100 * Math.min(1, full(one))}%` }}
              />
            </span>
            <span className="number">
              <Sourced from={[plan.provenance.peak]}>{gib(one.peak_bytes)}</Sourced> /{" "}
              <Sourced from={[plan.provenance.limit]}>{gib(one.limit_bytes)}</Sourced>
            </span>
          </li>
        ))}
      </ul>
      <h3>
        {words("stage")} {shown}: {words("byCause")}
      </h3>
      <p>
        {words("device")}: <Sourced from={[plan.provenance.device]}>{gib(stage.device_peak_bytes)}</Sourced>{" "}
        {words("ofDevice")} {gib(stage.device_bytes)}
        {stage.host_bytes > 0 && `; host: ${gib(stage.host_bytes)}`}
        {stage.host_limit_bytes !== null && ` / ${gib(stage.host_limit_bytes)}`}
      </p>
      <Chart
        option={byCause}
        theme={theme}
        height={220}
        label={`${words("byCause")}: ${causes.map(([cause, bytes]) => `${words(cause)} ${gib(bytes)}`).join(", ")}`}
      />
      <h3>
        {words("stage")} {shown}: {words("overTime")}
      </h3>
      <Chart
        option={overTime}
        theme={theme}
        height={240}
        label={`${words("overTime")}, ${words("peak")} ${gib(stage.peak_bytes)}`}
      />
    </Section>
  );
}

function full(stage: Stage): number {
  return stage.peak_bytes / stage.limit_bytes;
}

/** Points (ms, GiB) of what `stage` holds: from the start of each forward on, and from the end of each backward. */
function heldOverTime(tasks: Tasks, stage: number): [number, number][] {
  const { timeline, start, end, kind, held } = tasks;
  const points: [number, number][] = [[0, timeline.held_first_bytes[stage] / GIB]];
  for (let task = timeline.first[stage]; task < timeline.first[stage + 1]; task++) {
    const at = timeline.kinds[kind[task]].backward ? end[task] : start[task];
    points.push([at * timeline.tick_ms, (held[task] * timeline.tick_bytes) / GIB]);
  }
  return points;
}
