import { type FormEvent, useEffect, useState } from "react";

import type { Catalog, NewJob } from "../report";
import { useWords, type Word } from "../words";
import type { Action, Session } from "./session";

interface Props {
  session: Session;
  catalog: Catalog | null;
  act: (action: Action) => Promise<void>;
}

type Counts = Omit<NewJob, "kind" | "model" | "device">;

/** Each field with its least value, and what it begins with. */
const FIELDS: [keyof Counts, Word, number, string][] = [
  ["num_nodes", "cluster.num_nodes", 1, ""],
  ["devices_per_node", "devicesPerNode", 1, "8"],
  ["global_batch_size", "workload.global_batch_size", 1, ""],
  ["seq_length", "workload.seq_length", 1, ""],
  ["image_tokens_per_sample", "workload.image_tokens_per_sample", 0, "0"],
  ["images_per_sample", "workload.images_per_sample", 1, "1"],
];

/** Makes a job: a model of the catalog or a file of the folder, devices, and what a step is given. */
export function Wizard({ session, catalog, act }: Props) {
  const words = useWords();
  const [model, setModel] = useState("");
  const [device, setDevice] = useState("");
  const [counts, setCounts] = useState(() => Object.fromEntries(FIELDS.map(([name, , , first]) => [name, first])));
  useEffect(() => void session.fetchCatalog(), [session]);
  const submit = (event: FormEvent) => {
    event.preventDefault();
    const numbers = Object.fromEntries(FIELDS.map(([name]) => [name, Number(counts[name])])) as unknown as Counts;
    void act({ kind: "job", model, device, ...numbers });
  };
  return (
    <form className="fields" onSubmit={submit} aria-label={words("tabJob")}>
      <p className="quiet">{words("jobHelp")}</p>
      <label>
        <span>{words("model")}</span>
        <select required value={model} onChange={(event) => setModel(event.target.value)}>
          <option value="" />
          {(["configs", "models"] as const).map(
            (group) =>
              !!catalog?.[group].length && (
                <optgroup key={group} label={words(group)}>
                  {catalog[group].map((one) => (
                    <option key={one}>{one}</option>
                  ))}
                </optgroup>
              ),
          )}
        </select>
      </label>
      <label>
        <span>{words("cluster.device")}</span>
        <select required value={device} onChange={(event) => setDevice(event.target.value)}>
          <option value="" />
          {catalog?.devices.map((one) => (
            <option key={one}>{one}</option>
          ))}
        </select>
      </label>
      {FIELDS.map(([name, word, least]) => (
        <label key={name}>
          <span>{words(word)}</span>
          <input
            type="number"
            required
            min={least}
            step={1}
            value={counts[name]}
            onChange={(event) => setCounts({ ...counts, [name]: event.target.value })}
          />
        </label>
      ))}
      <button type="submit">{words("makeJob")}</button>
    </form>
  );
}
