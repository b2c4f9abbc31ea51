/** Figures as people read them, in the units of the command line. */

export function ms(value: number): string {
  if (Math.abs(value) < 0.005) return "0.00 ms"; // rounding leaves some below 0
  if (Math.abs(value) >= 60_000) return `${(value / 1000).toFixed(1)} s`;
  if (Math.abs(value) >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return `${value.toFixed(value >= 100 ? 1 : 2)} ms`;
}

export function gib(bytes: number): string {
  return `${(bytes / 2 ** 30).toFixed(2)} GiB`;
}

/** In the largest unit of which there is at least one. */
export function bytes(value: number): string {
  if (value >= 2 ** 30) return gib(value);
  return value >= 2 ** 20 ? `${(value / 2 ** 20).toFixed(2)} MiB` : `${(value / 2 ** 10).toFixed(1)} KiB`;
}

export function percent(fraction: number, digits = 1): string {
  return `${(fraction * 100).toFixed(digits)} %`;
}

export function rate(bytesPerSecond: number): string {
  return `${(bytesPerSecond / 1e9).toFixed(1)} GB/s`;
}

export function count(value: number): string {
  return value.toLocaleString("en-US");
}

/** With its sign, `+` too. */
export function signed(value: number, format: (value: number) => string): string {
  return value > 0 ? `+${format(value)}` : format(value);
}
