import { useMemo, useState } from "react";

import type { Page } from "../data";
import { count, rate } from "../format";
import type { PlanPage } from "../report";
import { useWords } from "../words";
import { LayoutMap } from "./LayoutMap";
import { Modules } from "./Modules";
import { Section, Wide } from "./Section";
import { Sourced } from "./Sourced";

type Place = "stage" | "tp" | "cp" | "dp";

const PLACES: Place[] = ["stage", "tp", "cp", "dp"];
const MOST_NODES = 64;

/** Where modules, stages and groups lie on the nodes. */
export function Cluster({ page, plan }: { page: Page; plan: PlanPage }) {
  const words = useWords();
  const [by, setBy] = useState<Place>("stage");
  const [all, setAll] = useState(false);
  const { devices } = plan;
  const places = useMemo(
    () => Object.fromEntries(PLACES.map((place) => [place, page.numbers(devices[place])])),
    [page, devices],
  );
  const firsts = useMemo(() => devices.nodes.reduce((found, size) => [...found, found.at(-1)! + size], [0]), [devices]);
  const most = useMemo(() => Object.fromEntries(PLACES.map((place) => [place, 1 + largest(places[place])])), [places]);
  const nodes = all ? devices.nodes : devices.nodes.slice(0, MOST_NODES);
  return (
    <Section view="cluster">
      {plan.layout &&
        [plan.layout, ...(plan.layout.others ?? [])].map((each) => <LayoutMap key={each.encoder.name} layout={each} />)}
      {plan.modules.length > 0 && <Modules modules={plan.modules} />}
      <fieldset className="controls">
        <legend>{words("colourBy")}</legend>
        {PLACES.filter((place) => most[place] > 1 || place === "stage").map((place) => (
          <label key={place}>
            <input type="radio" name="place" checked={by === place} onChange={() => setBy(place)} />{" "}
            {place === "stage" ? words("stage") : place.toUpperCase()}
          </label>
        ))}
      </fieldset>
      <ol className="nodes">
        {nodes.map((size, node) => (
          <li key={node} title={`${words("node")} ${node}`}>
            <span className="node-name">{node}</span>
            {Array.from({ length: size }, (_, place) => {
              const rank = firsts[node] + place;
              return (
                <span
                  key={rank}
                  className="device"
                  title={`${words("rank")} ${rank}: ${PLACES.map((one) => `${one.toUpperCase()} ${places[one][rank]}`).join(", ")}`}
                  style={{ background: hue(places[by][rank], most[by]) }}
                >
                  {places[by][rank]}
                </span>
              );
            })}
          </li>
        ))}
      </ol>
      {nodes.length < devices.nodes.length && (
        <button type="button" onClick={() => setAll(true)}>
          {words("more")} ({count(devices.nodes.length - nodes.length)})
        </button>
      )}
      <Wide label={words("group")}>
        <thead>
          <tr>
            <th scope="col">{words("group")}</th>
            <th scope="col">{words("size")}</th>
            <th scope="col">{words("stride")}</th>
            <th scope="col">{words("level")}</th>
            <th scope="col">{words("bandwidth")}</th>
            <th scope="col">{words("number")}</th>
          </tr>
        </thead>
        <tbody>
          {plan.groups.map((one, index) => (
            <tr key={index}>
              <th scope="row">{one.name}</th>
              <td className="number">{one.size}</td>
              <td className="number">{one.stride}</td>
              <td>{one.level}</td>
              <td className="number">
                <Sourced from={[one.source]}>{rate(one.bandwidth_bytes_per_s)}</Sourced>
              </td>
              <td className="number">{count(one.num_groups)}</td>
            </tr>
          ))}
        </tbody>
      </Wide>
    </Section>
  );
}

function largest(values: Iterable<number>): number {
  let most = 0;
  for (const value of values) most = Math.max(most, value);
  return most;
}

/** Neighbouring places in unlike hues, light enough for dark figures. */
function hue(place: number, places: number): string {
  return `hsl(${Math.round((place * 360) / Math.max(places, 1))} 55% ${place % 2 ? 78 : 68}%)`;
}
