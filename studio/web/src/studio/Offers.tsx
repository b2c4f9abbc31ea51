import type { Studio } from "../report";
import { Text } from "../views/Files";
import { useWords } from "../words";
import { saidOf } from "./words";

/** The files that can be saved, and the command lines that do what was done here. */
export function Offers({ studio }: { studio: Studio }) {
  const words = useWords();
  return (
    <>
      {studio.files.length > 0 && <h3>{words("saveFiles")}</h3>}
      <ul className="pins">
        {studio.files.map((file) => (
          <li key={file.name}>
            <a href={`/files/${encodeURIComponent(file.name)}`} download={file.name}>
              {file.name}
            </a>
            <span className="quiet">{saidOf(file.name, file.title, words)}</span>
          </li>
        ))}
      </ul>
      {studio.commands.length > 0 && <Text name={words("commands")} text={studio.commands.join("\n")} />}
    </>
  );
}
