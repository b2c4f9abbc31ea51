import { ms } from "../format";
import type { Spread } from "../report";
import { useWords } from "../words";

const WIDTH = 640;
const HEIGHT = 150;
const TOP = 64;
const FOOT = 18;
/** Room for what the last mark says. */
const LABEL = 170;

/** How many of the drawn batches take how long, and where mean, p95 and so on lie. */
export function SpreadView({ spread }: { spread: Spread }) {
  const words = useWords();
  const { low_ms, high_ms, counts } = spread;
  const most = Math.max(...counts);
  const bar = WIDTH / counts.length;
  const place = (value: number) => ((value - low_ms) / (high_ms - low_ms || 1)) * WIDTH;
  const marks = Object.entries(spread.marks_ms).sort(([, a], [, b]) => a - b);
  return (
    <>
      <h3>{words("spread")}</h3>
      <p>{spread.words}</p>
      <div className="wide" tabIndex={0} role="region" aria-label={words("spread")}>
        <svg
          className="picture"
          width={WIDTH + LABEL}
          height={TOP + HEIGHT + FOOT}
          role="img"
          aria-label={spread.words}
        >
          {counts.map((count, index) => (
            <rect
              key={index}
              className="batches"
              x={index * bar}
              y={TOP + HEIGHT * (1 - count / most)}
              width={Math.max(bar - 1, 1)}
              height={(HEIGHT * count) / most}
            >
              <title>{`${ms(low_ms + ((high_ms - low_ms) * index) / counts.length)}: ${count}`}</title>
            </rect>
          ))}
          {marks.map(([name, value], index) => {
            const x = Math.min(Math.max(place(value), 1), WIDTH - 1);
            const y = 12 * (index + 1);
            return (
              <g key={name} className="mark">
                <line x1={x} x2={x} y1={y - 8} y2={TOP + HEIGHT} />
                <text x={x + 4} y={y}>
                  {words(name)} {ms(value)}
                </text>
              </g>
            );
          })}
          <text x={0} y={TOP + HEIGHT + 14}>
            {ms(low_ms)}
          </text>
          <text x={WIDTH} y={TOP + HEIGHT + 14} textAnchor="end">
            {ms(high_ms)}
          </text>
        </svg>
      </div>
    </>
  );
}
