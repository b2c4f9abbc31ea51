import { StrictMode } from "react";
import { createRoot } from "react-dom/client";

import { App } from "./App";
import { readPage } from "./data";
import "./page.css";
import { StudioPage } from "./studio/StudioPage";

/** Draws the report that the page carries; without one it is the studio's, which asks its server. */
async function start(): Promise<void> {
  const report = document.getElementById("report");
  createRoot(document.getElementById("root")!).render(
    <StrictMode>{report ? <App page={await readPage(report.textContent!)} /> : <StudioPage />}</StrictMode>,
  );
}

void start();
