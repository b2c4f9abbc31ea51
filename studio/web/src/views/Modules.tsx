import { gib, ms } from "../format";
import type { ModuleShare } from "../report";
import { useWords } from "../words";
import { Wide } from "./Section";

const SIZES = ["PP", "TP", "CP", "DP", "MBS"];

/** What each encoder of a layout, and its decoder, take of the stages: a row each. */
export function Modules({ modules }: { modules: ModuleShare[] }) {
  const words = useWords();
  return (
    <>
      <h3>{words("moduleTakes")}</h3>
      <Wide label={words("moduleTakes")}>
        <thead>
          <tr>
            <th scope="col">{words("module")}</th>
            <th scope="col">{words("runs")}</th>
            {SIZES.map((size) => (
              <th key={size} scope="col">
                {size}
              </th>
            ))}
            <th scope="col">{words("work")}</th>
            <th scope="col">{words("mostWork")}</th>
            <th scope="col">{words("holds")}</th>
            <th scope="col">{words("keeps")}</th>
          </tr>
        </thead>
        <tbody>
          {modules.map((one) => (
            <tr key={one.name}>
              <th scope="row">{one.name}</th>
              <td>{one.runs}</td>
              {SIZES.map((size) => (
                <td key={size} className="number">
                  {one.sizes[size]}
                </td>
              ))}
              <td className="number">{ms(one.work_ms.reduce((sum, each) => sum + each, 0) / one.work_ms.length)}</td>
              <td className="number">{ms(Math.max(...one.work_ms))}</td>
              <td className="number">{gib(Math.max(...one.held_bytes))}</td>
              <td className="number">{gib(Math.max(...one.kept_bytes))}</td>
            </tr>
          ))}
        </tbody>
      </Wide>
    </>
  );
}
