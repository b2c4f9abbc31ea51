import { gib, ms, percent, signed } from "../format";
import type { Difference, PlanPage, Report } from "../report";
import { useWords, type Word } from "../words";
import { Section, Wide } from "./Section";
import { Sourced } from "./Sourced";
import { SpreadView } from "./SpreadView";

interface Props {
  report: Report;
  plan: PlanPage;
  chosen: number;
  choose: (index: number) => void;
  /** Of the first plan to others, by name. */
  differences?: Difference[];
}

/** What a colleague asks first: how fast, how far from the best, how sure, and whether it fits. */
export function Verdict({ report, plan, chosen, choose, differences }: Props) {
  const words = useWords();
  const { search } = report;
  const figures: [Word, string][] = [
    ["step", ms(plan.step_ms)],
    ["throughput", plan.throughput_tokens_per_s.toFixed(1)],
    ["bubble", percent(plan.bubble_fraction)],
    ["oom", percent(plan.oom_probability)],
  ];
  if (plan.low_step_ms !== null && plan.high_step_ms !== null)
    figures.splice(1, 0, ["expected", `${ms(plan.low_step_ms)} – ${ms(plan.high_step_ms)}`]);
  if (search) {
    figures.push(["bound", ms(search.lower_bound_ms)]);
    figures.push(["gap", `${percent(search.gap_fraction, 3)}, ${words(search.proven ? "proven" : "notProven")}`]);
  }
  const provenance = { ...plan.provenance, ...search?.provenance };
  return (
    <Section view="verdict">
      <p className="strategy">
        <b>{plan.strategy}</b>{" "}
        <span className={plan.fits ? "good" : "bad"}>{words(plan.fits ? "fits" : "doesNotFit")}</span>
      </p>
      <dl className="figures">
        {figures.map(([name, value]) => (
          <div key={name}>
            <dt>{words(name)}</dt>
            <dd>
              <Sourced from={[name === "oom" ? plan.chance : undefined, provenance[name]]}>{value}</Sourced>
            </dd>
          </div>
        ))}
      </dl>
      {search?.verdict.map((line) => (
        <p key={line}>{line}</p>
      ))}
      {plan.spread && <SpreadView spread={plan.spread} />}
      {report.plans.length > 1 && (
        <PlansTable plans={report.plans} chosen={chosen} choose={choose} differences={differences} />
      )}
      <Sentences heading={words("warnings")} lines={[...new Set([...report.warnings, ...plan.warnings])]} />
      <Sentences heading={words("unstated")} lines={plan.unstated.map((one) => one.words)} />
    </Section>
  );
}

function PlansTable({ plans, chosen, choose, differences }: Omit<Props, "report" | "plan"> & { plans: PlanPage[] }) {
  const words = useWords();
  return (
    <>
      <h3>{words("plans")}</h3>
      <Wide label={words("plans")}>
        <thead>
          <tr>
            <th scope="col">{words("plan")}</th>
            <th scope="col">{words("strategies")}</th>
            <th scope="col">{words("step")}</th>
            {differences && <th scope="col">{words("difference")}</th>}
            <th scope="col">{words("bubble")}</th>
            <th scope="col">{words("peak")}</th>
            <th scope="col">{words("oom")}</th>
          </tr>
        </thead>
        <tbody>
          {plans.map((one, index) => (
            <tr key={one.name} className={index === chosen ? "chosen" : undefined}>
              <td>
                <button type="button" onClick={() => choose(index)} aria-pressed={index === chosen}>
                  {one.name}
                </button>
              </td>
              <td>{one.strategy}</td>
              <td className="number">
                <Sourced from={[one.provenance.step]}>{ms(one.step_ms)}</Sourced>
              </td>
              {differences && <td className="number">{against(differences.find((of) => of.name === one.name))}</td>}
              <td className="number">
                <Sourced from={[one.provenance.bubble]}>{percent(one.bubble_fraction)}</Sourced>
              </td>
              <td className="number">
                <Sourced from={[one.provenance.peak]}>
                  {gib(Math.max(...one.stages.map((stage) => stage.peak_bytes)))}
                </Sourced>
              </td>
              <td className="number">
                <Sourced from={[one.chance, one.provenance.oom]}>{percent(one.oom_probability)}</Sourced>
              </td>
            </tr>
          ))}
        </tbody>
      </Wide>
    </>
  );
}

/** `+12.00 ms, +1.4 %, +0.20 GiB`: what the first plan takes more. */
function against(difference: Difference | undefined): string {
  if (!difference) return "";
  const { step_ms, step_fraction, peak_bytes } = difference;
  return `${signed(step_ms, ms)}, ${signed(step_fraction, percent)}, ${signed(peak_bytes, gib)}`;
}

function Sentences({ heading, lines }: { heading: string; lines: string[] }) {
  if (!lines.length) return null;
  return (
    <>
      <h3>{heading}</h3>
      <ul>
        {lines.map((line) => (
          <li key={line}>{line}</li>
        ))}
      </ul>
    </>
  );
}
