import type { ReactNode } from "react";

/** A figure, and under the pointer where it comes from. */
export function Sourced({ from, children }: { from: (string | undefined)[]; children: ReactNode }) {
  return <span title={from.filter(Boolean).join("; ") || undefined}>{children}</span>;
}
