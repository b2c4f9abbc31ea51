/** How long tests wait for a page: other tests may keep every core busy. */
export const PATIENCE_MS = 120_000;

/** What the timeline shows, once it has the width of its box: it is drawn first when that is not yet measured. */
export async function timeline(page) {
  await page.waitForFunction(() => {
    const canvas = document.querySelector(".gantt canvas");
    const width = Math.floor(parseFloat(getComputedStyle(canvas.parentElement).width));
    return canvas.width === Math.round(width * devicePixelRatio);
  });
  return page.evaluate(() => document.querySelector(".gantt canvas").toDataURL());
}
