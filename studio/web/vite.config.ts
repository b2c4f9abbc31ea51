import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

// One script and one style, which reports/page/html.py puts into the file; nothing is fetched, so nothing is split.
export default defineConfig({
  plugins: [react()],
  build: {
    outDir: "../../mm_autoparallel/reports/page/web",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    cssCodeSplit: false,
    assetsInlineLimit: 1_000_000,
    rollupOptions: {
      input: "src/main.tsx",
      output: { format: "iife", entryFileNames: "page.js", assetFileNames: "page.css" },
    },
  },
});
