import { LineChart, ScatterChart, TreemapChart } from "echarts/charts";
import {
  AriaComponent,
  DataZoomComponent,
  GridComponent,
  LegendComponent,
  MarkLineComponent,
  TooltipComponent,
} from "echarts/components";
import * as echarts from "echarts/core";
import type { EChartsCoreOption } from "echarts/core";
import { CanvasRenderer } from "echarts/renderers";
import { useEffect, useRef } from "react";

import type { Theme } from "./App";

echarts.use([
  LineChart,
  ScatterChart,
  TreemapChart,
  AriaComponent,
  DataZoomComponent,
  GridComponent,
  LegendComponent,
  MarkLineComponent,
  TooltipComponent,
  CanvasRenderer,
]);

interface Props {
  option: EChartsCoreOption;
  theme: Theme;
  label: string;
  height: number;
  /** Called with the name of a point that is clicked. */
  onClick?: (name: string) => void;
}

/** A chart of ECharts; its tooltips are drawn, not written as HTML, so that names stay text. Zooms outlive new data. */
export function Chart({ option, theme, label, height, onClick }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const drawn = useRef<echarts.ECharts>(null);
  const clicked = useRef(onClick);
  clicked.current = onClick;
  useEffect(() => {
    const chart = echarts.init(box.current, theme === "dark" ? "dark" : null, { renderer: "canvas" });
    chart.on("click", ({ name }) => clicked.current?.(name));
    drawn.current = chart;
    const observer = new ResizeObserver(() => chart.resize());
    observer.observe(box.current!);
    return () => {
      observer.disconnect();
      chart.dispose();
    };
  }, [theme]);
  useEffect(() => {
    drawn.current!.setOption(
      { backgroundColor: "transparent", animation: false, ...option },
      { replaceMerge: ["series"], lazyUpdate: true },
    );
  }, [option, theme]);
  return <div ref={box} className="chart" role="img" aria-label={label} style={{ height: `${height}px` }} />;
}
