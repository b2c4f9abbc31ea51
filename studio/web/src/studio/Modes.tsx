import { gib } from "../format";
import type { PlanPage, Studio } from "../report";
import { useWords } from "../words";
import { Wide } from "../views/Section";
import { Stepper } from "./fields";
import type { Action } from "./session";
import { fill, saidOf } from "./words";

interface Props {
  plan: PlanPage;
  modes: Studio["modes"];
  act: (action: Action) => Promise<void>;
}

/** How many layers of every stage run in which mode, to be stepped; above them what the stages hold. */
export function Modes({ plan, modes, act }: Props) {
  const words = useWords();
  const numStages = plan.stages.length;
  const rows = Object.entries(modes).flatMap(([modality, of]) =>
    of.flatMap((mode) =>
      (plan.stages[0].layers[modality] ?? []).map((_, chunk, chunks) => ({
        modality,
        mode,
        chunk,
        name: `${modality}, ${saidOf(`mode ${mode}`, mode, words)}${chunks.length > 1 ? `, ${words("chunk")} ${chunk}` : ""}`,
      })),
    ),
  );
  if (!rows.length) return <p>{words("noModes")}</p>;
  return (
    <>
      <p className="quiet">{words("modesHelp")}</p>
      <Wide label={words("tabModes")}>
        <thead>
          <tr>
            <th scope="col">{words("stage")}</th>
            {plan.stages.map((_, stage) => (
              <th key={stage} scope="col" className="number">
                {stage}
              </th>
            ))}
          </tr>
          <tr>
            <th scope="row">{words("peak")}</th>
            {plan.stages.map((stage, index) => (
              <td key={index} className={stage.peak_bytes > stage.limit_bytes ? "number bad" : "number"}>
                {gib(stage.peak_bytes)}
              </td>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map(({ modality, mode, chunk, name }) => (
            <tr key={name}>
              <th scope="row">{name}</th>
              {plan.stages.map((stage, index) => (
                <td key={index} className="number">
                  <Stepper
                    label={fill(words("modeOfStage"), fill(words("stageNumber"), index), name)}
                    value={stage.modes[modality]?.[mode]?.[chunk] ?? 0}
                    max={stage.layers[modality][chunk]}
                    commit={(count) => act({ kind: "mode", modality, stage: chunk * numStages + index, mode, count })}
                  />
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </Wide>
    </>
  );
}
