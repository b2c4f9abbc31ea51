/** Colours of both themes; pairs that lie side by side differ in lightness too, for those who do not tell hues apart. */
import type { Theme } from "./App";

export interface Palette {
  forward: string;
  backward: string;
  recompute: string;
  encoders: string;
  tail: string;
  idle: string;
  transfer: string;
  imbalance: string;
  path: string;
  text: string;
  line: string;
  surface: string;
  series: string[];
}

export const PALETTES: Record<Theme, Palette> = {
  light: {
    forward: "#4c78a8",
    backward: "#f2a65a",
    recompute: "#c03d3e",
    encoders: "#3f8f4f",
    tail: "#5ba39d",
    idle: "#ececec",
    transfer: "#cdb4e6",
    imbalance: "#f5e29a",
    path: "#101010",
    text: "#1c1c1c",
    line: "#c9c9c9",
    surface: "#ffffff",
    series: [
      "#4c78a8",
      "#f2a65a",
      "#5ba39d",
      "#c03d3e",
      "#8e6bb0",
      "#7a7a7a",
      "#b5a13a",
      "#3f8f4f",
      "#c77f9f",
      "#59677a",
    ],
  },
  dark: {
    forward: "#5f94cc",
    backward: "#d98b3a",
    recompute: "#e05c5c",
    encoders: "#62b873",
    tail: "#6cc0b9",
    idle: "#2b2d31",
    transfer: "#5d4380",
    imbalance: "#5c5020",
    path: "#ffffff",
    text: "#e8e8e8",
    line: "#4a4d52",
    surface: "#17181b",
    series: [
      "#5f94cc",
      "#d98b3a",
      "#6cc0b9",
      "#e05c5c",
      "#a98acb",
      "#a0a0a0",
      "#cdbb57",
      "#62b873",
      "#dc9ab8",
      "#8292a8",
    ],
  },
};

/** `#rrggbb` as red, green and blue. */
export function channels(colour: string): [number, number, number] {
  const value = Number.parseInt(colour.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}
