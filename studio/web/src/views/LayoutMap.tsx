import { bytes, ms } from "../format";
import type { Layout, Module } from "../report";
import { useWords, type Word } from "../words";

const BOX = 116;
const GAP = 10;
const LINE = 16;
const BETWEEN = 72;

/** Encoder and decoder as rows of replicas, each with the ranks of its stages, and who exchanges features with whom. */
export function LayoutMap({ layout }: { layout: Layout }) {
  const words = useWords();
  const { encoder, decoder } = layout;
  const heights = [encoder, decoder].map((module) => LINE * (module.replicas[0].length + 1) + 8);
  const tops = [LINE + 6, LINE + 6 + heights[0] + BETWEEN];
  const width = Math.max(480, (BOX + GAP) * Math.max(encoder.replicas.length, decoder.replicas.length));
  const each = words(({ micro_batch: "aMicroBatch", pass: "aPass", step: "aStep" } as const)[layout.per]);
  const back = layout.backward_ms > 0 ? `, ${ms(layout.backward_ms)} ${words("back")}` : "";
  const sentence = `${bytes(layout.size_bytes)} ${each}: ${ms(layout.forward_ms)} ${words("there")}${back}${layout.blocks ? `; ${words("bothWait")}` : ""}`;
  const heading = `${words("layout")}: ${encoder.name}, ${decoder.name}`;
  const middle = (module: Module, replica: number) =>
    (width / module.replicas.length) * replica + width / module.replicas.length / 2;
  return (
    <>
      <h3>{heading}</h3>
      <p>
        {layout.words}; {sentence}
      </p>
      <div className="wide" tabIndex={0} role="region" aria-label={heading}>
        <svg
          className="picture"
          width={width}
          height={tops[1] + heights[1] + 4}
          role="img"
          aria-label={`${title(encoder, words)}; ${title(decoder, words)}; ${sentence}`}
        >
          {layout.pairs.map(([from, to]) => (
            <line
              key={`${from} ${to}`}
              x1={middle(encoder, from)}
              y1={tops[0] + heights[0]}
              x2={middle(decoder, to)}
              y2={tops[1]}
            />
          ))}
          {[encoder, decoder].map((module, row) => (
            <g key={module.name}>
              <text className="title" x={0} y={tops[row] - 5}>
                {title(module, words)}
                {module.replicas.length < module.sizes.DP ? ` (${module.replicas.length} ${words("drawn")})` : ""}
              </text>
              {module.replicas.map((stages, replica) => (
                <g
                  key={replica}
                  transform={`translate(${middle(module, replica) - BOX / 2} ${tops[row]})`}
                  className={module.name === "text" ? "module" : "module vision"}
                >
                  <rect width={BOX} height={heights[row]} rx={4} />
                  <text x={6} y={LINE}>
                    {words("replica")} {replica}
                  </text>
                  {stages.map((ranks, stage) => (
                    <text key={stage} x={6} y={LINE * (stage + 2)}>
                      {stages.length > 1 ? `${words("stage")} ${module.first_stage + stage}: ` : ""}
                      {words("rank")} {ranks}
                    </text>
                  ))}
                </g>
              ))}
            </g>
          ))}
        </svg>
      </div>
    </>
  );
}

/** `vision, 32 layers: TP 2 DP 8`; of its sizes those above 1. */
function title({ name, num_layers, sizes }: Module, words: (word: Word) => string): string {
  const told = Object.entries(sizes).filter(([size, value]) => value > 1 || size === "DP");
  return `${name}, ${num_layers} ${words("ofLayers")}: ${told.map(([size, value]) => `${size} ${value}`).join(" ")}`;
}
