import { type FormEvent, useId, useState } from "react";

import type { Studio } from "../report";
import { useWords } from "../words";
import type { Action } from "./session";

interface Props {
  studio: Studio;
  act: (action: Action) => Promise<void>;
}

/** Plans that are kept beside the one that is changed. */
export function Pins({ studio, act }: Props) {
  const words = useWords();
  const { pins } = studio;
  const field = useId();
  const [name, setName] = useState("");
  const next = "ABCDEFGHIJKLMNOPQRSTUVWXYZ".split("").find((letter) => !pins.includes(letter)) ?? "";
  const submit = (event: FormEvent) => {
    event.preventDefault();
    void act({ kind: "pin", name: name.trim() || next });
    setName("");
  };
  return (
    <>
      <form className="fields" onSubmit={submit} aria-label={words("pin")}>
        <label htmlFor={field}>
          <span>{words("pinName")}</span>
          <input
            id={field}
            type="text"
            maxLength={200}
            placeholder={next}
            value={name}
            onChange={(event) => setName(event.target.value)}
          />
        </label>
        <button type="submit">{words("pin")}</button>
      </form>
      <p className="quiet">{words(pins.length ? "pinsHelp" : "noPins")}</p>
      <ul className="pins">
        {pins.map((pin) => (
          <li key={pin}>
            <span>{pin}</span>
            <button
              type="button"
              aria-label={`${words("take")}: ${pin}`}
              onClick={() => void act({ kind: "take", name: pin })}
            >
              {words("take")}
            </button>
            <button
              type="button"
              aria-label={`${words("unpin")}: ${pin}`}
              onClick={() => void act({ kind: "unpin", name: pin })}
            >
              {words("unpin")}
            </button>
          </li>
        ))}
      </ul>
    </>
  );
}
