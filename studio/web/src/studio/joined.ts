import type { Action } from "./session";

/** One action that does what `first` and then `next` would; null where there is none. */
export function joined(first: Action, next: Action): Action | null {
  if (first.kind === "move" && next.kind === "move" && first.modality === next.modality) {
    if (first.source === next.source && first.target === next.target)
      return { ...next, count: first.count + next.count };
    if (first.source === next.target && first.target === next.source && first.count !== next.count)
      return first.count > next.count
        ? { ...first, count: first.count - next.count }
        : { ...next, count: next.count - first.count };
  }
  if (first.kind === "mode" && next.kind === "mode")
    return first.modality === next.modality && first.stage === next.stage && first.mode === next.mode ? next : null;
  if (first.kind === "order" && next.kind === "order") return first.stage === next.stage ? next : null;
  if (first.kind === "sizes" && next.kind === "sizes") return { ...next, sizes: { ...first.sizes, ...next.sizes } };
  if (first.kind === "knobs" && next.kind === "knobs") return { ...next, values: { ...first.values, ...next.values } };
  return null;
}
