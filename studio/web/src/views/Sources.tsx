import { ms, percent } from "../format";
import type { PlanPage, Report } from "../report";
import { useWords } from "../words";
import { Section, Wide } from "./Section";

/** Where times and bytes come from, and which of them the step and the plans' order hang on. */
export function Sources({ report, plan }: { report: Report; plan: PlanPage }) {
  const words = useWords();
  const found = report.sources;
  return (
    <Section view="sources">
      <p>{plan.calibration}</p>
      <Wide label={words("block")}>
        <thead>
          <tr>
            <th scope="col">{words("block")}</th>
            <th scope="col">{words("timeSource")}</th>
            <th scope="col">{words("memorySource")}</th>
          </tr>
        </thead>
        <tbody>
          {plan.sources.map((one) => (
            <tr key={one.block}>
              <th scope="row">{one.block}</th>
              <td>{one.time}</td>
              <td>{one.memory}</td>
            </tr>
          ))}
        </tbody>
      </Wide>
      {found && (
        <Wide label={words("source")}>
          <thead>
            <tr>
              <th scope="col">{words("source")}</th>
              <th scope="col">{words("timeSource")}</th>
              <th scope="col">{words("error")}</th>
              {report.plans.map((one) => (
                <th key={one.name} scope="col">
                  {one.name}: {words("share")}
                </th>
              ))}
              <th scope="col">
                {words("between")} {percent(found.change_fraction, 0)}
              </th>
              <th scope="col">{words("flips")}</th>
            </tr>
          </thead>
          <tbody>
            {found.rows.map((one) => (
              <tr key={one.name}>
                <th scope="row">{one.name}</th>
                <td>{one.source}</td>
                <td className="number">{percent(one.error_fraction)}</td>
                {one.plans.map((share, index) => (
                  <td key={index} className="number">
                    {percent(share.share_fraction)}
                  </td>
                ))}
                <td className="number">
                  {ms(one.plans[0].low_step_ms)} – {ms(one.plans[0].high_step_ms)}
                </td>
                <td>{one.flips}</td>
              </tr>
            ))}
          </tbody>
        </Wide>
      )}
      {found?.notes.map((note) => (
        <p key={note}>{note}</p>
      ))}
    </Section>
  );
}
