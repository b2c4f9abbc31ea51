import { StrictMode } from "react";
import { createRoot } from "react-dom/client";

import { App } from "./App";
import { readPage } from "./data";
import "./page.css";

async function start(): Promise<void> {
  const page = await readPage(document.getElementById("report")!.textContent!);
  createRoot(document.getElementById("root")!).render(
    <StrictMode>
      <App page={page} />
    </StrictMode>,
  );
}

void start();
