/** `now`, in which every part that says the same as in `then` is that part of `then`: what did not change stays one object. */
export function keep<T>(then: T, now: T): T {
  if (Object.is(then, now) || !isBranch(then) || !isBranch(now) || Array.isArray(then) !== Array.isArray(now))
    return now;
  const before = then as Record<string, unknown>;
  const after = now as Record<string, unknown>;
  const keys = Object.keys(after);
  let same = keys.length === Object.keys(before).length;
  for (const key of keys) {
    after[key] = keep(before[key], after[key]);
    same &&= Object.is(before[key], after[key]) && Object.hasOwn(before, key);
  }
  return same ? then : now;
}

function isBranch(value: unknown): value is object {
  return typeof value === "object" && value !== null;
}
