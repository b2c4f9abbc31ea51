import { gib, ms, percent } from "../format";
import type { PlanPage, Stage } from "../report";
import { useWords } from "../words";
import { Section, Wide } from "./Section";
import { Sourced } from "./Sourced";

const CAUSES = [
  "forward",
  "backward",
  "recompute",
  "encoders",
  "idle_warmup",
  "idle_communication",
  "idle_imbalance",
  "idle_cooldown",
  "tail",
];

/** What each stage holds, and where its step goes. */
export function Stages({ plan }: { plan: PlanPage }) {
  const words = useWords();
  const modalities = Object.keys(plan.stages[0].layers);
  const causes = CAUSES.filter((one) => one !== "encoders" || plan.stages.some((stage) => stage.time_ms[one] > 0));
  const most = Math.max(...plan.stages.map((stage) => sum(Object.values(stage.layers).flat())), 1);
  return (
    <Section view="stages">
      <Wide label={words("stages")}>
        <thead>
          <tr>
            <th scope="col">{words("stage")}</th>
            <th scope="col">{words("layers")}</th>
            {causes.map((cause) => (
              <th key={cause} scope="col">
                {words(cause)}
              </th>
            ))}
            <th scope="col">{words("onPath")}</th>
            <th scope="col">{words("peak")}</th>
          </tr>
        </thead>
        <tbody>
          {plan.stages.map((stage, index) => (
            <tr key={index}>
              <th scope="row">{index}</th>
              <td>
                {modalities.map((modality) => (
                  <Layers key={modality} stage={stage} modality={modality} most={most} />
                ))}
              </td>
              {causes.map((cause) => (
                <td key={cause} className="number">
                  <Sourced from={[percent(stage.time_ms[cause] / plan.step_ms, 2), plan.provenance[cause]]}>
                    {ms(stage.time_ms[cause])}
                  </Sourced>
                </td>
              ))}
              <td className="number">
                <Sourced from={[plan.provenance.onPath]}>{ms(stage.path_ms)}</Sourced>
              </td>
              <td className={stage.peak_bytes > stage.limit_bytes ? "number bad" : "number"}>
                <Sourced from={[plan.provenance.peak]}>{gib(stage.peak_bytes)}</Sourced>
              </td>
            </tr>
          ))}
        </tbody>
      </Wide>
    </Section>
  );
}

/** A bar of the layers of one modality on a stage, chunk by chunk, and how many of them run in which mode. */
function Layers({ stage, modality, most }: { stage: Stage; modality: string; most: number }) {
  const words = useWords();
  const counts = stage.layers[modality];
  const modes = Object.entries(stage.modes[modality] ?? {}).map(([mode, of]) => `${of.join(" + ")} ${words(mode)}`);
  const total = sum(counts);
  return (
    <div className="layers">
      <span className={`bar ${modality}`} style={{ width: `${(total / most) * 6}rem` }} />
      <span>
        {modality} {counts.join(" + ")}
        {modes.length > 0 && ` (${words("modes")} ${modes.join(", ")})`}
      </span>
    </div>
  );
}

function sum(values: number[]): number {
  return values.reduce((total, value) => total + value, 0);
}
